"""The trajectory stream: rows enter when their episode ends, stages add columns, the learner takes whole groups.

This is the control plane of AsyncFlow (arXiv 2507.01663): it knows which rows are there, which columns they have, and
which consumers have had them. It never looks at the data: a row only carries a reference to it. How many rows are in
the stream is bounded by the scheduler, which admits no more groups than the staleness rule allows.

Must be used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_flash.errors import StreamError


@dataclass(frozen=True, slots=True)
class Consumer:
    """A stage: it gets every row once, as soon as the row has the columns in `needs`."""

    name: str
    needs: tuple[str, ...] = ()
    batch_size: int = 1
    """Maximum rows of a batch."""
    whole_groups: bool = False
    """A batch is all rows of one complete group. A row that joins a complete group later is a batch of its own."""

    def __post_init__(self) -> None:
        if self.whole_groups and self.needs:
            raise StreamError(f"consumer {self.name!r}: whole groups are taken without other columns")


@dataclass(slots=True, eq=False)
class Row:
    """One trajectory. `data` is whatever stages and learner understand, such as its metadata with a reference."""

    row_id: str
    group_id: str
    group: _Group
    data: Any
    columns: dict[str, Any]
    """Numbers, and the array of a teacher."""
    not_taken: set[str]
    """Consumers that have not taken it."""
    worked_on: set[str] = field(default_factory=set)
    """Consumers that took it and have not written their columns."""
    waiter: _Waiter | None = None
    is_gone: bool = False
    """Dropped or consumed."""


@dataclass(slots=True, eq=False)
class _Group:
    """Found by its id until the scheduler is done with the group, also without rows."""

    rows: dict[str, Row] = field(default_factory=dict)
    is_complete: bool = False
    dropped_for: str | None = None
    """A stage dropped the whole group for this reason; rows that come later are dropped too."""
    lost: dict[str, str] = field(default_factory=dict)
    """Why rows were dropped, by id."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """Done when `lacking` more rows have `column` or are gone."""

    column: str
    lacking: int
    done: asyncio.Future[None]

    def settle(self) -> None:
        self.lacking -= 1
        if not self.lacking and not self.done.done():
            self.done.set_result(None)


class _Queue:
    """Rows that one consumer may take, in the order in which they became ready."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.ready: dict[str, Row] = {}
        self.takers: deque[asyncio.Future[None]] = deque()
        """Tasks that wait for a batch."""

    def is_served_by(self, row: Row) -> bool:
        return all(name in row.columns for name in self.consumer.needs)

    def pop(self) -> list[Row]:
        consumer, batch = self.consumer, list[Row]()
        for row in self.ready.values():
            if consumer.whole_groups and batch and row.group_id != batch[0].group_id:
                continue
            batch.append(row)
            if not consumer.whole_groups and len(batch) == consumer.batch_size:
                break
        for row in batch:
            del self.ready[row.row_id]
            row.not_taken.remove(consumer.name)
            row.worked_on.add(consumer.name)
        return batch

    def wake(self) -> None:
        """Wake one task for what has become ready; it wakes the next if it leaves something."""
        while self.ready and self.takers:
            taker = self.takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return


