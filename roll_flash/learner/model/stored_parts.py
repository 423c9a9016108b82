"""Finds which tensors of a model's files make up each tensor in memory, and where they lie in it.

transformers 5 renames some tensors while it loads them, and joins others: all experts of a layer become one tensor. The
rules are its own (`_weight_conversions` of a loaded model), read here without loading any value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The stored tensors of one tensor in memory."""

    groups: tuple[tuple[str, ...], ...]
    """Names of stored tensors. Not `stacked`: all of them are its rows, one after the other. `stacked`: name i of each
    group is a part of row i; the groups lie side by side in its second dimension."""
    stacked: bool = False

    def shape(self, shapes: dict[str, list[int]]) -> list[int] | None:
        """Return the shape of the joined tensor, given those of the stored ones; None if they cannot be joined."""
        first = [shapes[group[0]] for group in self.groups]
        if any(shapes[name] != known for group, known in zip(self.groups, first, strict=True) for name in group):
            return None
        if len({len(group) for group in self.groups}) > 1 or len({tuple(shape[1:]) for shape in first}) > 1:
            return None
        if len(self.groups) == len(self.groups[0]) == 1 and not self.stacked:
            return first[0]
        length = sum(shape[0] for shape in first)
        return [len(self.groups[0]), length, *first[0][1:]] if self.stacked else [length, *first[0][1:]]

    def rows(self, first: int, target: Tensor, lengths: dict[str, int]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (stored name, its first row to read, view of `target` to fill) for `target`, the rows of the joined
        tensor from `first` on. `lengths`: the rows of each stored tensor."""
        if self.stacked:
            for row, view in enumerate(target, first):
                column = 0
                for group in self.groups:
                    length = lengths[group[row]]
                    yield group[row], 0, view[column : column + length]
                    column += length
            return
        begins = 0
        for (name,) in self.groups:
            low, high = max(first, begins), min(first + len(target), begins + lengths[name])
            if low < high:
                yield name, low - begins, target[low - first : high - first]
            begins += lengths[name]


def stored_parts(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, StoredParts] | str:
    """Return the parts of each tensor of `model`, created by transformers from a folder with the tensors `stored`;
    tensors that are not stored are left out. If transformers converts one in a way that cannot be read by parts: a text
    that says which."""
    transforms: Sequence[Any] = getattr(model, "_weight_conversions", None) or ()
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = model.state_dict(keep_vars=True)
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(stored, key=dot_natural_key):  # the order in which transformers joins them
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target in known:
            found.setdefault(target, {}).setdefault(pattern or "", []).append(name)
    parts = {}
    for target, by_pattern in found.items():
        made = _joined(by_pattern, of_pattern)
        if made is None:
            return f"transformers converts {target} in a way that cannot be read by shards"
        parts[target] = made
    return parts


def _joined(by_pattern: dict[str, list[str]], of_pattern: dict[str, WeightConverter]) -> StoredParts | None:
    if by_pattern.keys() == {""}:
        names = by_pattern[""]
        return StoredParts((tuple(names),)) if len(names) == 1 else None
    converter = of_pattern.get(next(iter(by_pattern)))
    if converter is None or set(converter.source_patterns) != by_pattern.keys() or len(converter.target_patterns) != 1:
        return None
    groups = tuple(tuple(by_pattern[pattern]) for pattern in converter.source_patterns)
    match [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]:
        case [(kind, 0)] if kind is MergeModulelist and len(groups) == 1:
            return StoredParts(groups, stacked=True)
        case [(kind, 0), (then, 1)] if kind is MergeModulelist and then is Concatenate:
            return StoredParts(groups, stacked=True)
        case [(kind, 0)] if kind is Concatenate and all(len(group) == 1 for group in groups):
            return StoredParts(groups)
    return None
