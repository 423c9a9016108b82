"""What one consumer has still to get: units in the order they were put, and which of them are ready."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from roll_flash.stream.rows import Consumer, Key, Unit

WINDOW = 256
"""Units that a sampler sees at once: the cost of a claim must not grow with what waits."""


class ConsumerQueue:
    """A unit is waiting from when it was put until it is claimed or dropped, and ready when it lacks nothing."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self._needs = frozenset(consumer.columns)
        self._waiting: dict[int, OrderedDict[Key, None]] = {}
        self._ready: dict[int, OrderedDict[Key, Unit]] = {}

    @property
    def whole_groups(self) -> bool:
        return self.consumer.sampler.whole_groups

    def is_served_by(self, columns: set[str]) -> bool:
        return self._needs <= columns

    def add(self, partition: int, key: Key) -> None:
        self._waiting.setdefault(partition, OrderedDict()).setdefault(key, None)

    def add_first(self, partition: int, key: Key) -> None:
        """For what was given back: it is older than all that waits."""
        self.add(partition, key)
        self._waiting[partition].move_to_end(key, last=False)

    def waits_for(self, partition: int, key: Key) -> bool:
        return key in self._waiting.get(partition, ())

    def set_ready(self, partition: int, unit: Unit, *, first: bool = False) -> None:
        """Nothing happens to a unit that is not waiting; one that was ready keeps its place."""
        if self.waits_for(partition, unit.key):
            ready = self._ready.setdefault(partition, OrderedDict())
            ready[unit.key] = unit
            if first:
                ready.move_to_end(unit.key, last=False)

    def unset_ready(self, partition: int, key: Key) -> None:
        ready = self._ready.get(partition)
        if ready is not None and ready.pop(key, None) is not None and not ready:
            del self._ready[partition]

    def remove(self, partition: int, key: Key) -> None:
        self.unset_ready(partition, key)
        waiting = self._waiting.get(partition)
        if waiting is not None:
            waiting.pop(key, None)
            if not waiting:
                del self._waiting[partition]

    def units(self, partition: int | None) -> list[Unit]:
        """The units to choose from, oldest first; None is all partitions."""
        return list(
            islice(self._in_order(partition) if self.consumer.in_order else self._by_readiness(partition), WINDOW)
        )

    def num_waiting(self, partition: int | None) -> int:
        if partition is not None:
            return len(self._waiting.get(partition, ()))
        return sum(map(len, self._waiting.values()))

    def num_ready(self) -> int:
        return sum(map(len, self._ready.values()))

    def state(self, first: Iterable[tuple[int, Key]]) -> dict[str, Any]:
        """As JSON. `first`: (partition, key) of what is claimed, which counts as given back."""
        ready: dict[int, list[Key]] = {}
        for partition, key in chain(first, ((p, key) for p, units in self._ready.items() for key in units)):
            ready.setdefault(partition, []).append(key)
        return {"ready": [[partition, keys] for partition, keys in ready.items()]}

    def _by_readiness(self, partition: int | None) -> Iterator[Unit]:
        chosen = self._ready.values() if partition is None else [self._ready.get(partition, OrderedDict())]
        return chain.from_iterable(units.values() for units in chosen)

    def _in_order(self, partition: int | None) -> Iterator[Unit]:
        for each in sorted(self._waiting) if partition is None else [partition]:
            ready = self._ready.get(each, OrderedDict())
            for key in self._waiting.get(each, ()):
                if key not in ready:
                    return
                yield ready[key]