class TrajectoryStream:
    """Rows by id. Only `next_batch` and `settled` wait.

    `produced == consumed + dropped_* + waiting` holds at any time (`counts`).
    """

    def __init__(self, consumers: Sequence[Consumer] = ()) -> None:
        self._queues = {consumer.name: _Queue(consumer) for consumer in consumers}
        self._rows: dict[str, Row] = {}
        self._groups: dict[str, _Group] = {}
        self._closed: list[_Group] = []
        """Groups of the step."""
        self._counts: Counter[str] = Counter(produced=0, consumed=0)
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    # The rollout

    def put(self, row_id: str, group_id: str, data: Any, columns: Mapping[str, Any]) -> None:
        """Add a row. Raises StreamError if there is one of this id already."""
        if row_id in self._rows:
            raise StreamError(f"row {row_id!r} is in the stream already")
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group()
        row = Row(row_id, group_id, group, data, dict(columns), set(self._queues))
        self._rows[row_id] = group.rows[row_id] = row
        self._counts["produced"] += 1
        if group.dropped_for is not None:
            self.drop([row], group.dropped_for)
        else:
            self._offer(row)

    def complete(self, group_id: str) -> None:
        """Record that a group waits for no further row: consumers of whole groups may have it."""
        if (group := self._groups.get(group_id)) is not None:
            group.is_complete = True
            for row in group.rows.values():
                self._offer(row)

    def drop_group(self, group_id: str, reason: str) -> None:
        """Drop all rows of a group that the learner will not get. No further row of it may come."""
        if (group := self._groups.pop(group_id, None)) is not None:
            self.drop(list(group.rows.values()), reason)

    # Stages

    async def next_batch(self, consumer: str) -> list[Row]:
        """Wait for rows of `consumer` and take them; `give_back` them if their work is not done."""
        queue = self._queues[consumer]
        while True:
            self.raise_failure()
            if batch := queue.pop():
                queue.wake()
                return batch
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.takers.append(taker)
            try:
                await taker
            except BaseException:
                if taker.done() and not taker.cancelled():
                    queue.wake()  # somebody else has to take what this task was woken for
                raise

    def write(self, consumer: str, row: Row, columns: Mapping[str, Any]) -> None:
        """End a consumer's work on a row: add columns, each once. Nothing happens if the row is gone.

        Raises StreamError for a column that is there.
        """
        if row.is_gone:
            return
        row.worked_on.discard(consumer)
        if double := columns.keys() & row.columns.keys():
            raise StreamError(f"row {row.row_id!r} has the column {min(double)!r} already")
        row.columns.update(columns)
        self._offer(row)
        if row.waiter is not None and row.waiter.column in columns:
            row.waiter.settle()
            row.waiter = None

    def give_back(self, consumer: str, rows: Sequence[Row]) -> None:
        """Return rows whose work was not done: they come again, before all others."""
        queue = self._queues[consumer]
        again = {row.row_id: row for row in rows if not row.is_gone}
        for row in again.values():
            row.not_taken.add(consumer)
            row.worked_on.discard(consumer)
        queue.ready = {**again, **queue.ready}
        queue.wake()

    def drop(self, rows: Iterable[Row], reason: str, *, whole_groups: bool = False) -> None:
        """Drop rows, or their whole groups, for a reason that `counts` shows. Rows that are gone are passed over."""
        for row in rows:
            if whole_groups:
                row.group.dropped_for = row.group.dropped_for or reason
                self.drop(list(row.group.rows.values()), reason)
            elif not row.is_gone:
                self._remove(row)
                row.group.lost[row.row_id] = reason
                self._counts[f"dropped_{reason}"] += 1

    # The learner

    def close_group(self, group_id: str) -> list[Row]:
        """Return the rows of a group that no further row may join. They stay until `consume` or `drop`."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return []
        self._closed.append(group)
        return list(group.rows.values())

    def take_lost(self) -> dict[str, str]:
        """Return which rows of the groups that were closed since the last call were dropped, by id, and why."""
        closed, self._closed = self._closed, []
        return {row_id: reason for group in closed for row_id, reason in group.lost.items()}

    async def settled(self, rows: Iterable[Row], column: str) -> None:
        """Wait until each of these rows has `column` or is gone. One task may wait for a row."""
        lacking = [row for row in rows if not row.is_gone and column not in row.columns]
        if lacking:
            waiter = _Waiter(column, len(lacking), asyncio.get_running_loop().create_future())
            for row in lacking:
                row.waiter = waiter
            await waiter.done

    def consume(self, rows: Iterable[Row]) -> None:
        """Remove rows that were trained."""
        for row in rows:
            if not row.is_gone:
                self._remove(row)
                self._counts["consumed"] += 1

    def behind(self) -> str:
        """Describe the consumers that hold up rows, for an error message."""
        awaited = [row for row in self._rows.values() if row.waiter is not None]
        counts = Counter(
            name
            for row in awaited
            for name, queue in self._queues.items()
            if name in row.worked_on or row.row_id in queue.ready
        )
        return ", ".join(f"{name} ({count} rows)" for name, count in sorted(counts.items())) or "none that is known"

    # The owner

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the learner's loader and in stages: a part that the stream depends on is broken."""
        self._error = self._error or error
        self._failed.set()
        for taker in (taker for queue in self._queues.values() for taker in queue.takers):
            if not taker.done():
                taker.set_result(None)

    def raise_failure(self) -> None:
        """Raise the first error of `fail`, if there was one."""
        if self._error is not None:
            raise self._error

    async def failed(self) -> None:
        """Wait for `fail`."""
        await self._failed.wait()

    def counts(self) -> dict[str, int]:
        return {**self._counts, "waiting": len(self._rows)}

    def metrics(self) -> dict[str, float]:
        """Counts, rows that are ready per consumer (`ready_NAME`), and `balanced`: 1.0 if the counts balance."""
        counts = self.counts()
        dropped = sum(count for name, count in counts.items() if name.startswith("dropped_"))
        balanced = counts["produced"] == counts["consumed"] + dropped + counts["waiting"]
        ready = {f"ready_{name}": float(len(queue.ready)) for name, queue in self._queues.items()}
        return {**{name: float(count) for name, count in counts.items()}, **ready, "balanced": float(balanced)}

    def without(self, column: str) -> int:
        """Number of rows that do not have `column` yet."""
        return sum(column not in row.columns for row in self._rows.values())

    # How it works

    def _offer(self, row: Row) -> None:
        """Hand the row to each consumer that it has become ready for."""
        for name in row.not_taken:
            queue = self._queues[name]
            if row.row_id not in queue.ready and queue.is_served_by(row):
                if queue.consumer.whole_groups and not row.group.is_complete:
                    continue
                queue.ready[row.row_id] = row
                queue.wake()

    def _remove(self, row: Row) -> None:
        row.is_gone = True
        del self._rows[row.row_id]
        del row.group.rows[row.row_id]
        for name in row.not_taken:
            self._queues[name].ready.pop(row.row_id, None)
        if row.waiter is not None:
            row.waiter.settle()
            row.waiter = None
