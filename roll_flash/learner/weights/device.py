"""Stages weights as a copy on a rank's GPU, for GPU servers that use vLLM's own transfer engines.

`ipc`: servers on the same GPUs open the copy by its CUDA handle, without any transfer. `nccl`: the first rank sends the
copy to one server at a time, over a separate group per server, on any machine. Both use the sender code of vLLM
(`vllm.distributed.weight_transfer`), so that sender and receiver agree on the chunk layout.
"""

from __future__ import annotations

import base64
import pickle
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import LearnerError
from roll_flash.learner.weights.staged import stored_tensors, whole_tensors

Handle = dict[str, Any]
"""GPU UUID -> arguments with which another process opens a tensor."""


class DeviceWeightStage:
    """GPU counterpart of `WeightStage`. Stages whole models with merged adapters: vLLM's engines load only those."""

    def __init__(
        self, model: nn.Module, tied: Iterable[str], dtype: torch.dtype, transfer: Literal["nccl", "ipc"], rank: int
    ) -> None:
        self._model = model
        self._skipped = frozenset(tied)
        self._dtype = dtype
        self._transfer = transfer
        # With ipc every rank keeps a copy on its GPU, for the server on the same GPU.
        self._keeps = rank == 0 or transfer == "ipc"
        self._staged: dict[str, dict[str, Tensor]] = {}
        self._groups: dict[str, Any] = {}

    def reserve(self) -> None:
        """Do nothing: GPU memory needs no reservation."""

    def stage(self, version: int) -> StagedWeights:
        """Copy the weights. On return the copy is complete; later steps do not change it. A collective."""
        tensors = {}
        for name, tensor in stored_tensors(self._model, self._skipped, self._dtype):
            if self._keeps:
                tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        # Widest dtypes first: vLLM packs tensors contiguously; each must begin at a multiple of its item size.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # other processes do not wait for our stream
        info = _described(tensors)
        if self._transfer == "ipc":
            info["ipc_handles"] = [_handle(tensor) for tensor in tensors.values()]
        key = f"{self._transfer}:{version}"
        self._staged[key] = tensors
        size = sum(tensor.nbytes for tensor in tensors.values())
        return StagedWeights(version, key, size, size, update_info=info)

    def gather(self) -> None:
        """Take part in the collectives of `stage` on ranks that keep no copy."""
        for _ in whole_tensors(self._model, self._skipped):
            pass

    def release(self, weights: StagedWeights) -> None:
        if self._staged.pop(weights.path, None) is None:
            raise LearnerError(f"version {weights.version} is not staged here, or was released before")
        if self._transfer == "ipc" and torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def join(self, endpoint: str, host: str, port: int, world_size: int) -> None:
        """Open the group with one server, as rank 0, and wait for the server to join. `nccl` only."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        address = {"master_address": host, "master_port": port, "world_size": world_size}
        self._leave(endpoint)
        self._groups[endpoint] = trainer_init(address)

    def send(self, endpoint: str, weights: StagedWeights) -> None:
        """Send a staged version to a receiving server; the transfer is complete on return."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(self._staged[weights.path].items()),
            group=self._groups[endpoint],
            src=0,
            post_iter_func=lambda item: item[1],
        )
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        for endpoint in list(self._groups):
            self._leave(endpoint)
        self._staged.clear()

    def _leave(self, endpoint: str) -> None:
        group = self._groups.pop(endpoint, None)
        if group is not None:
            group.destroy()


def free_port(host: str) -> int:
    """Return a free port at which servers can reach this process."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def merge_handles(staged: list[StagedWeights]) -> StagedWeights:
    """Merge the IPC handles that the ranks staged into one version, in the form that vLLM accepts over HTTP."""
    first = staged[0]
    info = dict(first.update_info or {})
    if "ipc_handles" not in info:
        return first
    of_ranks: list[list[Handle]] = [(weights.update_info or {})["ipc_handles"] for weights in staged]
    merged = [
        {uuid: args for handle in handles for uuid, args in handle.items()} for handles in zip(*of_ranks, strict=True)
    ]
    del info["ipc_handles"]
    info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(merged)).decode()
    return replace(first, update_info=info)


def _described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _handle(tensor: Tensor) -> Handle:
    open_tensor: tuple[Callable[..., Tensor], tuple[Any, ...]] = reduce_tensor(tensor)
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): open_tensor[1]}
