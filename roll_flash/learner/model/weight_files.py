"""Reads the weights of a model folder piece by piece, in the form that the model has in memory.

A model is created on the meta device, without memory. Then each rank reads only the rows of each tensor that it keeps:
no process needs room for the whole model. Files are mapped, so several ranks of a node share one copy of what they
read, in the page cache.

Names and forms in a folder may differ from those in memory; transformers converts them when it loads a model, and its
rules are used here. The experts of a layer, which folders keep apart, are joined for the experts of this rank alone.
Any other conversion needs the whole tensor for a moment; `needs_whole_tensors` names the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from roll_flash.errors import ModelError
from roll_flash.models.prepare import weight_files

_COMPARED_ROWS = 1024
"""Rows that are compared at a time, to find whether two stored tensors are equal."""


@dataclass(slots=True)
class _Conversion:
    """Stored tensors that become one or several tensors of the model: (name, pattern that it matched), in order."""

    converter: WeightConverter
    first_target: str
    stored: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.stored:
            if name in tensors:
                converter.add_tensor(self.first_target, name, pattern, tensors[name])  # type: ignore[arg-type]
        found = converter.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def joins_experts(self) -> bool:
        """Return true if row i of the result is made of the i-th stored tensor of each pattern."""
        first, *others = self.converter.operations
        joins = isinstance(first, MergeModulelist) and first.dim == 0
        return joins and all(isinstance(each, Concatenate) and each.dim > 0 for each in others)

    def of_rows(self, start: int, end: int) -> list[str]:
        """Return the stored tensors of experts `start` to `end`."""
        of_pattern: dict[str, list[str]] = {}
        for name, pattern in self.stored:
            of_pattern.setdefault(pattern, []).append(name)
        return [name for names in of_pattern.values() for name in names[start:end]]


class WeightFiles:
    """The weights of a folder for `model`, whose own tensors may be on the meta device. A context manager."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Raises ModelError if the folder lacks a tensor of the model, or has it in another shape."""
        self._model = model
        self._open = ExitStack()
        self._slices: dict[str, Any] = {}
        self._direct: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        try:
            self._map(folder)
            self._resolve()
            self._check(folder)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slices.clear()
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._direct or name in self._converted

    @property
    def needs_whole_tensors(self) -> list[str]:
        """Names of the model's tensors of which a rank must read more than it keeps."""
        return [name for name, conversion in self._converted.items() if not conversion.joins_experts()]

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Return rows `start` to `end` of a tensor of the model, as stored: bfloat16 stays so. The result may be mapped
        from the file: do not write to it."""
        if (stored := self._direct.get(name)) is not None:
            return self._rows(stored, start, end)
        conversion = self._converted[name]
        if end is not None and start < end and conversion.joins_experts():
            names, first = conversion.of_rows(start, end), start
        else:
            names, first = [stored for stored, _ in conversion.stored], 0
        whole = conversion.convert(self._model, {stored: self._rows(stored) for stored in names})[name]
        return whole[start - first : None if end is None else end - first]

    def tie_what_is_equal(self) -> None:
        """Tie the tensors that the config ties and the folder stores twice, if they are equal, as transformers does;
        others stay apart. It cannot compare them without their values."""
        tied = self._model.all_tied_weights_keys
        for target, source in list(tied.items()):
            if self._model.get_parameter(target) is self._model.get_parameter(source):
                continue
            if self._are_equal(target, source):
                parent, _, leaf = target.rpartition(".")
                setattr(self._model.get_submodule(parent), leaf, self._model.get_parameter(source))
            else:
                del tied[target]

    def _map(self, folder: Path) -> None:
        single = folder / "model.safetensors"
        for path in [single] if single.is_file() else [folder / name for name in weight_files(folder)]:
            file: Any = self._open.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for name in file.keys():  # noqa: SIM118
                self._slices[name] = file.get_slice(name)

    def _resolve(self) -> None:
        """Find the stored tensors of each tensor of the model, with the rules by which transformers loaded it."""
        rules = getattr(self._model, "_weight_conversions", None) or []
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        state = self._model.state_dict()
        prefix = self._model.base_model_prefix
        conversions: dict[str, _Conversion] = {}
        for stored in sorted(self._slices, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
            if name not in state and stored in state:
                name, pattern = rename_source_key(stored, [], [], prefix, state)
            if name not in state:
                continue
            if pattern is None:
                self._direct[name] = stored
            else:
                group = conversions.setdefault(name, _Conversion(by_pattern[pattern], name))
                group.stored.append((stored, pattern))
        for conversion in conversions.values():
            shapes = {stored: self._empty(stored) for stored, _ in conversion.stored}
            self._converted |= dict.fromkeys(conversion.convert(self._model, shapes), conversion)

    def _check(self, folder: Path) -> None:
        state = self._model.state_dict(keep_vars=True)
        found = {id(tensor) for name, tensor in state.items() if name in self}
        missing = [name for name, tensor in state.items() if id(tensor) not in found]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(state)} tensors of {type(self._model).__name__} are not in its "
                f"files, such as {missing[0]}; copy the folder again, or look at config.json"
            )
        for name, stored in self._direct.items():
            shape = self._slices[stored].get_shape()
            if list(shape) != list(state[name].shape):
                raise ModelError(f"{folder}: {name} has the shape {shape}, the model's is {list(state[name].shape)}")

    def _rows(self, stored: str, start: int = 0, end: int | None = None) -> Tensor:
        lazily = self._slices[stored]
        rows: Tensor = lazily[start:end] if lazily.get_shape() else lazily[...]
        return rows

    def _empty(self, stored: str) -> Tensor:
        return torch.empty(self._slices[stored].get_shape(), device="meta")

    def _are_equal(self, first: str, second: str) -> bool:
        rows = self._model.get_parameter(first).shape[0]
        starts = range(0, rows, _COMPARED_ROWS)
        return all(
            torch.equal(self.read(first, start, start + _COMPARED_ROWS), self.read(second, start, start + _COMPARED_ROWS))
            for start in starts
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """One tensor of a model and the modules that hold it, each with the attribute's name. Tied tensors have several."""

    name: str
    tensor: Tensor
    holders: list[tuple[nn.Module, str]]

    def put(self, tensor: Tensor) -> None:
        for module, attribute in self.holders:
            slots: Any = module._parameters if attribute in module._parameters else module._buffers
            slots[attribute] = tensor


