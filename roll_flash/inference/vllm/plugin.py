"""Plug-in for vLLM's processes: registers a weight-transfer engine that reads a safetensors file in shared memory.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It registers the engine,
names semaphores so that our guard can clean them up, ends the process when the guard is killed, and installs patches:
weight versions in every streamed piece, experts packed and copied weights refreshed at every load, numbers of MIG
slices, rotary positions of latent attention, ranks of tokens, the engine's start on CPU and the server's socket. The
engine itself is `roll_flash.weight_sync.shared_memory`.
"""

from __future__ import annotations

from roll_flash.inference.vllm.fork import patch_engine_start
from roll_flash.inference.vllm.mig import patch_mig_slices
from roll_flash.inference.vllm.patches import (
    patch_copied_weights,
    patch_expert_reload,
    patch_rotary_positions,
    patch_server_socket,
    patch_streamed_versions,
    patch_token_ranks,
)
from roll_flash.processes.supervise import claim_semaphores, end_with_guard
from roll_flash.watchdog.stacks import register_stacks

BACKEND = "shm"


def register() -> None:
    """Register the backend `shm` in vLLM and install the patches. Safe to call more than once, or without transfers."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    claim_semaphores()
    end_with_guard()
    register_stacks()
    patch_streamed_versions()
    patch_expert_reload()
    patch_copied_weights()
    patch_mig_slices()
    patch_rotary_positions()
    patch_token_ranks()
    patch_engine_start()
    patch_server_socket()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "roll_flash.weight_sync.shared_memory", "SharedMemoryWeightTransferEngine"
        )
