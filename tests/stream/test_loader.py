"""From groups to the learner and back: nothing of a trajectory is lost on the way, and steps end when they should."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import numpy as np
import pytest

from roll_flash.errors import RunError, StreamStarvedError
from roll_flash.learner.packing.rows import pack
from roll_flash.learner.packing.sequences import prepare_demonstrations
from roll_flash.stream import (
    TRAJECTORY_COLUMNS,
    Batch,
    Consumer,
    LearnerLoader,
    MicroBatch,
    Sequential,
    Stage,
    TokenBalanced,
    TrajectoryStream,
    group_rows,
    learner_consumer,
    row_trajectory,
    trajectory_row,
)
from roll_flash.stream.store import Store
from roll_flash.types import Group, Task, Trajectory, Turn


def trajectory(prompt: list[int], answer: list[int], *, name: str, group: str, version: int = 0) -> Trajectory:
    tokens = np.array(prompt + answer, np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        episode_id=name,
        group_id=group,
        task=Task("task", "Made-v0", 7, {"level": 2}, max_turns=3),
        token_ids=tokens,
        policy_mask=mask,
        logprobs=np.where(mask, -0.25, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(Turn(len(prompt), len(tokens), "say «hé»", "", 0.5, "stop", 0.1, 0.2),),
        messages=({"role": "user", "content": "hé"},),
        reward=0.1 + len(answer),
        success=None,
        end="terminated",
        prompt_length=len(prompt),
        started_s=1.5,
        finished_s=2.5,
        info={"score": np.float32(0.5), "path": (1, 2)},
    )


def group(number: int, replicas: int = 3, version: int = 0) -> Group:
    random = np.random.default_rng(number)
    prompt = random.integers(2, 99, 10).tolist()
    name = f"g{number}"
    members = tuple(
        trajectory(
            prompt, random.integers(2, 99, 3 + index).tolist(), name=f"{name}-{index}", group=name, version=version
        )
        for index in range(replicas)
    )
    return Group(name, members[0].task, members)


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == yours.dtype
            np.testing.assert_array_equal(mine, yours)
        elif field.name == "info":
            assert yours == {"score": 0.5, "path": [1, 2]}
        else:
            assert mine == yours


async def groups_of(*several: list[Group]) -> AsyncIterator[list[Group]]:
    for groups in several:
        await asyncio.sleep(0)
        yield groups


async def collect(loader: LearnerLoader, source: AsyncIterator[list[Group]]) -> list[MicroBatch]:
    async with aclosing(loader.stream_step(source)) as micro_batches:
        return [micro_batch async for micro_batch in micro_batches]


def test_a_trajectory_comes_back_as_it_went(new_store: Callable[[], Store]) -> None:
    async def main() -> None:
        stream = TrajectoryStream([learner_consumer(1000)], new_store())
        (batch,) = await collect(LearnerLoader(stream), groups_of([group(1)]))
        for sent, came in zip(group(1).trajectories, batch.groups[0].trajectories, strict=True):
            assert_same(sent, came)
        assert batch.groups[0].group_id == "g1"
        assert batch.groups[0].task == group(1).task

    asyncio.run(main())


def test_what_a_group_costs_is_what_packing_computes() -> None:
    for number in range(20):
        one = group(number, replicas=1 + number % 6)
        rows = group_rows(one)
        packed = pack(prepare_demonstrations(one.trajectories), 10_000)
        assert sum(row.tokens for row in rows) == sum(row.num_tokens for row in packed)
        assert sum(row.tokens for row in rows) < sum(len(t.token_ids) for t in one.trajectories) or len(rows) == 1


def test_a_step_ends_with_its_own_groups_and_micro_batches_keep_their_budget() -> None:
    async def main() -> None:
        stream = TrajectoryStream([learner_consumer(70)])
        loader = LearnerLoader(stream)
        for step in range(3):
            numbers = range(10 * step, 10 * step + 7)
            batches = await collect(loader, groups_of(*([group(number)] for number in numbers)))
            assert sorted(g.group_id for batch in batches for g in batch.groups) == sorted(f"g{n}" for n in numbers)
            assert all(batch.tokens <= 70 for batch in batches)
        assert stream.books() == {"produced": 63, "consumed_by_learner": 63, "consumed": 63, "waiting": 0}

    asyncio.run(main())


def test_the_learner_begins_before_the_last_group_is_there() -> None:
    async def slow() -> AsyncIterator[list[Group]]:
        yield [group(1)]
        await begun.wait()
        yield [group(2)]

    async def main() -> None:
        async with aclosing(LearnerLoader(TrajectoryStream([learner_consumer(999)])).stream_step(slow())) as batches:
            async for _ in batches:
                begun.set()

    begun = asyncio.Event()
    asyncio.run(main())


def test_a_step_may_be_long_but_not_when_all_its_groups_are_there() -> None:
    async def slow() -> AsyncIterator[list[Group]]:
        await asyncio.sleep(0.2)
        yield [group(1)]

    async def main() -> None:
        columns = (*TRAJECTORY_COLUMNS, "ref_logprobs")
        stream = TrajectoryStream([Consumer("learner", columns, TokenBalanced(99, whole_groups=True))])
        with pytest.raises(StreamStarvedError, match="3 rows lack 'ref_logprobs'"):
            await collect(LearnerLoader(stream, timeout_s=0.02), slow())

    asyncio.run(main())


def test_fair_trains_in_the_order_of_puts() -> None:
    async def main() -> None:
        sampler = TokenBalanced(60, whole_groups=True)
        stream = TrajectoryStream([Consumer("learner", (*TRAJECTORY_COLUMNS, "ready"), sampler, in_order=True)])
        ids = [await stream.put(group_rows(group(number))) for number in range(5)]
        for row_ids in reversed(ids):
            await stream.write(row_ids, [{"ready": np.array(1)}] * len(row_ids))
        await stream.seal(0)
        batches = [batch async for batch in LearnerLoader(stream).micro_batches(0)]
        order = [g.group_id for batch in batches for g in batch.groups]
        assert sorted(order) == order

    asyncio.run(main())


def test_an_error_of_the_source_ends_the_step_as_it_is() -> None:
    async def broken() -> AsyncIterator[list[Group]]:
        yield [group(1)]
        raise RunError("the last 64 episodes all failed")

    async def main() -> None:
        with pytest.raises(RunError, match="the last 64 episodes all failed"):
            await collect(LearnerLoader(TrajectoryStream([learner_consumer(99)])), broken())

    asyncio.run(main())


def test_a_micro_batch_that_was_not_finished_comes_again() -> None:
    async def main() -> None:
        stream = TrajectoryStream([learner_consumer(40)])
        loader = LearnerLoader(stream)
        await loader.feed(groups_of([group(1), group(2)]), 0)
        async with aclosing(loader.micro_batches(0)) as batches:
            await anext(batches)
        assert stream.books()["waiting"] == 6
        async with aclosing(loader.micro_batches(0)) as batches:
            assert [g.group_id async for batch in batches for g in batch.groups] == ["g1", "g2"]

    asyncio.run(main())


def test_what_is_left_of_a_step_that_is_given_up_is_dropped_and_the_next_step_is_clean() -> None:
    async def main() -> None:
        stream = TrajectoryStream([learner_consumer(40)])
        loader = LearnerLoader(stream)
        async with aclosing(loader.stream_step(groups_of([group(1)], [group(2)], [group(3)]))) as batches:
            await anext(batches)
            await anext(batches)
        books = stream.books()
        assert (books["consumed"], books["waiting"]) == (3, 0)
        assert books["dropped_abandoned"] == books["produced"] - 3
        (batch,) = await collect(loader, groups_of([group(4)]))
        assert [g.group_id for g in batch.groups] == ["g4"]

    asyncio.run(main())


def test_a_reward_that_a_stage_writes_is_the_trajectorys_reward() -> None:
    async def judge(batch: Batch) -> list[dict[str, np.ndarray]]:
        return [{"reward": np.array(float(len(ids)))} for ids in batch.columns["token_ids"]]

    async def main() -> None:
        stream = TrajectoryStream([learner_consumer(99), Consumer("judge", ("token_ids",), Sequential(2))])
        stage = asyncio.create_task(Stage(stream, "judge", judge).run())
        batches = await collect(LearnerLoader(stream, without=("reward",)), groups_of([group(1)]))
        assert [t.reward for t in batches[0].groups[0].trajectories] == [13.0, 14.0, 15.0]
        await stream.seal()
        await stage

    asyncio.run(main())


def test_single_trajectories_become_a_group_when_the_last_one_is_there() -> None:
    async def main() -> None:
        stream = TrajectoryStream([learner_consumer(99)])
        for member in group(1).trajectories:
            await stream.put([trajectory_row(member, group_size=3)])
        batch = await stream.next_batch("learner", timeout_s=1)
        assert batch is not None
        came = row_trajectory({name: arrays[1] for name, arrays in batch.columns.items()})
        assert_same(group(1).trajectories[1], came)

    asyncio.run(main())


def test_a_step_that_no_group_comes_for_ends_without_a_micro_batch() -> None:
    async def main() -> None:
        assert await collect(LearnerLoader(TrajectoryStream([learner_consumer(99)])), groups_of()) == []

    asyncio.run(main())
