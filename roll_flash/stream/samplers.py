"""Samplers: which of the ready units a consumer gets next. Pure and stateless.

All of them take the oldest unit, as soon as there is one, so nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from roll_flash.errors import StreamError
from roll_flash.stream.rows import Key, Situation, Unit


class Sampler(Protocol):
    """Chooses among the units that are ready, oldest first."""

    @property
    def whole_groups(self) -> bool:
        """Units are complete groups, not rows."""
        ...

    def choose(self, units: Sequence[Unit], situation: Situation) -> list[Key]:
        """The keys of some of `units`, never none: a sampler that waits for more could wait for ever."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """The next `count` units or fewer, as soon as there is one."""

    count: int = 1
    whole_groups: bool = False

    def __post_init__(self) -> None:
        _require_positive("count", self.count)

    def choose(self, units: Sequence[Unit], situation: Situation) -> list[Key]:
        return [unit.key for unit in units[: self.count]]


def Groups(count: int = 1) -> Sequential:
    """The next `count` complete groups or fewer, as soon as there is one."""
    return Sequential(count, whole_groups=True)


@dataclass(frozen=True, slots=True)
class TokenBalanced:
    """Micro-batches of at most `max_tokens`, and of equal size when all that is left is known.

    Takes what is there at once. A unit that is larger than `max_tokens` comes alone.
    """

    max_tokens: int
    whole_groups: bool = False

    def __post_init__(self) -> None:
        _require_positive("max_tokens", self.max_tokens)

    def choose(self, units: Sequence[Unit], situation: Situation) -> list[Key]:
        return [unit.key for unit in candidates(units, self.max_tokens, situation)]


def candidates(units: Sequence[Unit], max_tokens: int, situation: Situation) -> list[Unit]:
    """What makes one choice of at most `max_tokens`: equal ones when the rest is known, else as full as can be."""
    if situation.in_order:
        total = sum(unit.tokens for unit in units)
        return fill(units, ceil(total / ceil(total / max_tokens)) if situation.is_final else max_tokens, in_order=True)
    return equal_bins(units, max_tokens)[0] if situation.is_final else fill(units, max_tokens)


def fill(units: Sequence[Unit], max_tokens: int, *, in_order: bool = False) -> list[Unit]:
    """The oldest unit, and in order whatever still fits beside it; `in_order` stops at the first that does not."""
    chosen: list[Unit] = []
    tokens = 0
    for unit in units:
        if not chosen or tokens + unit.tokens <= max_tokens:
            chosen.append(unit)
            tokens += unit.tokens
        elif in_order:
            break
        if tokens >= max_tokens:
            break
    return chosen


def equal_bins(units: Sequence[Unit], max_tokens: int) -> list[list[Unit]]:
    """All units in as few bins of at most `max_tokens` as longest-first finds, nearly equal, oldest first.

    A unit larger than `max_tokens` has a bin of its own.
    """
    total = sum(unit.tokens for unit in units)
    count = max(1, ceil(total / max_tokens))
    longest_first = sorted(units, key=lambda unit: -unit.tokens)
    while True:
        bins = _spread_evenly(longest_first, count)
        if all(len(bin) <= 1 or sum(unit.tokens for unit in bin) <= max_tokens for bin in bins):
            break
        count += 1
    place = {unit.key: index for index, unit in enumerate(units)}
    return sorted((sorted(bin, key=lambda unit: place[unit.key]) for bin in bins), key=lambda bin: place[bin[0].key])


def _spread_evenly(longest_first: Sequence[Unit], count: int) -> list[list[Unit]]:
    bins: list[list[Unit]] = [[] for _ in range(min(count, len(longest_first)))]
    tokens = [0] * len(bins)
    for unit in longest_first:
        index = tokens.index(min(tokens))
        bins[index].append(unit)
        tokens[index] += unit.tokens
    return bins


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise StreamError(f"{name} of a sampler must be at least 1, not {value}")
