"""The trajectory stream: writers put rows and columns, consumers get every row once, as soon as it is ready.

The ledger decides (control plane), the store holds the arrays (data plane); here is what waits. A writer waits for
room and for nothing else. What is cancelled has not happened: a put that did not return put nothing, and rows that a
consumer did not receive come again. Must be used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roll_flash.errors import ShardDiedError, StreamError, StreamFullError, StreamStarvedError
from roll_flash.stream.ledger import Ledger
from roll_flash.stream.ledger_state import ledger_state, restore_ledger
from roll_flash.stream.rows import Array, Batch, Claim, Columns, Consumer, Row, RowInfo, read_only, same_columns
from roll_flash.stream.stall import describe_wait
from roll_flash.stream.store import MemoryStore, Store

SHARD_DIED = "shard_died"
SavedRows = dict[int, dict[str, Array]]


class TrajectoryStream:
    """Rows wait in `store`, in this process where none is given, until every consumer has had them.

    Bounds as in `Ledger`. Use as an async context manager, or call `close`.
    """

    def __init__(
        self,
        consumers: Sequence[Consumer],
        store: Store | None = None,
        *,
        capacity_rows: int = 4096,
        capacity_bytes: int = 1 << 30,
        smallest_group: int = 1,
    ) -> None:
        self._ledger = Ledger(
            consumers, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes, smallest_group=smallest_group
        )
        self._store: Store = store if store is not None else MemoryStore()
        self._columns = {consumer.name: consumer.columns for consumer in consumers}
        self._waiters: set[asyncio.Event] = set()
        self._writers: dict[asyncio.Future[list[int]], Sequence[RowInfo]] = {}
        """Those that wait for room, first come first, and what they want to put."""
        self._held: dict[asyncio.Task[Any], set[int]] = {}
        """The newest claims of each task that has taken some and not ended; those that are settled go with the next."""
        self._error: BaseException | None = None
        self._snapshots = 0

    async def __aenter__(self) -> TrajectoryStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Writers

    async def put(self, rows: Sequence[Row], *, timeout_s: float = 600.0) -> list[int]:
        """Put rows that have the same columns; all of them or none. Returns their ids, which `write` takes.

        Waits while the stream is full, in turn with other writers. Raises StreamFullError at the deadline, and
        StreamError for rows that cannot be put.
        """
        columns = [{name: read_only(array, name) for name, array in row.columns.items()} for row in rows]
        names = same_columns(columns)
        if not rows:
            return []
        row_ids = await self._reserve([row.info() for row in rows], timeout_s)
        try:
            await self._store.put(row_ids, columns)
        except BaseException:
            self._ledger.withdraw(row_ids)
            await self._after_change()
            raise
        self._ledger.arrive(row_ids, names)
        await self._after_change()
        return row_ids

    async def write(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        """Add columns to rows; each column of a row once. Never waits for room. Rows dropped meanwhile are passed over.

        Raises StreamError for a column that is there already.
        """
        columns = [{name: read_only(array, name) for name, array in row.items()} for row in rows]
        names = same_columns(columns)
        self._ledger.check_writable(row_ids, names)
        live = [(row_id, row) for row_id, row in zip(row_ids, columns, strict=True) if row_id in self._ledger.rows]
        if not live:
            return
        live_ids, live_rows = [row_id for row_id, _ in live], [row for _, row in live]
        await self._store.write(live_ids, live_rows)
        sizes = [sum(array.nbytes for array in row.values()) for row in live_rows]
        if gone := self._ledger.written(live_ids, names, sizes):
            await self._store.release(gone)
        await self._after_change()

    async def seal(self, partition: int | None = None) -> None:
        """Nothing more comes into the partition (None: into the stream); its consumers end with the rows it has."""
        self._ledger.seal(partition)
        await self._after_change()

    # Consumers

    async def next_batch(
        self, consumer: str, partition: int | None = None, *, timeout_s: float = 600.0
    ) -> Batch | None:
        """The consumer's next micro-batch; None when the partition (or the stream) is sealed and all was taken.

        `release` it when the work is done, or `give_back` it; if the task that took it is cancelled or fails before, it
        is given back. Raises StreamStarvedError at the deadline, ShardDiedError when rows were lost (they are counted
        as dropped; the rest comes with the next call).
        """
        claim = await self._claim(consumer, partition, timeout_s)
        if claim is None:
            return None
        self._hold(claim)
        return await self._fetch(claim)

    async def release(self, taken: Batch | Claim) -> None:
        """The work on these rows is done: this consumer will not see them again."""
        await self._settle(taken, consumed=True)

    async def give_back(self, taken: Batch | Claim) -> None:
        """The work was not done: the rows come again, before all others."""
        await self._settle(taken, consumed=False)

    async def drop(self, taken: Batch | Claim | Iterable[int], reason: str) -> None:
        """Drop rows for a reason that the books will show: those of a batch, which ends with it, or by id."""
        if isinstance(taken, Batch | Claim):
            await self._settle(taken, consumed=False, dropped_for=reason)
        else:
            self._ledger.drop(taken, reason)
            await self._after_change()

    # The owner

    async def drop_partition(self, partition: int, reason: str) -> None:
        """Seal a partition and drop what is left in it; nothing happens to one that is sealed and was all consumed."""
        self._ledger.drop_partition(partition, reason)
        await self._after_change()

    def fail(self, error: BaseException) -> None:
        """What the stream depends on is broken: whoever waits for rows or room gets the error."""
        self._error = self._error or error
        for granted in self._writers:
            if not granted.done():
                granted.set_exception(self._error)
        self._wake()

    def unused_partition(self) -> int:
        """A partition that no row is or was in, and neither in any above it."""
        ledger = self._ledger
        return max([-1, *ledger.sealed, *(group.partition for group in ledger.groups.values())]) + 1

    def books(self) -> dict[str, int]:
        """What became of every row: `produced == consumed + dropped_* + waiting`, and counts per consumer."""
        return {**self._ledger.books, "waiting": self._ledger.num_waiting}

    def metrics(self) -> dict[str, float]:
        """Flat names to numbers for the run's metrics. `balanced` is 1.0 as long as the books balance."""
        ledger = self._ledger
        ready = {f"ready_{name}": float(queue.num_ready()) for name, queue in ledger.queues.items()}
        return {
            **{name: float(count) for name, count in self.books().items()},
            **ready,
            "balanced": float(ledger.is_balanced()),
            "held_bytes": float(ledger.held_bytes),
            "writers_waiting": float(len(self._writers)),
        }

    async def state(self) -> tuple[dict[str, Any], SavedRows]:
        """All that is left, for a checkpoint: control plane as JSON, and the arrays. Claimed rows are given back in it.

        The stream may be used meanwhile; the state is that of the moment of the call.
        """
        self._snapshots += 1  # what is freed meanwhile stays in the store until the copy is made
        try:
            control = ledger_state(self._ledger)
            by_columns: dict[tuple[str, ...], list[int]] = {}
            for row_id, _, _, columns, _, _ in control["rows"]:
                by_columns.setdefault(tuple(columns), []).append(row_id)
            saved: SavedRows = {row_id: {} for row_id, *_ in control["rows"]}
            for columns, row_ids in by_columns.items():
                for name, arrays in (await self._store.get(row_ids, columns)).items():
                    for row_id, array in zip(row_ids, arrays, strict=True):
                        saved[row_id][name] = array
            return control, saved
        finally:
            self._snapshots -= 1
            await self._after_change()

    async def restore(self, control: Mapping[str, Any], saved: SavedRows) -> None:
        """Go on where `state` was taken, in a stream that nothing was put into. Raises StreamError."""
        try:
            restore_ledger(self._ledger, control)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StreamError(f"this is no saved state of a stream: {error!r}") from None
        for row_id in self._ledger.rows:
            await self._store.put([row_id], [saved[row_id]])
        await self._after_change()

    async def close(self) -> None:
        """Free the store. Whoever still waits gets an error."""
        self.fail(StreamError("the stream is closed"))
        await self._store.close()

    # How it waits

    async def _reserve(self, infos: Sequence[RowInfo], timeout_s: float) -> list[int]:
        """Ids for rows, when there is room for them."""
        self._raise_failure()
        if self._ledger.has_begun(infos) or (not self._writers and self._ledger.has_room(infos)):
            row_ids = self._ledger.reserve(infos)
            self._let_writers_in()
            return row_ids
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._writers[granted] = infos
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await granted
        except BaseException as error:
            self._leave_queue(granted)
            if not (isinstance(error, TimeoutError) and deadline.expired()):
                raise
            raise StreamFullError(
                f"the stream had no room for {len(infos)} rows within {timeout_s:g} s: it holds "
                f"{len(self._ledger.rows)} rows, {self._ledger.held_bytes} bytes; a consumer is too slow or stuck"
            ) from None

    def _leave_queue(self, granted: asyncio.Future[list[int]]) -> None:
        """A writer gave up, perhaps in the moment in which it was let in."""
        self._writers.pop(granted, None)
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._ledger.withdraw(granted.result())
        self._let_writers_in()
        self._wake()

    def _let_writers_in(self) -> None:
        """In turn, as far as there is room. The rest of a group that has begun never waits behind others: consumers may
        wait for it before they make room."""
        has_room = True
        for granted, infos in list(self._writers.items()):
            has_room = has_room and self._ledger.has_room(infos)
            if granted.done() or not (has_room or self._ledger.has_begun(infos)):
                continue
            del self._writers[granted]
            try:
                granted.set_result(self._ledger.reserve(infos))
            except StreamError as error:
                granted.set_exception(error)

    async def _claim(self, consumer: str, partition: int | None, timeout_s: float) -> Claim | None:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                while True:
                    self._raise_failure()
                    claim = self._ledger.claim(consumer, partition)
                    if claim is not None or self._ledger.is_exhausted(consumer, partition):
                        return claim
                    await self._change()
        except TimeoutError:
            if not deadline.expired():  # what made the stream fail may be a TimeoutError too
                raise
            raise StreamStarvedError(
                f"consumer {consumer!r} got nothing for {timeout_s:g} s: {describe_wait(self._ledger, consumer)}"
            ) from None

    async def _fetch(self, claim: Claim) -> Batch:
        """The data of a claim. If that fails or is cancelled the claim is given back."""
        try:
            return Batch(claim, await self._store.get(claim.row_ids, self._columns[claim.consumer]))
        except ShardDiedError as error:
            self._ledger.drop(error.row_ids, SHARD_DIED)
            await self.give_back(claim)
            raise
        except BaseException:
            await self.give_back(claim)
            raise

    def _hold(self, claim: Claim) -> None:
        """Note that it is this task's, one callback for all that a task takes: some take batches for days."""
        task = asyncio.current_task()
        assert task is not None
        if task not in self._held:
            self._held[task] = set()
            task.add_done_callback(self._give_back_of)
        self._held[task] &= self._ledger.claims.keys()
        self._held[task].add(claim.claim_id)

    def _give_back_of(self, task: asyncio.Task[Any]) -> None:
        """Nobody else will, when the task that took the rows ended before its time."""
        held = self._held.pop(task) & self._ledger.claims.keys()
        if not held or not (task.cancelled() or task.exception() is not None):
            return
        for claim_id in sorted(held, reverse=True):  # what is given back last comes first
            self._ledger.settle(claim_id, consumed=False)
        self._let_writers_in()  # rows that were dropped meanwhile leave room; their data goes with the next change
        self._wake()

    async def _settle(self, taken: Batch | Claim, **how: Any) -> None:
        claim = taken.claim if isinstance(taken, Batch) else taken
        self._ledger.settle(claim.claim_id, **how)
        await self._after_change()

    async def _after_change(self) -> None:
        self._let_writers_in()  # first: who is cancelled while a store releases has let them in
        self._wake()
        if not self._snapshots and (freed := self._ledger.take_freed()):
            await self._store.release(freed)

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def _change(self) -> None:
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            await waiter.wait()
        finally:
            self._waiters.discard(waiter)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
