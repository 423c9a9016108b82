"""The learner's side of the stream: micro-batches of whole groups, of equal packed size, while episodes still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from heapq import heapreplace
from math import ceil
from typing import Any

from roll_flash.config.sections.distill import TEACHER
from roll_flash.errors import StreamError, StreamStarvedError
from roll_flash.processes.background import cancel_and_wait, error_of
from roll_flash.stream.stream import Row, TrajectoryStream
from roll_flash.types import MIN_GROUP_SIZE, FinishedEpisode, FinishedGroup
from roll_flash.watchdog.activity import doing

REWARD = "reward"
"""Column with the reward that is trained. It is the last one: the teacher's, if there is one, is there before."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A group of the step that is not trained yet. `group` is None until each of its rows has a reward."""

    rows: list[Row]
    group: FinishedGroup | None = None
    tokens: int = 0
    """Packed size of the group: its prompt is counted once."""
    is_lost: bool = False
    """Too few of its trajectories are left."""


@dataclass(eq=False, repr=False)
class LearnerLoader:
    """Waits for the rewards of the groups of a step and cuts micro-batches of `micro_batch_tokens`.

    `in_order` trains groups in the order in which they were handed out. `timeout_s` is the longest wait for a
    micro-batch when all groups of the step are there. A group that has lost trajectories is dropped if fewer than
    `least_group_size` are left.
    """

    stream: TrajectoryStream
    _: KW_ONLY
    micro_batch_tokens: int
    in_order: bool = False
    timeout_s: float = 600.0
    least_group_size: int = MIN_GROUP_SIZE

    async def stream_step(
        self, groups: AsyncIterator[list[FinishedGroup]]
    ) -> AsyncGenerator[list[FinishedGroup], None]:
        """Yield the groups of one step, in micro-batches, as their rewards come.

        The rows of a micro-batch count as consumed when the next one is asked for. Close the generator
        (`contextlib.aclosing`): what is left of a step that is not finished is dropped then (`abandoned`), since its
        gradient is abandoned too.

        An error of `groups` is raised as it is. Raises StreamStarvedError if stages write no reward in time, and
        StreamError when stages dropped all trajectories of the step: there is nothing to step on.
        """
        step = _Step(self.stream, groups, self.least_group_size)
        was_given = False
        try:
            while taken := await self._next(step):
                was_given = True
                yield [each.group for each in taken if each.group]
                self.stream.consume(row for each in taken for row in each.rows)
            if step.num_groups and not was_given:
                dropped = {name: n for name, n in self.stream.counts().items() if name.startswith("dropped_")}
                reasons = ", ".join(f"{name.removeprefix('dropped_')} {n}" for name, n in dropped.items())
                raise StreamError(f"no trajectory of this step reached the learner; dropped so far: {reasons}")
        finally:
            await step.close()

    async def _next(self, step: _Step) -> list[_Pending]:
        """Take what is ready, at most `micro_batch_tokens`; nothing if the step has ended."""
        while True:
            step.changed.clear()
            self.stream.raise_failure()
            if step.error is not None:
                raise step.error
            ready = step.ready(in_order=self.in_order)
            if ready:
                return self._take(step, ready)
            if step.has_all and not step.pending:
                return []
            try:
                await self._wait(step)
            except TimeoutError:
                raise StreamStarvedError(
                    f"{len(step.pending)} groups got no {REWARD!r} within {self.timeout_s:g} s; stages that are "
                    f"behind: {self.stream.behind()}"
                ) from None

    async def _wait(self, step: _Step) -> None:
        """Wait for a change, at most the time-out if only rewards are missing."""
        if not step.has_all:
            await step.changed.wait()
            return
        then = f"the run ends after {self.timeout_s:g} s (monitor.stall_timeout_s)"
        about = lambda: f"behind: {self.stream.behind()}"  # noqa: E731
        with doing("the scoring", "groups have no reward", then=then, about=about):
            async with asyncio.timeout(self.timeout_s):
                await step.changed.wait()

    def _take(self, step: _Step, ready: list[_Pending]) -> list[_Pending]:
        """Take what comes next. The oldest group is always in it, so that nothing waits for ever."""
        knows_all = step.has_all and len(ready) == len(step.pending)
        if self.in_order:
            total = sum(each.tokens for each in ready)
            limit = (
                ceil(total / max(1, ceil(total / self.micro_batch_tokens))) if knows_all else self.micro_batch_tokens
            )
            step.taken = fill(ready, limit, in_order=True)
        elif knows_all:
            step.last = step.last or equal_bins(ready, self.micro_batch_tokens)
            step.taken = step.last.pop(0)
        else:
            step.taken = fill(ready, self.micro_batch_tokens, in_order=False)
        taken = {id(each) for each in step.taken}
        step.pending = [each for each in step.pending if id(each) not in taken]
        return step.taken