def read_weights(model: nn.Module, files: WeightFiles, device: torch.device) -> None:
    """Give each tensor of `model` that is on the meta device its values, on `device` and in its own dtype; of a sharded
    parameter, the shard of this rank."""
    for place in _empty_places(model, files):
        place.put(_read(place, files, device))


@contextmanager
def weights_on_demand(model: nn.Module, files: WeightFiles, layers: list[nn.Module]) -> Iterator[None]:
    """Inside the block `model`, which is on the meta device, can be computed in the dtype of its parameters on the CPU.
    Of its `layers`, only the one that is being computed is in memory."""
    in_layers = {id(tensor) for layer in layers for tensor in layer.state_dict(keep_vars=True).values()}
    places = _empty_places(model, files)
    cpu = torch.device("cpu")

    def fill(found: list[_Place]) -> None:
        for place in found:
            place.put(_read(place, files, cpu, copies=False))

    def empty(found: list[_Place]) -> None:
        for place in found:
            place.put(place.tensor)

    with ExitStack() as stack:
        for layer in layers:
            ids = {id(tensor) for tensor in layer.state_dict(keep_vars=True).values()}
            own = [place for place in places if id(place.tensor) in ids]
            hooks = (
                layer.register_forward_pre_hook(lambda *_, own=own: fill(own)),  # type: ignore[misc]
                layer.register_forward_hook(lambda *_, own=own: empty(own), always_call=True),  # type: ignore[misc]
            )
            for hook in hooks:
                stack.callback(hook.remove)
        rest = [place for place in places if id(place.tensor) not in in_layers]
        stack.callback(empty, rest)
        fill(rest)
        yield


def _empty_places(model: nn.Module, files: WeightFiles) -> list[_Place]:
    """Return a place for each tensor on the meta device, with a name that `files` knows."""
    places: dict[int, _Place] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            continue
        path, _, attribute = name.rpartition(".")
        holder = (model.get_submodule(path), attribute)
        known = places.get(id(tensor))
        places[id(tensor)] = _Place(
            known.name if known is not None and known.name in files else name,
            tensor,
            [holder] if known is None else [*known.holders, holder],
        )
    return list(places.values())


def _read(place: _Place, files: WeightFiles, device: torch.device, *, copies: bool = True) -> Tensor:
    empty = place.tensor
    if isinstance(empty, DTensor):
        local = _read_shard(place.name, empty, files, device)
        values: Tensor = DTensor.from_local(
            local, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )
    else:
        values = files.read(place.name).to(device, empty.dtype, copy=copies).contiguous()
    return nn.Parameter(values, empty.requires_grad and copies) if isinstance(empty, nn.Parameter) else values


def _read_shard(name: str, parameter: DTensor, files: WeightFiles, device: torch.device) -> Tensor:
    """Return this rank's rows; FSDP shards the first dimension, the last ranks may have fewer rows or none."""
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if 0 in shape:
        return torch.empty(shape, dtype=parameter.dtype, device=device)
    rows = files.read(name, offset[0], offset[0] + shape[0])
    return rows.to(device, parameter.dtype, copy=True).contiguous()
