"""Samplers: which of the ready units a consumer gets next, and how they are spread over ranks. Pure and stateless.

All of them take the oldest unit whenever they take anything, so nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Protocol

from roll_flash.errors import StreamError
from roll_flash.stream.rows import Key, Situation, Unit

Parts = list[list[Key]]
"""The keys for each rank; consumers without ranks get one list."""


class Sampler(Protocol):
    """Chooses among the units that are ready, oldest first."""

    @property
    def whole_groups(self) -> bool:
        """Units are complete groups, not rows."""
        ...

    @property
    def ranks(self) -> int:
        """How many parts a choice has."""
        ...

    def choose(self, units: Sequence[Unit], situation: Situation) -> Parts | None:
        """Some of `units` (never empty), or None to wait for more. It must take some when the situation is final."""
        ...


@dataclass(frozen=True, slots=True)
class Sequential:
    """The next `count` units or fewer, as soon as there is one."""

    count: int = 1
    whole_groups: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        _require_positive("count", self.count)

    def choose(self, units: Sequence[Unit], situation: Situation) -> Parts | None:
        return [[unit.key for unit in islice(units, self.count)]]


def Groups(count: int = 1) -> Sequential:
    """The next `count` complete groups or fewer, as soon as there is one."""
    return Sequential(count, whole_groups=True)


@dataclass(frozen=True, slots=True)
class TokenBalanced:
    """Micro-batches of at most `max_tokens`, and of equal size when all that is left is known.

    Takes what is there at once, unless `min_tokens` says to wait for that many while more may come. A unit that is
    larger than `max_tokens` comes alone.
    """

    max_tokens: int
    min_tokens: int = 0
    whole_groups: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        _require_positive("max_tokens", self.max_tokens)

    def choose(self, units: Sequence[Unit], situation: Situation) -> Parts | None:
        if not (situation.is_final or situation.is_pressed) and sum(unit.tokens for unit in units) < self.min_tokens:
            return None
        return [[unit.key for unit in candidates(units, self.max_tokens, situation)]]


@dataclass(frozen=True, slots=True)
class RankAware:
    """One micro-batch for each rank at a time, so that all ranks run the same number of passes.

    Tokens are spread such that the totals of all ranks stay equal over a partition. Waits for a unit per rank; only at
    the end of a partition a rank may get an empty part (an idle pass). No part is larger than `max_tokens`, unless a
    single unit is.
    """

    ranks: int
    max_tokens: int
    whole_groups: bool = False

    def __post_init__(self) -> None:
        _require_positive("ranks", self.ranks)
        _require_positive("max_tokens", self.max_tokens)

    def choose(self, units: Sequence[Unit], situation: Situation) -> Parts | None:
        budget = self.ranks * self.max_tokens
        if not (situation.is_final or situation.is_pressed) and len(units) < self.ranks:
            return None
        chosen = candidates(units, budget, situation)
        if not situation.is_final:  # large units may fill the budget before every rank has one
            keys = {unit.key for unit in chosen}
            spare = (unit for unit in units if unit.key not in keys)
            chosen += islice(spare, max(0, self.ranks - len(chosen)))
        return self._spread(chosen, situation)

    def _spread(self, chosen: Sequence[Unit], situation: Situation) -> Parts:
        oldest, *others = chosen
        given = situation.given or (0,) * self.ranks
        parts: Parts = [[] for _ in range(self.ranks)]
        tokens = [0] * self.ranks
        if not situation.in_order:
            others.sort(key=lambda unit: -unit.tokens)
        queue = [oldest, *others]
        for index, unit in enumerate(queue):
            empty = [rank for rank in range(self.ranks) if not parts[rank]]
            roomy = [rank for rank in range(self.ranks) if tokens[rank] + unit.tokens <= self.max_tokens]
            open_to = empty if len(queue) - index <= len(empty) else sorted({*empty, *roomy})
            if open_to:
                rank = min(open_to, key=lambda rank: given[rank] + tokens[rank])
                parts[rank].append(unit.key)
                tokens[rank] += unit.tokens
            elif situation.in_order:
                break
        return parts


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
