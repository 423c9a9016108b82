"""Our part inside vLLM's processes: a weight-transfer engine that reads a safetensors file in shared memory.

vLLM loads `register` in each of its processes (entry point group `vllm.general_plugins`). It tells the factory where
the engine would be found, names semaphores so that our guard can clean them up, and has streamed answers tell weight
versions in every piece, and experts packed at every load. The engine itself is `roll_flash.weight_sync.shared_memory`.
"""

from __future__ import annotations

from roll_flash.inference.vllm.experts import pack_experts_again
from roll_flash.inference.vllm.stream_versions import tell_versions_early
from roll_flash.processes.supervise import claim_semaphores

BACKEND = "shm"


def register() -> None:
    """Make the backend `shm` known to vLLM. Safe to call more than once, and where no weights are transferred."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    claim_semaphores()
    tell_versions_early()
    pack_experts_again()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "roll_flash.weight_sync.shared_memory", "SharedMemoryWeightTransferEngine"
        )
