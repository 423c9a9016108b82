"""vLLM's side of a publication: new weights from a safetensors file in shared memory into the running model.

Runs inside vLLM's worker process. A file that does not fit the model is refused before the model is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

TIED_HEAD = "lm_head.weight"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand: each update names its file."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A safetensors file with every tensor of the checkpoint, under the names of the model folder."""


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Layerwise reload, as vLLM's own checkpoint-format engines do it, and the repair of tied heads on CPU."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self._shapes = _shapes_in_folder(Path(self.model_config.model))

    def start_weight_update(self) -> None:
        """Nothing: the reload begins when the file is known to fit, so that a bad one leaves the model whole."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Raises ValueError, with the model unchanged, if the file's names or shapes are not the model's."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.model
        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            is_tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
            _check(_shapes(file), self._shapes, is_tied)
            with self.device:
                initialize_layerwise_reload(model)
                try:
                    model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
                finally:
                    finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_heads(model)

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` leaves a complete model."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the output head of a tied embedding again (vLLM on CPU).

    vLLM computes logits with a packed copy of the embedding. A reload replaces the embedding and leaves the copy, so
    that logprobs are silently those of an older head (off by up to 1.0 after one update).
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _shapes_in_folder(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt", device="cpu") as file:
            shapes.update(_shapes(file))
    return shapes


def _shapes(file: Any) -> dict[str, list[int]]:
    return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _check(got: dict[str, list[int]], expected: dict[str, list[int]], is_tied: bool) -> None:
    """A head that is tied to the embedding may be left out or stored beside it; everything else must match."""
    optional = {TIED_HEAD} if is_tied else set()
    missing = sorted(expected.keys() - got.keys() - optional)
    unknown = sorted(got.keys() - expected.keys() - optional)
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit the model: {len(missing)} missing {missing[:2]}, unknown {unknown[:2]}"
        )
    for name, shape in got.items():
        if shape != expected.get(name, shape):
            raise ValueError(f"the weights do not fit the model: {name} is {shape}, not {expected[name]}")
