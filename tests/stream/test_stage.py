"""Stages: rows go on as soon as a stage wrote their column; what fails is repeated, then dropped and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from roll_flash.errors import StreamError
from roll_flash.stream import Consumer, Row, Stage, TrajectoryStream

JUDGE = Consumer("judge")
Rewards = Sequence[Mapping[str, float]]


def rewards(rows: Sequence[Row]) -> Rewards:
    return [{"reward": float(row.data)} for row in rows]


def put_group(stream: TrajectoryStream, name: str, *numbers: int) -> None:
    for number in numbers:
        stream.put(f"{name}-{number}", name, number, {})
    stream.complete(name)


async def rewards_of(stream: TrajectoryStream, group: str) -> list[float]:
    rows = stream.close_group(group)
    async with asyncio.timeout(20):
        await stream.settled(rows, "reward")
    return [row.columns["reward"] for row in rows if not row.is_gone]


def test_a_slow_judgement_holds_up_its_own_group_only() -> None:
    async def main() -> None:
        go_on = asyncio.Event()

        async def judge(rows: Sequence[Row]) -> Rewards:
            if rows[0].data == 0:
                await go_on.wait()
            return rewards(rows)

        stream = TrajectoryStream([JUDGE])
        running = asyncio.create_task(Stage(stream, JUDGE, judge, concurrency=2).run())
        put_group(stream, "slow", 0, 1)
        put_group(stream, "quick", 2, 3)
        slow = asyncio.create_task(rewards_of(stream, "slow"))
        assert await rewards_of(stream, "quick") == [2, 3]
        assert not slow.done()
        go_on.set()
        assert await slow == [0, 1]
        running.cancel()

    asyncio.run(main())


def test_failures_are_repeated_then_dropped_with_the_stages_name_and_the_group_goes_on_smaller() -> None:
    attempts: dict[int, int] = {}

    async def judge(rows: Sequence[Row]) -> Rewards:
        number = rows[0].data
        attempts[number] = attempts.get(number, 0) + 1
        if number == 1 and attempts[number] == 1:
            raise ConnectionError("try again")
        if number == 2:
            await asyncio.sleep(60)
        return rewards(rows)

    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        stage = Stage(stream, JUDGE, judge, concurrency=4, timeout_s=0.05, retries=1)
        running = asyncio.create_task(stage.run())
        put_group(stream, "g", 0, 1, 2)
        assert await rewards_of(stream, "g") == [0, 1]
        running.cancel()
        assert attempts == {0: 1, 1: 2, 2: 2}
        assert stream.counts()["dropped_stage_judge_failed"] == 1
        assert stream.metrics()["balanced"] == 1.0
        counts = stage.metrics()
        assert (counts["rows"], counts["failed_rows"], counts["retries"]) == (2, 1, 2)
        assert stage.last_error == "took longer than 0.05 s"

    asyncio.run(main())


def test_a_time_out_of_the_stages_own_is_told_as_what_it_is() -> None:
    async def judge(rows: Sequence[Row]) -> Rewards:
        raise TimeoutError("the judge's endpoint did not answer within 3 s")

    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        stage = Stage(stream, JUDGE, judge, retries=0, timeout_s=50)
        running = asyncio.create_task(stage.run())
        put_group(stream, "g", 0, 1)
        assert await rewards_of(stream, "g") == []
        running.cancel()
        assert stage.last_error == "TimeoutError: the judge's endpoint did not answer within 3 s"

    asyncio.run(main())


def test_a_stage_that_only_fails_stops_the_run_with_its_reason() -> None:
    async def judge(rows: Sequence[Row]) -> Rewards:
        raise ConnectionError("no judge at this address")

    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        running = asyncio.create_task(Stage(stream, JUDGE, judge, retries=0, max_failures_in_a_row=3).run())
        put_group(stream, "g", *range(8))
        says = r"stage 'judge' failed 3 times in a row.*no judge at this address"
        with pytest.raises(StreamError, match=says):
            await asyncio.wait_for(running, 20)
        with pytest.raises(StreamError, match=says):
            stream.raise_failure()

    asyncio.run(main())


def test_a_stage_that_is_cancelled_gives_its_rows_to_the_next() -> None:
    async def hangs(rows: Sequence[Row]) -> Rewards:
        await asyncio.sleep(60)
        raise AssertionError

    async def judge(rows: Sequence[Row]) -> Rewards:
        return rewards(rows)

    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        first = asyncio.create_task(Stage(stream, JUDGE, hangs).run())
        put_group(stream, "g", 5)
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(Stage(stream, JUDGE, judge).run())
        assert await rewards_of(stream, "g") == [5]
        second.cancel()

    asyncio.run(main())
