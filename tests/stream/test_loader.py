"""From the scheduler's groups to micro-batches: steps end when they should, and leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest

from roll_flash.errors import RollFlashError, RunError, StreamError, StreamStarvedError
from roll_flash.learner.packing.rows import pack
from roll_flash.learner.packing.sequences import prepare_demonstrations
from roll_flash.stream import Consumer, LearnerLoader, Row, Stage, TrajectoryStream, finished_group
from roll_flash.types import FinishedGroup, Group
from tests.learner.samples import make_group

JUDGE = Consumer("judge", batch_size=100)


def group(number: int, replicas: int = 3) -> FinishedGroup:
    """Of about 30 packed tokens."""
    return finished_group(make_group(number, replicas=replicas, prompt=10, turn=(2, 3), rewards=[1.0] * replicas))


def put(stream: TrajectoryStream, *groups: FinishedGroup, scored: bool = True) -> None:
    for each in groups:
        for member in each.trajectories:
            columns = {"reward": member.reward} if scored else {}
            stream.put(member.episode_id, each.group_id, member, columns)
        stream.complete(each.group_id)


async def score(stream: TrajectoryStream, *groups: FinishedGroup, reward: float = 5.0) -> None:
    """Write the rewards of these groups as a stage does; those of other groups are given back."""
    wanted = {each.group_id for each in groups}
    rows = await stream.next_batch("judge")
    for row in rows:
        if row.group_id in wanted:
            stream.write("judge", row, {"reward": reward})
    stream.give_back("judge", [row for row in rows if row.group_id not in wanted])


async def hand_out(
    stream: TrajectoryStream, *several: Sequence[FinishedGroup], scored: bool = True
) -> AsyncIterator[list[FinishedGroup]]:
    for groups in several:
        await asyncio.sleep(0)
        put(stream, *groups, scored=scored)
        yield list(groups)


async def collect(loader: LearnerLoader, source: AsyncIterator[list[FinishedGroup]]) -> list[list[FinishedGroup]]:
    async with asyncio.timeout(20), aclosing(loader.stream_step(source)) as micro_batches:
        return [micro_batch async for micro_batch in micro_batches]


def names(micro_batches: Sequence[list[FinishedGroup]]) -> list[str]:
    return [each.group_id for micro_batch in micro_batches for each in micro_batch]


def tokens_of(micro_batch: list[FinishedGroup]) -> int:
    return sum(each.packed_tokens for each in micro_batch)


def test_what_a_group_costs_is_what_packing_computes() -> None:
    for number in range(20):
        one: Group = make_group(number, replicas=1 + number % 6)
        packed = pack(prepare_demonstrations(one.trajectories), 10_000)
        # Tokens that replicas share by chance after the prompt are not known to the controller.
        assert 0 <= finished_group(one).packed_tokens - sum(row.num_tokens for row in packed) <= 4


def test_a_step_ends_with_its_own_groups_and_micro_batches_keep_their_budget() -> None:
    async def main() -> None:
        stream = TrajectoryStream()
        loader = LearnerLoader(stream, micro_batch_tokens=70)
        for step in range(3):
            groups = [group(10 * step + number) for number in range(7)]
            batches = await collect(loader, hand_out(stream, *([each] for each in groups)))
            assert sorted(names(batches)) == sorted(each.group_id for each in groups)
            assert all(tokens_of(batch) <= 70 for batch in batches)
        assert stream.counts() == {"produced": 63, "consumed": 63, "waiting": 0}

    asyncio.run(main())


def test_micro_batches_are_of_equal_size_when_all_that_is_left_is_known() -> None:
    async def main() -> None:
        stream, groups = TrajectoryStream(), [group(number) for number in range(8)]
        total = sum(each.packed_tokens for each in groups)
        largest = max(each.packed_tokens for each in groups)
        loader = LearnerLoader(stream, micro_batch_tokens=total // 2 + largest)
        batches = await collect(loader, hand_out(stream, groups))
        assert len(batches) == 2
        assert abs(tokens_of(batches[0]) - tokens_of(batches[1])) <= largest

    asyncio.run(main())


def test_the_learner_begins_before_the_last_group_is_there() -> None:
    async def main() -> None:
        stream, begun = TrajectoryStream(), asyncio.Event()

        async def slow() -> AsyncIterator[list[FinishedGroup]]:
            for number in (1, 2):
                put(stream, each := group(number))
                yield [each]
                await asyncio.wait_for(begun.wait(), 20)

        loader = LearnerLoader(stream, micro_batch_tokens=999)
        async with aclosing(loader.stream_step(slow())) as batches:
            async for _ in batches:
                begun.set()

    asyncio.run(main())


def test_groups_are_trained_as_their_rewards_come_or_in_order_if_that_is_asked_for() -> None:
    async def order(in_order: bool) -> list[str]:
        stream, groups = TrajectoryStream([JUDGE]), [group(number) for number in range(3)]
        loader = LearnerLoader(stream, micro_batch_tokens=1, in_order=in_order)
        collecting = asyncio.create_task(collect(loader, hand_out(stream, groups, scored=False)))
        await asyncio.sleep(0.01)
        for each in reversed(groups):
            await score(stream, each)
            await asyncio.sleep(0.01)
        return names(await collecting)

    assert asyncio.run(order(in_order=False)) == ["group-2", "group-1", "group-0"]
    assert asyncio.run(order(in_order=True)) == ["group-0", "group-1", "group-2"]


def test_a_reward_that_a_stage_writes_is_the_reward_that_is_trained() -> None:
    async def main() -> None:
        stream, each = TrajectoryStream([JUDGE]), group(1)
        put(stream, each, scored=False)
        await score(stream, each, reward=7.0)

        async def source() -> AsyncIterator[list[FinishedGroup]]:
            yield [each]

        [batch] = await collect(LearnerLoader(stream, micro_batch_tokens=99), source())
        assert [member.reward for member in batch[0].trajectories] == [7.0] * 3
        assert [member.reward for member in each.trajectories] == [1.0] * 3

    asyncio.run(main())


def test_a_step_may_be_long_but_not_when_all_its_groups_are_there() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE])

        async def slow() -> AsyncIterator[list[FinishedGroup]]:
            await asyncio.sleep(0.2)
            put(stream, each := group(1), scored=False)
            yield [each]

        says = r"1 groups got no 'reward' within 0\.02 s; stages that are behind: judge \(3 rows\)"
        with pytest.raises(StreamStarvedError, match=says):
            await collect(LearnerLoader(stream, micro_batch_tokens=99, timeout_s=0.02), slow())
        assert stream.counts()["dropped_abandoned"] == 3

    asyncio.run(main())


def test_an_error_of_the_source_ends_the_step_as_it_is() -> None:
    async def main() -> None:
        stream = TrajectoryStream()

        async def broken() -> AsyncIterator[list[FinishedGroup]]:
            put(stream, each := group(1))
            yield [each]
            raise RunError("the last 64 episodes all failed")

        with pytest.raises(RunError, match="the last 64 episodes all failed"):
            await collect(LearnerLoader(stream, micro_batch_tokens=99), broken())

    asyncio.run(main())


@pytest.mark.parametrize(
    "raised", [asyncio.CancelledError("leaked"), GeneratorExit("leaked")], ids=lambda e: type(e).__name__
)
def test_a_source_that_ends_as_no_exception_does_ends_the_step_too(raised: BaseException) -> None:
    async def main() -> None:
        async def broken() -> AsyncIterator[list[FinishedGroup]]:
            yield []
            raise raised

        async with asyncio.timeout(10):
            with pytest.raises((RollFlashError, type(raised))):
                await collect(LearnerLoader(TrajectoryStream(), micro_batch_tokens=99), broken())

    asyncio.run(main())


def test_a_stage_that_breaks_ends_the_step_also_while_no_group_is_there() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE])

        async def endless() -> AsyncIterator[list[FinishedGroup]]:
            await asyncio.sleep(60)
            yield []

        collecting = asyncio.create_task(collect(LearnerLoader(stream, micro_batch_tokens=99), endless()))
        await asyncio.sleep(0.01)
        stream.fail(StreamError("stage 'judge' failed 8 times in a row"))
        with pytest.raises(StreamError, match="stage 'judge' failed 8 times"):
            await collecting

    asyncio.run(main())


def test_what_is_left_of_a_step_that_is_given_up_is_dropped_and_the_next_step_is_clean() -> None:
    async def main() -> None:
        stream = TrajectoryStream()
        put(stream, prefetched := group(9))
        loader = LearnerLoader(stream, micro_batch_tokens=40)
        source = hand_out(stream, [group(1)], [group(2)], [group(3)])
        async with aclosing(loader.stream_step(source)) as batches:
            await anext(batches)
            await anext(batches)
        counts = stream.counts()
        assert (counts["consumed"], counts["waiting"]) == (3, 3), "the prefetched group is of a later step"
        assert counts["dropped_abandoned"] == counts["produced"] - 6

        async def later() -> AsyncIterator[list[FinishedGroup]]:
            yield [prefetched]

        assert names(await collect(loader, later())) == ["group-9"]

    asyncio.run(main())


def test_a_group_of_which_too_few_are_left_is_not_trained_and_counted() -> None:
    async def main() -> None:
        stream, groups = TrajectoryStream([JUDGE]), [group(1), group(2)]
        put(stream, *groups, scored=False)
        rows = await stream.next_batch("judge")
        stream.drop(rows[:2], "stage_judge_failed")
        for row in rows[2:]:
            stream.write("judge", row, {"reward": 1.0})

        async def source() -> AsyncIterator[list[FinishedGroup]]:
            yield groups

        assert names(await collect(LearnerLoader(stream, micro_batch_tokens=99), source())) == ["group-2"]
        assert stream.counts() == {
            "produced": 6,
            "consumed": 3,
            "dropped_stage_judge_failed": 2,
            "dropped_group_too_small": 1,
            "waiting": 0,
        }

    asyncio.run(main())


def test_a_group_may_have_one_trajectory_where_none_are_compared() -> None:
    async def main() -> None:
        stream = TrajectoryStream()
        loader = LearnerLoader(stream, micro_batch_tokens=99, least_group_size=1)
        assert names(await collect(loader, hand_out(stream, [group(1, replicas=1)]))) == ["group-1"]

    asyncio.run(main())


def test_a_step_of_which_stages_dropped_all_before_it_began_is_an_error_and_no_end_of_the_run() -> None:
    async def main() -> None:
        stream, each = TrajectoryStream([JUDGE]), group(1)
        put(stream, each, scored=False)
        stream.drop(await stream.next_batch("judge"), "stage_judge_failed")

        async def source() -> AsyncIterator[list[FinishedGroup]]:
            yield [each]

        with pytest.raises(StreamError, match=r"no trajectory of this step reached the learner.*stage_judge_failed 3"):
            await collect(LearnerLoader(stream, micro_batch_tokens=99), source())

    asyncio.run(main())


def test_a_step_that_no_group_comes_for_ends_without_a_micro_batch() -> None:
    async def main() -> None:
        stream = TrajectoryStream()
        assert await collect(LearnerLoader(stream, micro_batch_tokens=99), hand_out(stream)) == []

    asyncio.run(main())


def test_a_slow_judge_is_hidden_behind_prefetched_episodes() -> None:
    """Episodes of the next step end while this one is trained: their scores are there when it begins."""

    async def steps(judge_s: float) -> float:
        stream, made = TrajectoryStream([JUDGE]), dict[int, list[FinishedGroup]]()

        async def judge(rows: Sequence[Row]) -> list[dict[str, float]]:
            await asyncio.sleep(judge_s)
            return [{"reward": 1.0}] * len(rows)

        def play(step: int) -> None:
            made[step] = [group(10 * step + number) for number in range(2)]
            put(stream, *made[step], scored=False)

        async def groups_of(step: int) -> AsyncIterator[list[FinishedGroup]]:
            yield made.pop(step)

        judging = asyncio.create_task(Stage(stream, JUDGE, judge).run())
        loader = LearnerLoader(stream, micro_batch_tokens=10_000)
        play(0)
        await asyncio.sleep(2 * judge_s)  # the first step has nothing that it could hide behind
        began = time.monotonic()
        for step in range(5):
            play(step + 1)
            async with aclosing(loader.stream_step(groups_of(step))) as batches:
                async for _ in batches:
                    await asyncio.sleep(0.2)
        judging.cancel()
        return time.monotonic() - began

    slow, without = asyncio.run(steps(0.15)), asyncio.run(steps(0.0))
    assert slow - without < 0.3, "5 x 0.15 s would be 0.75 s"
