"""Stages: rows go on as soon as a stage wrote their column; what fails is repeated, then dropped and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from roll_flash.errors import StreamError
from roll_flash.stream import Batch, Columns, Consumer, Groups, Row, Sequential, Stage, TrajectoryStream

LEARNER = Consumer("learner", ("tokens", "reward"), Groups(1))
JUDGE = Consumer("judge", ("tokens",), Sequential(1))


def rewards(batch: Batch) -> Sequence[Columns]:
    return [{"reward": np.array(float(tokens.sum()))} for tokens in batch.columns["tokens"]]


async def put_groups(stream: TrajectoryStream, *groups: Sequence[int]) -> None:
    for name, members in enumerate(groups):
        rows = [Row({"tokens": np.full(2, n)}, group=f"g{name}", group_size=len(members)) for n in members]
        await stream.put(rows)
    await stream.seal()


async def trained(stream: TrajectoryStream) -> dict[str, list[float]]:
    got: dict[str, list[float]] = {}
    while (batch := await stream.next_batch("learner", timeout_s=20)) is not None:
        for group, reward in zip(batch.groups, batch.columns["reward"], strict=True):
            got.setdefault(group, []).append(float(reward))
        await stream.release(batch)
    return got


def test_a_slow_judgement_holds_up_its_own_group_only() -> None:
    order: list[str] = []

    async def judge(batch: Batch) -> Sequence[Columns]:
        if int(batch.columns["tokens"][0][0]) == 0:
            await go_on.wait()
        return rewards(batch)

    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE])
        stage = asyncio.create_task(Stage(stream, "judge", judge, concurrency=2).run())
        await put_groups(stream, [0, 1], [2, 3])
        for _ in range(2):
            batch = await stream.next_batch("learner", timeout_s=20)
            assert batch is not None
            order.append(batch.groups[0])
            await stream.release(batch)
            go_on.set()
        await stage

    go_on = asyncio.Event()
    asyncio.run(main())
    assert order == ["g1", "g0"]


def test_failures_are_repeated_then_dropped_with_the_stages_name_and_the_group_goes_on_smaller() -> None:
    attempts: dict[int, int] = {}

    async def judge(batch: Batch) -> Sequence[Columns]:
        number = int(batch.columns["tokens"][0][0])
        attempts[number] = attempts.get(number, 0) + 1
        if number == 1 and attempts[number] == 1:
            raise ConnectionError("try again")
        if number == 2:
            await asyncio.sleep(60)
        return rewards(batch)

    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE])
        stage = Stage(stream, "judge", judge, concurrency=4, timeout_s=0.05, retries=1)
        running = asyncio.create_task(stage.run())
        await put_groups(stream, [0, 1, 2], [3, 4])
        assert await trained(stream) == {"g1": [6.0, 8.0], "g0": [0.0, 2.0]}
        await running
        assert attempts == {0: 1, 1: 2, 2: 2, 3: 1, 4: 1}
        assert stream.books()["dropped_stage_judge_failed"] == 1
        assert stream.metrics()["balanced"] == 1.0
        counts = stage.metrics()
        assert (counts["rows"], counts["failed_rows"], counts["retries"]) == (4, 1, 2)
        assert stage.last_error == "took longer than 0.05 s"

    asyncio.run(main())


def test_a_time_out_of_the_stages_own_is_told_as_what_it_is() -> None:
    async def judge(batch: Batch) -> Sequence[Columns]:
        raise TimeoutError("the judge's endpoint did not answer within 3 s")

    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE])
        stage = Stage(stream, "judge", judge, retries=0, timeout_s=50)
        running = asyncio.create_task(stage.run())
        await put_groups(stream, [0, 1])
        assert await trained(stream) == {}
        await running
        assert stage.last_error == "TimeoutError: the judge's endpoint did not answer within 3 s"

    asyncio.run(main())


def test_a_group_with_too_few_left_is_dropped_whole() -> None:
    async def judge(batch: Batch) -> Sequence[Columns]:
        if int(batch.columns["tokens"][0][0]) == 1:
            raise ValueError("cannot judge this")
        return rewards(batch)

    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE], smallest_group=2)
        running = asyncio.create_task(Stage(stream, "judge", judge, retries=0).run())
        await put_groups(stream, [0, 1], [2, 3])
        assert await trained(stream) == {"g1": [4.0, 6.0]}
        await running
        assert stream.books()["dropped_group_too_small"] == 1

    asyncio.run(main())


def test_a_stage_that_only_fails_stops_the_run_with_its_reason() -> None:
    async def judge(batch: Batch) -> Sequence[Columns]:
        raise ConnectionError("no judge at this address")

    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE])
        running = asyncio.create_task(Stage(stream, "judge", judge, retries=0, max_failures_in_a_row=3).run())
        await put_groups(stream, range(8))
        with pytest.raises(StreamError, match=r"stage 'judge' failed 3 times in a row.*no judge at this address"):
            await trained(stream)
        with pytest.raises(StreamError, match="failed 3 times"):
            await running

    asyncio.run(main())


def test_a_stage_that_is_cancelled_gives_its_rows_to_the_next() -> None:
    async def hangs(batch: Batch) -> Sequence[Columns]:
        await asyncio.sleep(60)
        raise AssertionError

    async def judge(batch: Batch) -> Sequence[Columns]:
        return rewards(batch)

    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE])
        first = asyncio.create_task(Stage(stream, "judge", hangs).run())
        await put_groups(stream, [5])
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(Stage(stream, "judge", judge).run())
        assert await trained(stream) == {"g0": [10.0]}
        await second

    asyncio.run(main())
