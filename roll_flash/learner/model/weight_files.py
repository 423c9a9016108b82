"""Gives a sharded model its weights from safetensors files; each rank reads only the rows of each tensor that it keeps.

Where transformers joins stored tensors, such as experts, a rank reads the parts of its rows into their place: the
joined tensor exists nowhere. The model is created on the meta device, without memory, so that no process needs room for
all of it. The files are mapped: ranks on one node share what they read, in the page cache.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from roll_flash.cache import cache_root, open_lock
from roll_flash.errors import ModelError
from roll_flash.learner.model.stored_parts import StoredParts, stored_parts
from roll_flash.models.folder import weight_files

_READ_BYTES = 64 << 20
"""Most bytes of a stored tensor that are copied at a time, beside the shard itself."""


class WeightFiles:
    """The safetensors files of a folder, by tensor name. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if a file is missing or cannot be read."""
        self._folder = folder
        self._open = ExitStack()
        self._slices: dict[str, Any] = {}
        self._parts: dict[str, StoredParts] = {}
        """The stored tensors of each tensor of the model, by its name; see `why_not_by_shards`."""
        single = folder / "model.safetensors"
        for path in [single] if single.is_file() else [folder / name for name in weight_files(folder)]:
            try:
                file: Any = self._open.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                self._open.close()
                raise ModelError(f"{path}: the weights cannot be read ({error}); copy the file again") from None
            for name in file.keys():  # noqa: SIM118 - no mapping
                self._slices[name] = file.get_slice(name)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slices.clear()
        self._open.close()

    def why_not_by_shards(self, model: PreTrainedModel) -> str | None:
        """Return why `model`, created from this folder on the meta device, cannot be filled tensor by tensor; None if
        it can, and `fill` then fills it. Raises ModelError if a tensor has another shape than the model's."""
        parts = stored_parts(model, self._slices)
        if isinstance(parts, str):
            return parts
        state = model.state_dict(keep_vars=True)
        both = [name for name, source in model.all_tied_weights_keys.items() if {name, source} <= parts.keys()]
        if both:
            return f"its files hold {both[0]} although the config ties it to another tensor"
        found = {id(state[name]) for name in parts}
        missing = [name for name, tensor in state.items() if id(tensor) not in found]
        if missing:
            return f"its files hold {missing[0]} under another name"
        shapes = {name: lazily.get_shape() for name, lazily in self._slices.items()}
        for name, stored in parts.items():
            shape, wanted = stored.shape(shapes), list(state[name].shape)
            if shape != wanted:
                raise ModelError(
                    f"{self._folder}: {name} has the shape {shape}, the model's is {wanted}; look at config.json"
                )
        self._parts = parts
        return None

    def fill(self, policy: nn.Module, prefix: str, device: torch.device) -> int:
        """Give each tensor of `policy` on the meta device its values on `device`, in its own dtype; of a sharded
        parameter, the shard of this rank. `prefix` begins the names of the tensors of the files.

        Returns the bytes of the tensors that it created.
        """
        state = policy.state_dict(keep_vars=True)
        values: dict[int, Tensor] = {}
        for name, tensor in state.items():
            stored = name.removeprefix(prefix)
            if tensor.is_meta and id(tensor) not in values and stored in self._parts:
                values[id(tensor)] = self._read(stored, tensor, device)
        # Tied names get the same object, which keeps them tied.
        filled = {name: values[id(tensor)] for name, tensor in state.items() if id(tensor) in values}
        policy.load_state_dict(filled, strict=False, assign=True)
        return sum(local_part(tensor).nbytes for tensor in values.values())

    def _read(self, stored: str, empty: Tensor, device: torch.device) -> Tensor:
        if isinstance(empty, DTensor):
            # FSDP shards the first dimension; the last ranks may have fewer rows or none.
            shape, offset = compute_local_shape_and_global_offset(empty.shape, empty.device_mesh, empty.placements)
            local = torch.empty(shape, dtype=empty.dtype, device=device)
            self._copy(stored, offset[0], local)
            values: Tensor = DTensor.from_local(
                local, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
            )
        else:
            values = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            self._copy(stored, 0, values)
        return nn.Parameter(values, empty.requires_grad) if isinstance(empty, nn.Parameter) else values

    def _copy(self, name: str, first: int, target: Tensor) -> None:
        """Fill `target` with the rows of the tensor `name` of the model from `first` on."""
        parts = self._parts[name]
        if not target.shape:
            target.copy_(self._slices[parts.groups[0][0]][...])
            return
        lengths = {stored: self._slices[stored].get_shape()[0] for group in parts.groups for stored in group}
        for stored, begin, view in parts.rows(first, target, lengths):
            self._copy_rows(stored, begin, view)

    def _copy_rows(self, stored: str, first: int, target: Tensor) -> None:
        lazily = self._slices[stored]
        rows = max(1, _READ_BYTES * len(target) // max(1, target.numel() * 4))
        for start in range(0, len(target), rows):
            end = min(start + rows, len(target))
            target[start:end].copy_(lazily[first + start : first + end])


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one process of this user and machine after the other run the block, so that their whole models are never in
    memory together. The wait ends with the caller: the driver kills ranks after `learner.start_timeout_s`.

    Raises ModelError if the lock cannot be made."""
    path = cache_root() / f"load-{os.geteuid()}-{platform.node()}.lock"  # the folder may be shared
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error}; set ROLL_FLASH_CACHE to another folder") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough while a forked process has the file open too


def compute_buffers(model: PreTrainedModel) -> list[str]:
    """Give the buffers that no folder stores, such as RoPE frequencies, the values that transformers gives them: by the
    initialisation of all modules, which leaves parameters alone while these are on the meta device.

    Returns the names of buffers that are still without values.
    """
    names = [name for name, _ in model.named_non_persistent_buffers()]
    for name in names:
        path, _, attribute = name.rpartition(".")
        buffer = torch.empty_like(model.get_buffer(name), device="cpu")
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        model.get_submodule(path).register_buffer(attribute, buffer, persistent=False)
    for module in model.modules():  # all, as some initialise buffers of the modules below them
        module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()
    return [name for name in names if model.get_buffer(name).isnan().any()]


def halve_frozen(model: nn.Module) -> None:
    """Convert frozen parameters to bfloat16. FSDP gathers them in bfloat16 on a GPU, so its results stay the same."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of this rank; a tensor that is not sharded itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
