"""The control plane: which rows exist, which columns they have, who has had them. Pure; no asyncio, clock, I/O or data.

Invariants: `produced = consumed + dropped (with reason) + waiting`; every consumer gets every row once, unless the row
is dropped before; a consumer of groups gets all rows of a group that are left, together, once no more can come.
A row is free when every consumer has consumed it or it is dropped, and nobody has a claim on it any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from roll_flash.errors import StreamError
from roll_flash.stream.consumer_queue import ConsumerQueue
from roll_flash.stream.rows import Claim, Consumer, Key, RowInfo, Situation, Unit, require_names
from roll_flash.stream.tracked import TrackedGroup, TrackedRow

GROUP_TOO_SMALL = "group_too_small"


class Ledger:
    """`capacity_rows` and `capacity_bytes` bound what the stream holds; see `has_room` for what may exceed them.

    A group that loses members until fewer than `smallest_group` are left is dropped (`group_too_small`).
    """

    def __init__(
        self,
        consumers: Sequence[Consumer],
        *,
        capacity_rows: int = 4096,
        capacity_bytes: int = 1 << 30,
        smallest_group: int = 1,
    ) -> None:
        if not consumers or len({consumer.name for consumer in consumers}) < len(consumers):
            raise StreamError("a stream needs at least one consumer, and consumers of different names")
        if capacity_rows < 1 or capacity_bytes < 1:
            raise StreamError("capacity_rows and capacity_bytes must be at least 1")
        self.queues = {consumer.name: ConsumerQueue(consumer) for consumer in consumers}
        self.rows: dict[int, TrackedRow] = {}
        self.groups: dict[str, TrackedGroup] = {}
        self._groups_in: dict[int, dict[str, TrackedGroup]] = {}
        """The same by partition."""
        self.claims: dict[int, Claim] = {}
        self.sealed: set[int] = set()
        self.is_closed = False
        self.books: Counter[str] = Counter()
        """`produced`, `consumed`, `dropped_REASON`, `consumed_by_CONSUMER`."""
        self.num_waiting = 0
        """Rows that were produced and are neither consumed by all nor dropped."""
        self.held_bytes = 0
        self.next_row = 0
        self._next_claim = 0
        self._capacity_rows = capacity_rows
        self._capacity_bytes = capacity_bytes
        self._smallest_group = smallest_group
        self._arriving: Counter[int] = Counter()
        self._freed: list[int] = []

    # What writers do

    def has_room(self, infos: Sequence[RowInfo]) -> bool:
        """Whether these rows fit. An empty stream takes anything; so does a group that has begun."""
        if not self.rows or self.has_begun(infos):
            return True
        num_bytes = sum(info.num_bytes for info in infos)
        return (
            len(self.rows) + len(infos) <= self._capacity_rows and self.held_bytes + num_bytes <= self._capacity_bytes
        )

    def has_begun(self, infos: Sequence[RowInfo]) -> bool:
        """Whether all of these belong to groups that are there in part: consumers may wait for the rest of them before
        they free what came first, so these must never wait for room."""
        return all(info.group is not None and info.group in self.groups for info in infos)

    def reserve(self, infos: Sequence[RowInfo]) -> list[int]:
        """Ids for rows whose data is on its way; `arrive` or `withdraw` follows. Raises StreamError."""
        self._check_acceptable(infos)
        row_ids = []
        for info in infos:
            row_id, self.next_row = self.next_row, self.next_row + 1
            name = info.group if info.group is not None else f"row {row_id}"
            size = 1 if info.group is None else info.group_size
            group = self.groups.get(name)
            if group is None:
                group = self.track(TrackedGroup(name, info.partition, size, info.group is None))
            group.size = size if size is not None else group.size
            group.arriving += 1
            self._arriving[info.partition] += 1
            self.rows[row_id] = TrackedRow(info, group, set(self.queues))
            self.held_bytes += info.num_bytes
            row_ids.append(row_id)
        return row_ids

    def arrive(self, row_ids: Iterable[int], columns: Iterable[str]) -> None:
        """The data of reserved rows is there. From here on they are produced and will be accounted for."""
        names = set(columns)
        groups: dict[str, TrackedGroup] = {}
        for row_id in row_ids:
            row = self.rows[row_id]
            group = groups[row.group.name] = row.group
            row.has_arrived, row.columns = True, set(names)
            group.arriving -= 1
            group.arrived += 1
            group.rows[row_id] = None
            self._arrives_no_more(group.partition)
            self.books["produced"] += 1
            self.num_waiting += 1
            if group.dropped_for is not None:
                self._doom(row_id, group.dropped_for)
                continue
            for queue in self.queues.values():
                queue.add(group.partition, group.name if queue.whole_groups else row_id)
            self._refresh_row(row_id)
        for group in groups.values():
            self._complete_if_sealed(group.partition)
            self._settle_group(group)

    def withdraw(self, row_ids: Iterable[int]) -> None:
        """Reserved rows will not come: it is as if they had never been asked for."""
        for row_id in row_ids:
            group = self.rows[row_id].group
            group.arriving -= 1
            self._arrives_no_more(group.partition)
            self._free(row_id)
            if not group.arrived and not group.arriving:
                self._forget(group)
            self._complete_if_sealed(group.partition)

    def written(self, row_ids: Sequence[int], columns: Sequence[str], num_bytes: Sequence[int]) -> list[int]:
        """Further columns of rows are there. Returns the rows that are gone: their data is not wanted any more.

        Raises StreamError when a row has one of the columns already.
        """
        self.check_writable(row_ids, columns)
        gone, groups = [], {}
        for row_id, size in zip(row_ids, num_bytes, strict=True):
            row = self.rows.get(row_id)
            if row is None:
                gone.append(row_id)
                continue
            row.columns.update(columns)
            row.info = replace(row.info, num_bytes=row.info.num_bytes + size)
            self.held_bytes += size
            if row.doomed is None:
                self._refresh_row(row_id)
                groups[row.group.name] = row.group
        for group in groups.values():
            self._refresh_group(group)
        return gone

    def check_writable(self, row_ids: Sequence[int], columns: Sequence[str]) -> None:
        for row_id in row_ids:
            row = self.rows.get(row_id)
            if row_id >= self.next_row or (row is not None and not row.has_arrived):
                raise StreamError(f"row {row_id} was never put")
            for column in columns:
                if row is not None and column in row.columns:
                    raise StreamError(f"row {row_id} has column {column!r} already: a column is written once")

    def seal(self, partition: int | None = None) -> None:
        """No further row will come into the partition; None closes the stream. Groups are as complete as they get."""
        if partition is None:
            self.is_closed = True
        else:
            self.sealed.add(partition)
        for each in list(self._groups_in) if partition is None else [partition]:
            self._complete_if_sealed(each)

    # What consumers do

    def claim(self, consumer: str, partition: int | None = None) -> Claim | None:
        """What the consumer's sampler chooses of its ready units; None if there are none."""
        queue = self._queue(consumer)
        units = queue.units(partition)
        if not units:
            return None
        is_final = self._is_over(partition) and len(units) == queue.num_waiting(partition)
        chosen = queue.consumer.sampler.choose(units, Situation(is_final, queue.consumer.in_order))
        return self._take(queue, partition, chosen)

    def settle(self, claim_id: int, *, consumed: bool = True, dropped_for: str | None = None) -> None:
        """End a claim: its rows are consumed, given back (they come first again), or dropped.

        Raises StreamError for a claim that has ended.
        """
        claim = self.claims.pop(claim_id, None)
        if claim is None:
            raise StreamError(f"claim {claim_id} has ended already")
        queue = self.queues[claim.consumer]
        for row_id in claim.row_ids:
            row = self.rows[row_id]
            row.claimed_by.discard(claim.consumer)
            if dropped_for is not None:
                continue
            if consumed:
                row.left.discard(claim.consumer)
                self.books[f"consumed_by_{claim.consumer}"] += 1
                self._leave_if_free(row_id)
            elif row.doomed is not None:
                self._leave_if_free(row_id)
        if dropped_for is not None:
            self._drop_all(claim.row_ids, dropped_for)
        elif not consumed:
            self._give_back(queue, claim)

    def is_exhausted(self, consumer: str, partition: int | None = None) -> bool:
        """Nothing is left for this consumer and nothing will come, unless somebody gives a claim back."""
        return self._is_over(partition) and not self._queue(consumer).num_waiting(partition)

    # What the owner does

    def drop(self, row_ids: Iterable[int], reason: str) -> None:
        """Drop rows, counted by reason. Rows under a claim go when it ends, and count as consumed if all consumed."""
        self._drop_all([row_id for row_id in row_ids if row_id in self.rows and self.rows[row_id].has_arrived], reason)

    def drop_partition(self, partition: int, reason: str) -> None:
        """Seal a partition and drop what is left in it."""
        self.seal(partition)
        groups = list(self._groups_in.get(partition, {}).values())
        self.drop([row_id for group in groups for row_id in group.rows], reason)

    def take_freed(self) -> list[int]:
        """Rows whose data may be thrown away, each named once."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def num_dropped(self) -> int:
        return sum(count for name, count in self.books.items() if name.startswith("dropped_"))

    def is_balanced(self) -> bool:
        return self.books["produced"] == self.books["consumed"] + self.num_dropped + self.num_waiting

    def track(self, group: TrackedGroup) -> TrackedGroup:
        """A group of which rows are there, or on their way."""
        self.groups[group.name] = group
        self._groups_in.setdefault(group.partition, {})[group.name] = group
        return group

    # How it is done

    def _check_acceptable(self, infos: Sequence[RowInfo]) -> None:
        coming: Counter[str] = Counter()
        for info in infos:
            if self.is_closed or info.partition in self.sealed:
                what = "the stream" if self.is_closed else f"partition {info.partition}"
                raise StreamError(f"{what} is sealed: no row can be put into it any more")
            if info.group is None:
                continue
            coming[info.group] += 1
            group = self.groups.get(info.group)
            there = group.arrived + group.arriving if group else 0
            size = info.group_size if info.group_size is not None else (group.size if group else None)
            if group is not None and group.partition != info.partition:
                raise StreamError(f"group {info.group!r} is in partition {group.partition}, not {info.partition}")
            if size is not None and there + coming[info.group] > size:
                raise StreamError(f"group {info.group!r} was to have {size} rows; this is one more")

    def _queue(self, consumer: str) -> ConsumerQueue:
        require_names([consumer], self.queues, "consumer")
        return self.queues[consumer]

    def _is_over(self, partition: int | None) -> bool:
        if partition is None:
            return self.is_closed and not self._arriving.total()
        return (self.is_closed or partition in self.sealed) and not self._arriving[partition]

    def _complete_if_sealed(self, partition: int) -> None:
        if not self._is_over(partition):
            return
        for group in list(self._groups_in.get(partition, {}).values()):
            if not group.is_complete or not group.rows:
                group.size = group.arrived
                self._settle_group(group)

    def _refresh_row(self, row_id: int) -> None:
        row = self.rows[row_id]
        for queue in self.queues.values():
            if not queue.whole_groups and queue.is_served_by(row.columns):
                queue.set_ready(row.group.partition, Unit(row_id, row.info.tokens))

    def _refresh_group(self, group: TrackedGroup, *, first: bool = False) -> None:
        for queue in self.queues.values():
            if not queue.whole_groups or not queue.waits_for(group.partition, group.name):
                continue
            rows = [self.rows[row_id] for row_id in group.rows]
            if not rows:
                if group.is_complete:
                    queue.remove(group.partition, group.name)
                continue
            if group.is_complete and all(queue.is_served_by(row.columns) for row in rows):
                unit = Unit(group.name, sum(row.info.tokens for row in rows))
                queue.set_ready(group.partition, unit, first=first)

    def _settle_group(self, group: TrackedGroup) -> None:
        """After it lost a row or its size changed."""
        if group.size is not None and not group.is_alone and group.size - group.lost < self._smallest_group:
            group.dropped_for = group.dropped_for or GROUP_TOO_SMALL
            for row_id in list(group.rows):
                self._doom(row_id, GROUP_TOO_SMALL)
        self._refresh_group(group)
        self._forget_if_over(group)

    def _take(self, queue: ConsumerQueue, partition: int | None, keys: Sequence[Key]) -> Claim:
        name = queue.consumer.name
        row_ids = tuple(row_id for key in keys for row_id in self._rows_of(key))
        for key in keys:
            queue.remove(self.rows[self._rows_of(key)[0]].group.partition, key)
        for row_id in row_ids:
            self.rows[row_id].claimed_by.add(name)
        groups = {row_id: self.rows[row_id].group.name for row_id in row_ids}
        tokens = sum(self.rows[row_id].info.tokens for row_id in row_ids)
        claim = Claim(self._next_claim, name, partition, row_ids, groups, tokens)
        self._next_claim += 1
        self.claims[claim.claim_id] = claim
        return claim

    def _rows_of(self, key: Key) -> list[int]:
        return [key] if isinstance(key, int) else list(self.groups[key].rows)

    def _give_back(self, queue: ConsumerQueue, claim: Claim) -> None:
        for row_id in reversed(claim.row_ids):
            row = self.rows.get(row_id)
            if row is None or row.doomed is not None:
                continue
            partition = row.group.partition
            if queue.whole_groups:
                queue.add_first(partition, row.group.name)
                self._refresh_group(row.group, first=True)
            else:
                queue.add_first(partition, row_id)
                queue.set_ready(partition, Unit(row_id, row.info.tokens), first=True)

    def _drop_all(self, row_ids: Sequence[int], reason: str) -> None:
        groups = {self.rows[row_id].group.name: self.rows[row_id].group for row_id in row_ids}
        for row_id in row_ids:
            self._doom(row_id, reason)
        for group in groups.values():
            self._settle_group(group)

    def _doom(self, row_id: int, reason: str) -> None:
        row = self.rows[row_id]
        if row.doomed is None:
            row.doomed = reason
            row.group.rows.pop(row_id, None)
            row.group.lost += 1
            for queue in self.queues.values():
                if not queue.whole_groups:
                    queue.remove(row.group.partition, row_id)
        self._leave_if_free(row_id)

    def _leave_if_free(self, row_id: int) -> None:
        row = self.rows[row_id]
        if row.claimed_by:
            return
        if not row.left:
            self.books["consumed"] += 1
            self._free(row_id)
        elif row.doomed is not None:
            self.books[f"dropped_{row.doomed}"] += 1
            self._free(row_id)

    def _free(self, row_id: int) -> None:
        row = self.rows.pop(row_id)
        self.num_waiting -= row.has_arrived
        self.held_bytes -= row.info.num_bytes
        row.group.rows.pop(row_id, None)
        self._freed.append(row_id)
        self._forget_if_over(row.group)

    def _forget_if_over(self, group: TrackedGroup) -> None:
        if group.is_complete and not group.rows and not group.arriving and self.groups.get(group.name) is group:
            for queue in self.queues.values():
                if queue.whole_groups:
                    queue.remove(group.partition, group.name)
            self._forget(group)

    def _forget(self, group: TrackedGroup) -> None:
        del self.groups[group.name]
        names = self._groups_in[group.partition]
        del names[group.name]
        if not names:
            del self._groups_in[group.partition]

    def _arrives_no_more(self, partition: int) -> None:
        self._arriving[partition] -= 1
        if not self._arriving[partition]:
            del self._arriving[partition]
