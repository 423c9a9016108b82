"""The learner's side of the stream: micro-batches of whole groups, of equal packed size, while episodes still run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from roll_flash.errors import StreamError, StreamStarvedError
from roll_flash.stream.rows import Batch, Consumer
from roll_flash.stream.samplers import TokenBalanced
from roll_flash.stream.stream import TrajectoryStream
from roll_flash.stream.trajectories import REWARD, TRAJECTORY_COLUMNS, group_rows, row_trajectory
from roll_flash.types import Group

LEARNER, ABANDONED = "learner", "abandoned"


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Whole groups for one `learner.accumulate`. `tokens`: their packed size, shared prefixes counted once a group."""

    groups: list[Group]
    tokens: int


def learner_consumer(micro_batch_tokens: int, *, in_order: bool = False) -> Consumer:
    """The learner as a consumer: complete groups in micro-batches of at most `micro_batch_tokens` packed tokens.

    `in_order` trains groups in the order in which they were put.
    """
    sampler = TokenBalanced(micro_batch_tokens, whole_groups=True)
    return Consumer(LEARNER, TRAJECTORY_COLUMNS, sampler, in_order=in_order)


class LearnerLoader:
    """Takes what consumer `learner` gets and makes groups of it again."""

    def __init__(
        self,
        stream: TrajectoryStream,
        *,
        timeout_s: float = 600.0,
        without: Collection[str] = (),
        reward_column: str = REWARD,
    ) -> None:
        """`timeout_s`: longest wait for room, and for a micro-batch when all groups are there. `without`: columns that
        stages write. `reward_column`: where the rewards of episodes go, if stages write `reward`."""
        self._stream = stream
        self._timeout_s = timeout_s
        self._without = without
        self._reward_column = reward_column
        self._partition = stream.unused_partition()

    async def micro_batches(
        self, partition: int, *, may_starve: Callable[[], bool] = lambda: False
    ) -> AsyncGenerator[MicroBatch, None]:
        """What is in a partition, as it becomes ready, until the partition is sealed and all was taken.

        A micro-batch counts as consumed when the next one is asked for. Close the generator (`contextlib.aclosing`):
        one that was not finished comes again then. Raises StreamStarvedError after `timeout_s` without one, unless it
        `may_starve`.
        """
        while (batch := await self._next_batch(partition, may_starve)) is not None:
            try:
                yield _micro_batch(batch)
            except BaseException:
                await self._stream.give_back(batch)
                raise
            await self._stream.release(batch)

    async def feed(self, groups: AsyncIterator[list[Group]], partition: int) -> None:
        """Put groups into a partition as they come, and seal it."""
        async for several in groups:
            for group in several:
                rows = group_rows(group, partition=partition, without=self._without, reward_column=self._reward_column)
                await self._stream.put(rows, timeout_s=self._timeout_s)
        await self._stream.seal(partition)

    async def stream_step(self, groups: AsyncIterator[list[Group]]) -> AsyncGenerator[MicroBatch, None]:
        """`feed` in the background and `micro_batches` in front of it: one step of the run, in a partition of its own.

        While `groups` still come, how long that may take is for their source to judge. An error of `groups` ends the
        iteration and is raised as it is. Raises StreamError when all trajectories of the step were dropped on the way
        (by stages, or with a shard): there is nothing to step on. Close the generator (`contextlib.aclosing`): what is
        left of a step that is not finished is dropped then (`abandoned`), since its gradient is abandoned too.
        """
        # Not the learner's version: a step that was skipped is followed by another one of the same version.
        partition, self._partition = self._partition, self._partition + 1
        books, was_given = self._stream.books(), False
        feeder = asyncio.create_task(self._feed_or_fail(groups, partition))
        try:
            source = self.micro_batches(partition, may_starve=lambda: not feeder.done())
            async with aclosing(source) as micro_batches:
                async for micro_batch in micro_batches:
                    was_given = True
                    yield micro_batch
            await feeder
            if not was_given:
                self._require_rows(books)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            await self._stream.drop_partition(partition, ABANDONED)

    def _require_rows(self, before: Mapping[str, int]) -> None:
        """Raises StreamError if rows were dropped since the stream's books were these."""
        changes = {name: count - before.get(name, 0) for name, count in self._stream.books().items()}
        reasons = [f"{name.removeprefix('dropped_')} {n}" for name, n in changes.items() if "dropped_" in name and n]
        if reasons:
            raise StreamError(f"no trajectory of this step reached the learner; dropped: {', '.join(reasons)}")

    async def _next_batch(self, partition: int, may_starve: Callable[[], bool]) -> Batch | None:
        while True:
            try:
                return await self._stream.next_batch(LEARNER, partition, timeout_s=self._timeout_s)
            except StreamStarvedError:
                if not may_starve():
                    raise

    async def _feed_or_fail(self, groups: AsyncIterator[list[Group]], partition: int) -> None:
        try:
            await self.feed(groups, partition)
        except Exception as error:
            self._stream.fail(error)
            raise


def _micro_batch(batch: Batch) -> MicroBatch:
    trajectories: dict[str, list[int]] = {}
    for place, name in enumerate(batch.groups):
        trajectories.setdefault(name, []).append(place)
    groups = []
    for name, places in trajectories.items():
        members = tuple(
            row_trajectory({column: batch.columns[column][place] for column in TRAJECTORY_COLUMNS}) for place in places
        )
        groups.append(Group(name, members[0].task, members))
    return MicroBatch(groups, batch.claim.tokens)