class _Step:
    """The groups of one step, from the scheduler to the learner."""

    def __init__(
        self, stream: TrajectoryStream, groups: AsyncIterator[list[FinishedGroup]], least_group_size: int
    ) -> None:
        self._stream = stream
        self._least_group_size = least_group_size
        self._tasks: list[asyncio.Task[None]] = []
        self.pending: list[_Pending] = []
        self.taken: list[_Pending] = []
        """The micro-batch that the learner has."""
        self.last: list[list[_Pending]] = []
        """Micro-batches of all groups that are left, once these are known."""
        self.num_groups = 0
        self.has_all = False
        self.changed = asyncio.Event()
        self.error: BaseException | None = None
        self._start(self._feed(groups))
        self._start(self._watch())

    def ready(self, *, in_order: bool) -> list[_Pending]:
        """Groups whose rewards are there, in the order in which they were handed out."""
        self.pending = [each for each in self.pending if not each.is_lost]
        if not in_order:
            return [each for each in self.pending if each.group is not None]
        first = next((place for place, each in enumerate(self.pending) if each.group is None), len(self.pending))
        return self.pending[:first]

    async def close(self) -> None:
        await cancel_and_wait(self._tasks)
        self._stream.drop((row for each in (*self.taken, *self.pending) for row in each.rows), "abandoned")

    async def _feed(self, groups: AsyncIterator[list[FinishedGroup]]) -> None:
        async for several in groups:
            for group in several:
                self._add(group)
            self.changed.set()
        self.has_all = True
        self.changed.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note_error)
        self._tasks.append(task)

    def _note_error(self, task: asyncio.Task[None]) -> None:
        """End the step with any error of its tasks, also with one that is no Exception: it would wait for ever."""
        if (error := error_of(task)) is not None:
            self.error = self.error or error
            self.changed.set()

    async def _watch(self) -> None:
        await self._stream.failed()
        self.changed.set()

    def _add(self, group: FinishedGroup) -> None:
        self.num_groups += 1
        each = _Pending(self._stream.close_group(group.group_id))
        self.pending.append(each)
        if all(REWARD in row.columns for row in each.rows):
            self._set_rewards(each, group)
        else:
            self._start(self._wait_for_rewards(each, group))

    async def _wait_for_rewards(self, each: _Pending, group: FinishedGroup) -> None:
        await self._stream.settled(each.rows, REWARD)
        self._set_rewards(each, group)
        self.changed.set()

    def _set_rewards(self, each: _Pending, group: FinishedGroup) -> None:
        rows = {row.row_id: row for row in each.rows if not row.is_gone}
        trajectories = tuple(
            with_columns(trajectory, rows[trajectory.episode_id].columns)
            for trajectory in group.trajectories
            if trajectory.episode_id in rows
        )
        if len(trajectories) >= self._least_group_size:
            each.group = FinishedGroup(group.group_id, group.task, trajectories, group.failures)
            each.tokens = each.group.packed_tokens
        else:
            self._stream.drop(rows.values(), "group_too_small")
            each.is_lost = True


def with_columns(trajectory: FinishedEpisode, columns: Mapping[str, Any]) -> FinishedEpisode:
    """Return a trajectory with what stages have written of it."""
    reward, log_ratios = columns[REWARD], columns.get(TEACHER)
    if reward == trajectory.reward and log_ratios is None:
        return trajectory
    return replace(trajectory, reward=reward, teacher_log_ratios=log_ratios)


def fill(units: Sequence[_Pending], max_tokens: int, *, in_order: bool) -> list[_Pending]:
    """Return the oldest unit, and in order whatever still fits; `in_order` stops at the first that does not."""
    chosen: list[_Pending] = []
    tokens = 0
    for unit in units:
        if not chosen or tokens + unit.tokens <= max_tokens:
            chosen.append(unit)
            tokens += unit.tokens
        elif in_order:
            break
    return chosen


def equal_bins(units: Sequence[_Pending], max_tokens: int) -> list[list[_Pending]]:
    """Return all units in as few bins of at most `max_tokens` as longest-first finds, nearly equal, oldest first.

    A unit larger than `max_tokens` has a bin of its own.
    """
    count = max(1, ceil(sum(unit.tokens for unit in units) / max_tokens))
    longest_first = sorted(units, key=lambda unit: -unit.tokens)
    while True:
        bins = _spread_evenly(longest_first, count)
        if all(len(bin) == 1 or sum(unit.tokens for unit in bin) <= max_tokens for bin in bins):
            place = {id(unit): index for index, unit in enumerate(units)}
            return sorted(bins, key=lambda bin: min(place[id(unit)] for unit in bin))
        count += 1


def _spread_evenly(longest_first: Iterable[_Pending], count: int) -> list[list[_Pending]]:
    """Put each unit into the emptiest bin, of equal ones the first."""
    bins: list[list[_Pending]] = [[] for _ in range(count)]
    emptiest = [(0, index) for index in range(count)]
    for unit in longest_first:
        tokens, index = emptiest[0]
        bins[index].append(unit)
        heapreplace(emptiest, (tokens + unit.tokens, index))
    return [bin for bin in bins if bin]
