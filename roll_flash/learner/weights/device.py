"""Stages weights as a copy on a rank's GPU, for GPU servers that use vLLM's own transfer engines.

`ipc`: servers on the same GPUs open the copy by its CUDA handle, without any transfer. `nccl`: the first rank sends the
copy to one server at a time, over a separate group per server, on any machine. Both use the sender code of vLLM
(`vllm.distributed.weight_transfer`), so that sender and receiver agree on the chunk layout.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError, LearnerError
from roll_flash.learner.weights.server_group import NcclGroup, ServerGroup
from roll_flash.learner.weights.staged import stored_tensors, whole_tensors

Handle = dict[str, Any]
"""GPU UUID -> arguments with which another process opens a tensor."""
BUFFER_BYTES = 256 * 2**20
BUFFERS = 2
"""Buffers of a transfer, on both sides. Servers leave little of their GPU's memory free."""


class DeviceWeightStage:
    """GPU counterpart of `WeightStage`. Stages whole models with merged adapters: vLLM's engines load only those.

    There is one copy, reused by every version. CUDA counts the readers of exported memory and does not free it while
    one seems left; memory that is exported once and kept is never counted wrongly, however many servers read it.
    """

    def __init__(
        self, model: nn.Module, tied: Iterable[str], dtype: torch.dtype, transfer: Literal["nccl", "ipc"]
    ) -> None:
        self._model = model
        self._skipped = frozenset(tied)
        self._dtype = dtype
        self._transfer = transfer
        self._copy: dict[str, Tensor] = {}
        self._info: dict[str, Any] = {}
        self._staged = ""
        """Name of the version in the copy; empty if it was released."""
        self._groups: dict[str, ServerGroup] = {}

    def reserve(self) -> None:
        """Import what sends, which takes seconds. GPU memory needs no reservation."""
        if self._transfer == "nccl":
            import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401

    def stage(self, version: int) -> StagedWeights:
        """Copy the weights: on the first rank, with `ipc` on every rank, for the server on the same GPU. On return the
        copy is complete; later steps do not change it. A collective.

        Raises LearnerError if the last version was not released.
        """
        if self._staged:
            raise LearnerError(f"{self._staged} must be released before version {version} is staged")
        for name, tensor in stored_tensors(self._model, self._skipped, self._dtype):
            if name in self._copy:
                self._copy[name].copy_(tensor)
            else:
                self._copy[name] = tensor.clone(memory_format=torch.contiguous_format)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # other processes do not wait for our stream
        self._info = self._info or self._describe()
        self._staged = f"{self._transfer}:{version}"
        size = sum(tensor.nbytes for tensor in self._copy.values())
        return StagedWeights(version, self._staged, size, size, update_info=self._info)

    def gather(self) -> None:
        """Take part in the collectives of `stage` on ranks that keep no copy."""
        for _ in whole_tensors(self._model, self._skipped):
            pass

    def release(self, weights: StagedWeights) -> None:
        self._check_staged(weights)
        self._staged = ""

    def offer(self, endpoint: str, world_size: int) -> dict[str, Any]:
        """Return what vLLM's `nccl` engine needs to join a new group with a server of `world_size` workers."""
        self.end(endpoint)
        unique_id = new_unique_id()
        work = partial(open_nccl_group, unique_id, 1 + world_size, self._device)
        self._groups[endpoint] = ServerGroup(endpoint, work)
        return {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": 1 + world_size,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": BUFFERS,
        }

    def join(self, endpoint: str, timeout_s: float) -> None:
        """Wait for the server to join the group that was offered. Raises InferenceError if it does not."""
        self._group(endpoint).join(timeout_s)

    def send(self, endpoint: str, weights: StagedWeights, timeout_s: float) -> None:
        """Send a staged version to a receiving server; the transfer is complete on return. Raises InferenceError if the
        server does not take it, LearnerError if the version is not staged."""
        self._check_staged(weights)
        self._group(endpoint).send(self._copy.items(), partial(_broadcast, self._device), timeout_s)

    def end(self, endpoint: str) -> None:
        """End the group with a server, and what it is doing in other threads."""
        group = self._groups.pop(endpoint, None)
        if group is not None:
            group.end()

    def close(self) -> None:
        for endpoint in list(self._groups):
            self.end(endpoint)
        self._copy.clear()
        self._staged = ""

    def _group(self, endpoint: str) -> ServerGroup:
        if endpoint not in self._groups:
            raise InferenceError(f"{endpoint} has no group with the learner, or left it")
        return self._groups[endpoint]

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _check_staged(self, weights: StagedWeights) -> None:
        if weights.path != self._staged:
            raise LearnerError(f"version {weights.version} is not staged here, or was released before")

    def _describe(self) -> dict[str, Any]:
        """Describe the copy to vLLM, in the order in which it is sent."""
        # Widest dtypes first: vLLM packs tensors contiguously; each must begin at a multiple of its item size.
        self._copy = dict(sorted(self._copy.items(), key=lambda item: -item[1].itemsize))
        info = _described(self._copy)
        if self._transfer == "ipc":
            info["ipc_handles"] = [_handle(tensor) for tensor in self._copy.values()]
        return info


def new_unique_id() -> bytes:
    """Return NCCL's name for a new group, with the address at which its processes meet."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def open_nccl_group(unique_id: bytes, world_size: int, device: torch.device) -> NcclGroup:
    """Wait for all processes of a group, whose rank 0 this is."""
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    torch.cuda.set_device(device)
    return NcclGroup(uid_init_process_group(unique_id, 0, world_size, device))


def _broadcast(device: torch.device, tensors: Any, group: NcclGroup) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    torch.cuda.set_device(device)  # of this thread
    packed_nccl_broadcast_producer(
        iterator=tensors,
        group=group,
        src=0,
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=BUFFER_BYTES,
        num_buffers=BUFFERS,
    )


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
