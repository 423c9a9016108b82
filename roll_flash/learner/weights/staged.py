"""Stages weights for the servers as a safetensors image in anonymous shared memory.

The memory is a memfd; other processes of the same user can open it as `/proc/<pid>/fd/<n>`, as fast as a file in
/dev/shm. It has no name in any file system: the kernel frees it when the learner ends, even after a crash, and the
size limit of /dev/shm (64 MiB in a container) does not apply.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import LearnerError, ModelError
from roll_flash.learner.model import lora
from roll_flash.weight_sync.checkpoint_format import as_stored, converts_one_by_one
from roll_flash.weight_sync.mapped_file import DTYPES
from roll_flash.weight_sync.page_locked import page_lock, unlock
from roll_flash.weight_sync.published import BASE_KEY, MODEL_FOLDER, SCALE, TAG, is_adapter, merged

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NO_TAG = b"0" * 32
"""Place in the header for the tag of each version."""


class WeightStage:
    """Holds the staged versions of one learner. The memory of a released version is reused for the next."""

    def __init__(
        self, model: nn.Module, tied: Iterable[str], dtype: torch.dtype, run: str, *, changed_only: bool = False
    ) -> None:
        """`tied`: names that share their tensor with another name, and that a checkpoint does not store.
        `changed_only`: omit untrained tensors, and stage adapters as factors instead of merged."""
        self._model = model
        self._skipped = frozenset(tied)
        self._changed_only = changed_only and any(not parameter.requires_grad for parameter in model.parameters())
        self._dtype = dtype
        self._run = run
        self._buffers = frozenset(name for name, _ in model.named_buffers())
        shapes = {name: (tensor, tensor.dtype) for name, tensor in self._stored_shapes()}
        # Widest dtypes first, so that each tensor begins at a multiple of its item size.
        ordered = dict(sorted(shapes.items(), key=lambda item: -item[1][1].itemsize))
        self._dtypes = {name: dtype for name, (_, dtype) in ordered.items()}
        self._header, self._offsets, self._size = _layout(ordered, self._metadata())
        self._tag_at = self._header.index(NO_TAG)
        self._full_size = sum(
            tensor.numel() * self._dtype_of(name, tensor).itemsize
            for name, tensor in model.state_dict().items()
            if name not in self._skipped and not is_adapter(name)
        )
        self._in_use: dict[str, tuple[int, mmap.mmap]] = {}
        self._spare: list[tuple[int, mmap.mmap]] = []
        self._on_gpu = is_on_gpu(model)
        self._locked: set[int] = set()
        """Descriptors of memory that is locked for the GPU."""

    def reserve(self) -> None:
        """Preallocate the memory of one version: a first write to new pages takes many times as long as a copy."""
        descriptor, memory = self._allocate(0)
        os.posix_fallocate(descriptor, 0, self._size)
        torch.frombuffer(memory, dtype=torch.uint8)[len(self._header) :].zero_()
        self._spare.append((descriptor, memory))

    def stage(self, version: int) -> StagedWeights:
        """Copy the weights. On return the copy is complete; later steps do not change it. A collective."""
        descriptor, memory = self._spare.pop() if self._spare else self._allocate(version)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        for name, tensor in self._tensors():
            start, end = self._offsets[name]
            target = buffer[start:end].view(self._dtypes[name]).view(tensor.shape)
            target.copy_(tensor, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        tag = secrets.token_hex(len(NO_TAG) // 2)
        memory[self._tag_at : self._tag_at + len(NO_TAG)] = tag.encode()
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._in_use[path] = (descriptor, memory)
        return StagedWeights(version=version, path=path, num_bytes=self._size, model_bytes=self._full_size, tag=tag)

    def gather(self) -> None:
        """Take part in the collectives of `stage` on all ranks except the first."""
        for _ in self._tensors():
            pass

    def release(self, weights: StagedWeights) -> None:
        """Release the memory of a version. Raises LearnerError for weights that are not (or no longer) staged."""
        entry = self._in_use.pop(weights.path, None)
        if entry is None:
            raise LearnerError(f"{weights.path}: version {weights.version} is not staged here, or was released before")
        if self._spare:
            self._free(entry)
        else:
            self._spare.append(entry)

    def close(self) -> None:
        for entry in (*self._in_use.values(), *self._spare):
            self._free(entry)
        self._in_use.clear()
        self._spare.clear()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and (sharded) tensors of the weights to stage."""
        frozen = {name for name, parameter in self._model.named_parameters() if not parameter.requires_grad}
        for name, tensor in self._model.state_dict().items():
            left_out = name in frozen if self._changed_only else is_adapter(name)
            if name not in self._skipped and not left_out:
                yield name, tensor

    def _stored_shapes(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._state():
            empty = torch.empty(tensor.shape, dtype=self._dtype_of(name, tensor), device="meta")
            yield from as_stored(self._model, {name: empty}).items()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors to stage, under the names of the model's folder. A collective."""
        if not self._changed_only:
            yield from stored_tensors(self._model, self._skipped)
            return
        for name, tensor in self._state():
            yield from as_stored(self._model, {name: _whole(tensor)}).items()

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the staged dtype. Adapter factors stay float32: rounding them would change their product."""
        if is_adapter(name):
            return torch.float32
        return tensor.dtype if name in self._buffers else self._dtype

    def _metadata(self) -> dict[str, str]:
        tag = {TAG: NO_TAG.decode()}
        if not self._changed_only:
            return tag
        layers = list(lora.adapters(self._model).values())
        return tag | {BASE_KEY: MODEL_FOLDER} | ({SCALE: str(layers[0].scale)} if layers else {})

    def _allocate(self, version: int) -> tuple[int, mmap.mmap]:
        descriptor = os.memfd_create(f"roll-flash-{self._run}-{version}")
        os.truncate(descriptor, self._size)
        memory = mmap.mmap(descriptor, self._size)
        memory[: len(self._header)] = self._header
        if self._on_gpu and page_lock(torch.frombuffer(memory, dtype=torch.uint8)):
            self._locked.add(descriptor)
        return descriptor, memory

    def _free(self, entry: tuple[int, mmap.mmap]) -> None:
        descriptor, memory = entry
        if descriptor in self._locked:
            self._locked.discard(descriptor)
            unlock(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
        memory.close()
        os.close(descriptor)


def is_on_gpu(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def _layout(
    tensors: dict[str, tuple[Tensor, torch.dtype]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Return header, byte range of each tensor in the file, and file size, in the safetensors format."""
    entries: dict[str, dict[str, object]] = {"__metadata__": dict(metadata)} if metadata else {}
    ranges: dict[str, tuple[int, int]] = {}
    position = 0
    for name, (tensor, dtype) in tensors.items():
        end = position + tensor.numel() * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        ranges[name] = (position, end)
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    first = len(header)
    return header, {name: (first + a, first + b) for name, (a, b) in ranges.items()}, first + position


def whole_tensors(model: nn.Module, skipped: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of a (sharded) model, with adapters merged into their weights. A collective."""
    adapted = lora.adapters(model)
    for name, tensor in model.state_dict().items():
        if name in skipped or is_adapter(name):
            continue
        whole = _whole(tensor)
        if (layer := adapted.get(name)) is not None:
            whole = merged(whole, _whole(layer.lora_a), _whole(layer.lora_b), layer.scale)
        yield name, whole


def stored_tensors(
    model: nn.Module, skipped: Collection[str] = (), dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield `whole_tensors` under the names and in the shapes of the model's folder, as servers expect. A collective.

    Parameters are converted to `dtype`, if given. Buffers are not: layers that compute in bfloat16 round only
    parameters, and rounding a router's bias could change the choice of experts.
    """
    buffers = frozenset(name for name, _ in model.named_buffers())
    for name, tensor in whole_tensors(model, skipped):
        kept = tensor if dtype is None or name in buffers else tensor.to(dtype)
        yield from as_stored(model, {name: kept}).items()


def check_can_be_staged(model: nn.Module, folder: object) -> None:
    """Raises ModelError if the model's folder stores several of its tensors as one."""
    if not converts_one_by_one(model, model.state_dict()):
        raise ModelError(f"{folder}: stores tensors of {type(model).__name__} joined; such weights cannot be published")


def _whole(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
