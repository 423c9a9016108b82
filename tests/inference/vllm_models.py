"""vLLM's own models in this process, without a server: built for one GPU of a group, and loaded by vLLM's loaders.

The group is a stand-in that knows its size and the place in it; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

GROUPS = ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_INNER_DP_WORLD", "_EPLB")


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self.world_size = size
        self.rank = self.rank_in_group = self.local_rank = rank
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.ranks = list(range(size))
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        self.device_communicator = None


@contextmanager
def place_in_group(size: int, rank: int) -> Iterator[None]:
    """Let vLLM see a tensor-parallel group of `size` GPUs, of which this is number `rank`."""
    from vllm.distributed import parallel_state

    with pytest.MonkeyPatch.context() as patch:
        for name in GROUPS:
            split = name in ("_TP", "_WORLD", "_EP")
            patch.setattr(parallel_state, name, Group(size, rank) if split else Group(1, 0), raising=False)
        yield


def build(folder: Path, *, size: int = 1, rank: int = 0, dtype: str = "float32") -> nn.Module:
    """A model with the weights of `folder`, as it is before vLLM prepares them for a device: on GPUs, where vLLM leaves
    linear layers as they are, that is how it computes."""
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = VllmConfig(model_config=ModelConfig(model=str(folder), dtype=dtype))
    config.parallel_config = ParallelConfig(tensor_parallel_size=size) if size == 1 else config.parallel_config
    with place_in_group(size, rank), set_current_vllm_config(config), set_default_torch_dtype(getattr(torch, dtype)):
        model = initialize_model(vllm_config=config).requires_grad_(False)
        load(model, tensors_of(folder))
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def load(model: Any, tensors: Mapping[str, Tensor]) -> None:
    model.load_weights(iter(tensors.items()))


def prepare_for_device(model: nn.Module) -> None:
    """As vLLM does after loading, here for the CPU: it packs weights."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
