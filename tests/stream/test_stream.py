"""The stream on both stores: rows go through unchanged and once, nobody blocks whom he should not, state comes back."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll_flash.errors import CheckpointError, StreamError, StreamFullError, StreamStarvedError
from roll_flash.stream import (
    Batch,
    Consumer,
    Groups,
    Row,
    Sequential,
    TokenBalanced,
    TrajectoryStream,
    load_stream,
    save_stream,
)
from roll_flash.stream.rows import Claim
from roll_flash.stream.store import Store

NewStore = Callable[[], Store]
LEARNER = Consumer("learner", ("tokens", "reward"), Groups(1))
JUDGE = Consumer("judge", ("tokens",), Sequential(2))


def run(main: Coroutine[Any, Any, None]) -> None:
    async def within_a_minute() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(within_a_minute())


def row(number: int, length: int = 3, **fields: Any) -> Row:
    return Row({"tokens": np.full(length, number, np.int32)}, tokens=length, **fields)


def numbers(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [int(tokens[0]) for tokens in batch.columns["tokens"]]


def reward(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"reward": np.array(value)}


def test_ragged_columns_of_every_kind_come_back_bit_by_bit_and_read_only(new_store: NewStore) -> None:
    random = np.random.default_rng(0)
    kinds = {
        "token_ids": random.integers(0, 9, 7).astype(np.int32),
        "mask": random.random(5) < 0.5,
        "values": np.array([np.nan, -np.inf, 1e-40, -0.0], np.float32),
        "scalar": np.array(2.5),
        "matrix": random.random((3, 4)).T,
        "empty": np.empty((0, 3), np.uint8),
        "half": np.array([1, 2], np.float16),
    }

    async def main() -> None:
        stream = TrajectoryStream([Consumer("reader", tuple(kinds), Sequential(9))], new_store())
        await stream.put([Row(kinds), Row({**kinds, "token_ids": np.arange(1000, dtype=np.int32)})])
        batch = await stream.next_batch("reader")
        assert batch is not None
        for name, array in kinds.items():
            came = batch.columns[name][0]
            assert (came.dtype, came.shape) == (array.dtype, array.shape)
            assert came.tobytes() == array.tobytes()
            assert not came.flags.writeable
        assert len(batch.columns["token_ids"][1]) == 1000
        await stream.release(batch)
        assert stream.books() == {"produced": 2, "consumed_by_reader": 2, "consumed": 2, "waiting": 0}

    run(main())


def test_a_row_is_ready_for_each_consumer_when_its_own_columns_are_there(new_store: NewStore) -> None:
    async def main() -> None:
        store = new_store()
        stream = TrajectoryStream([LEARNER, JUDGE], store)
        row_ids = await stream.put([row(7, group="g", group_size=2), row(8, group="g")])
        with pytest.raises(StreamStarvedError, match="1 waiting, 0 ready, 2 rows lack 'reward'"):
            await stream.next_batch("learner", timeout_s=0.01)
        judged = await stream.next_batch("judge")
        assert numbers(judged) == [7, 8]
        await stream.write(row_ids[:1], [reward(0.5)])
        with pytest.raises(StreamStarvedError, match="1 rows lack 'reward'"):
            await stream.next_batch("learner", timeout_s=0.01)
        await stream.write(row_ids[1:], [reward(0.25)])
        batch = await stream.next_batch("learner")
        assert batch is not None
        assert batch.groups == ["g", "g"]
        assert [float(value) for value in batch.columns["reward"]] == [0.5, 0.25]
        await stream.release(batch)
        assert (await store.stats())["rows"] == 2, "the judge has not released them"
        assert judged is not None
        await stream.release(judged)
        assert (await store.stats()) == {"rows": 0, "bytes": 0}

    run(main())


@pytest.mark.parametrize(("in_order", "expected"), [(False, [2, 0, 1]), (True, [0, 1, 2])])
def test_rows_come_as_they_become_ready_or_in_the_order_of_puts(in_order: bool, expected: list[int]) -> None:
    async def main() -> None:
        consumer = Consumer("learner", ("tokens", "reward"), Sequential(1), in_order=in_order)
        stream = TrajectoryStream([consumer])
        row_ids = await stream.put([row(number) for number in range(3)])
        got: list[int] = []
        reader = asyncio.create_task(_read(stream, got, 3))
        for number in (2, 0, 1):
            await asyncio.sleep(0)
            await stream.write([row_ids[number]], [reward(number)])
        await reader
        assert got == expected

    run(main())


async def _read(stream: TrajectoryStream, got: list[int], count: int) -> None:
    while len(got) < count:
        batch = await stream.next_batch("learner")
        assert batch is not None
        got.extend(numbers(batch))
        await stream.release(batch)


def test_many_writers_and_readers_get_every_row_once(new_store: NewStore) -> None:
    async def main() -> None:
        stream = TrajectoryStream(
            [Consumer("learner", ("tokens", "reward"), TokenBalanced(40)), JUDGE], new_store(), capacity_rows=20
        )
        trained: list[int] = []

        async def write(first: int) -> None:
            for number in range(first, first + 20):
                await stream.put([row(number, 1 + number % 9)])

        async def judge() -> None:
            while (batch := await stream.next_batch("judge")) is not None:
                await stream.write(batch.row_ids, [reward(number) for number in numbers(batch)])
                await stream.release(batch)

        async def train() -> None:
            while (batch := await stream.next_batch("learner")) is not None:
                assert numbers(batch) == [int(value) for value in batch.columns["reward"]]
                trained.extend(numbers(batch))
                await stream.release(batch)

        readers = [asyncio.create_task(work()) for work in (judge, judge, train, train)]
        await asyncio.gather(*(write(100 * writer) for writer in range(4)))
        await stream.seal()
        await asyncio.gather(*readers)
        assert sorted(trained) == [100 * writer + number for writer in range(4) for number in range(20)]
        assert stream.metrics()["balanced"] == 1.0

    run(main())


@pytest.mark.parametrize("in_order", [False, True])
def test_a_row_that_comes_late_holds_up_no_more_than_its_order(new_store: NewStore, in_order: bool) -> None:
    """More rows than a sampler sees at once are behind it."""

    async def main() -> None:
        consumer = Consumer("learner", ("tokens", "reward"), Sequential(64), in_order=in_order)
        stream = TrajectoryStream([consumer], new_store())
        row_ids = await stream.put([row(number) for number in range(300)])
        await stream.write(row_ids[1:], [reward(number) for number in range(1, 300)])
        got: list[int] = []
        await _read(stream, got, 0 if in_order else 299)
        await stream.write(row_ids[:1], [reward(0)])
        await _read(stream, got, 300)
        assert got == [*range(300)] if in_order else [*range(1, 300), 0]

    run(main())


def test_a_full_stream_makes_writers_wait_and_drops_nothing(new_store: NewStore) -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE], new_store(), capacity_rows=4)
        await stream.put([row(number) for number in range(4)])
        with pytest.raises(StreamFullError, match=r"no room for 1 rows within 0\.01 s: it holds 4 rows"):
            await stream.put([row(9)], timeout_s=0.01)
        waiting = [asyncio.create_task(stream.put([row(4)])), asyncio.create_task(stream.put([row(5)]))]
        await asyncio.sleep(0.01)
        assert stream.metrics()["writers_waiting"] == 2
        assert not any(task.done() for task in waiting)
        seen: list[int] = []
        while len(seen) < 6:
            batch = await stream.next_batch("judge")
            assert batch is not None
            seen += numbers(batch)
            await stream.release(batch)
        assert sorted(seen) == [0, 1, 2, 3, 4, 5]
        assert [task.result() for task in waiting] == [[4], [5]], "writers were let in in turn"
        assert stream.books()["produced"] == 6

    run(main())


def test_the_rest_of_a_group_that_has_begun_never_waits_for_room() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("learner", ("tokens",), Groups(1))], capacity_rows=2)
        await stream.put([row(1, group="a", group_size=2), row(2, group="b", group_size=2)])
        blocked = asyncio.create_task(stream.put([row(9, group="c", group_size=1)]))
        await asyncio.sleep(0)
        await stream.put([row(3, group="a")], timeout_s=1)
        assert numbers(await stream.next_batch("learner")) == [1, 3]
        blocked.cancel()

    run(main())


@settings(max_examples=40, deadline=None)
@given(st.permutations(["a", "a", "b", "b", "c", "c", "d", "d"]), st.integers(1, 4), st.booleans(), st.booleans())
@example(["a", "b", "c", "a", "b", "c", "d", "d"], 2, False, True)
def test_writers_in_any_order_never_lock_a_bounded_stream_of_whole_groups_up(
    order: list[str], capacity: int, in_order: bool, is_full: bool
) -> None:
    """All of them queue at once, and groups are handed out whole: what has begun must never wait behind others."""

    async def main() -> None:
        consumers = [Consumer("learner", ("tokens",), Groups(1), in_order=in_order)]
        stream = TrajectoryStream(consumers, capacity_rows=capacity)
        if is_full:
            await stream.put([row(9, group="first", group_size=capacity) for _ in range(capacity)])
        writers = [asyncio.create_task(stream.put([row(1, group=name, group_size=2)], timeout_s=5)) for name in order]
        await asyncio.sleep(0)
        for _ in range(4 + is_full):
            batch = await stream.next_batch("learner", timeout_s=5)
            assert batch is not None
            await stream.release(batch)
        await asyncio.gather(*writers)
        assert stream.metrics()["balanced"] == 1.0
        assert stream.books()["waiting"] == 0

    run(main())


def test_what_a_cancelled_consumer_had_taken_comes_again() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        await stream.put([row(1)])

        async def work(*, fails: bool) -> None:
            assert numbers(await stream.next_batch("judge", timeout_s=5)) == [1]
            if fails:
                raise ValueError("the consumer's own mistake")
            await asyncio.sleep(60)

        cancelled = asyncio.create_task(work(fails=False))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        failed = asyncio.create_task(work(fails=True))
        await asyncio.gather(cancelled, failed, return_exceptions=True)
        batch = await stream.next_batch("judge", timeout_s=5)
        assert numbers(batch) == [1]
        assert batch is not None
        await stream.release(batch)
        await stream.seal()
        assert await stream.next_batch("judge") is None

    run(main())


def test_room_that_a_cancelled_consumer_leaves_goes_to_the_next_writer() -> None:
    """Its row was dropped while it had it: nothing comes again, and nothing else may happen any more."""

    async def main() -> None:
        stream = TrajectoryStream([JUDGE], capacity_rows=1)
        (row_id,) = await stream.put([row(1)])

        async def work() -> None:
            assert numbers(await stream.next_batch("judge")) == [1]
            await asyncio.sleep(60)

        consumer = asyncio.create_task(work())
        await asyncio.sleep(0)
        await stream.drop([row_id], "late")
        writer = asyncio.create_task(stream.put([row(2)], timeout_s=1))
        await asyncio.sleep(0)
        consumer.cancel()
        assert await writer == [row_id + 1]
        assert stream.books()["dropped_late"] == 1

    run(main())


def test_a_task_that_takes_batches_for_days_keeps_nothing_of_them() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        for number in range(200):
            await stream.put([row(number)])
            batch = await stream.next_batch("judge")
            assert batch is not None
            await stream.release(batch)
        del batch
        gc.collect()
        assert sum(isinstance(thing, Claim) for thing in gc.get_objects()) < 20

    run(main())


def test_a_writer_that_is_cancelled_when_it_is_let_in_puts_nothing_and_holds_no_place() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE], capacity_rows=1)
        await stream.put([row(1)])
        writer = asyncio.create_task(stream.put([row(2)]))
        other = asyncio.create_task(stream.put([row(3)], timeout_s=5))
        await asyncio.sleep(0)
        batch = await stream.next_batch("judge")
        assert batch is not None
        await stream.release(batch)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        assert numbers(await stream.next_batch("judge", timeout_s=5)) == [3]
        assert await other
        assert stream.books()["produced"] == 2

    run(main())


def test_a_timeout_that_made_the_stream_fail_is_not_taken_for_the_streams_own() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE], capacity_rows=1)
        await stream.put([row(1)])
        reader = asyncio.create_task(stream.next_batch("judge", 3, timeout_s=30))
        writer = asyncio.create_task(stream.put([row(2)], timeout_s=30))
        await asyncio.sleep(0)
        stream.fail(TimeoutError("the database did not answer"))
        for task in (reader, writer):
            with pytest.raises(TimeoutError, match="the database did not answer"):
                await task

    run(main())


class NeverWalked(dict[int, Any]):
    """Rows that may be looked up one by one only."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("this costs time in proportion to all rows")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_metrics_and_the_end_of_a_partition_cost_nothing_for_the_rows_of_others() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        for partition in range(3):
            await stream.put([row(partition, group=f"g{partition}", group_size=2, partition=partition)] * 2)
        stream._ledger.rows = NeverWalked(stream._ledger.rows)
        stream._ledger.groups = NeverWalked(stream._ledger.groups)  # type: ignore[assignment]
        await stream.drop_partition(1, "abandoned")
        await stream.seal(2)
        assert stream.metrics()["dropped_abandoned"] == 2
        assert stream.metrics()["waiting"] == 4

    run(main())


def test_starved_consumers_never_delay_a_writer(new_store: NewStore) -> None:
    async def main() -> None:
        stream = TrajectoryStream([LEARNER, JUDGE], new_store())
        starved = [asyncio.create_task(stream.next_batch("learner")) for _ in range(8)]
        await asyncio.sleep(0)
        took_s = []
        for number in range(20):
            began = time.perf_counter()
            await stream.put([row(number, group="never complete", group_size=99)])
            took_s.append(time.perf_counter() - began)
        assert not any(task.done() for task in starved)
        assert statistics.median(took_s) < 1.0, "a consumer's polling interval of seconds would show here"
        for task in starved:
            task.cancel()

    run(main())


def test_a_sealed_partition_ends_with_the_groups_as_complete_as_they_are(new_store: NewStore) -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("learner", ("tokens",), Groups(1))], new_store())
        await stream.put([row(1, group="a", group_size=3, partition=4), row(2, group="a", partition=4)])
        await stream.put([row(3, group="b", group_size=1, partition=5)])
        await stream.seal(4)
        assert numbers(await stream.next_batch("learner", 4)) == [1, 2]
        assert await stream.next_batch("learner", 4) is None
        assert numbers(await stream.next_batch("learner", 5)) == [3]
        with pytest.raises(StreamError, match="partition 4 is sealed"):
            await stream.put([row(4, partition=4)])

    run(main())


def test_a_saved_stream_gives_the_same_rest(new_store: NewStore, tmp_path: Path) -> None:
    """Half-judged groups, a claim in hand and a taken partition included."""
    consumers = [Consumer("learner", ("tokens", "reward"), TokenBalanced(12, whole_groups=True)), JUDGE]

    async def rest(stream: TrajectoryStream) -> list[tuple[str, list[int], list[bytes]]]:
        await stream.seal()
        taken = []
        for name in ("judge", "learner"):
            while (batch := await stream.next_batch(name)) is not None:
                taken.append((name, numbers(batch), [array.tobytes() for array in batch.columns["tokens"]]))
                if name == "judge":
                    unjudged = [row_id for row_id in batch.row_ids if row_id not in judged]
                    await stream.write(unjudged, [reward(row_id) for row_id in unjudged])
                await stream.release(batch)
        return taken

    judged = {0, 1, 2, 8}

    async def main() -> None:
        saved_store = new_store()
        stream = TrajectoryStream(consumers, saved_store)
        for group in range(4):
            members = [row(10 * group + member, group=f"g{group}", group_size=3) for member in range(3)]
            await stream.put(members)
        await stream.write(sorted(judged), [reward(row_id) for row_id in sorted(judged)])
        first = await stream.next_batch("learner")
        assert first is not None
        await stream.release(first)
        assert await stream.next_batch("judge") is not None, "in hand when the checkpoint is taken"
        await save_stream(stream, tmp_path)
        expected_books = stream.books()
        await saved_store.release(range(12))

        restored = TrajectoryStream(consumers, saved_store)
        await load_stream(restored, tmp_path)
        assert restored.books() == expected_books
        again = await rest(restored)
        await saved_store.release(range(12))
        twice = TrajectoryStream(consumers, saved_store)
        await load_stream(twice, tmp_path)
        assert await rest(twice) == again
        assert sorted(n for name, got, _ in again if name == "learner" for n in got) == [
            10 * group + member for group in (1, 2, 3) for member in range(3)
        ]
        assert restored.metrics()["balanced"] == 1.0
        assert restored.books()["consumed"] == 12

    run(main())


def test_a_damaged_or_foreign_state_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE])
        await stream.put([row(1)])
        await save_stream(stream, tmp_path)
        with pytest.raises(StreamError, match="only before anything is put"):
            await load_stream(stream, tmp_path)
        with pytest.raises(StreamError, match="has the consumers"):
            await load_stream(TrajectoryStream([LEARNER]), tmp_path)
        (tmp_path / "stream.safetensors").write_bytes(b"cut")
        with pytest.raises(CheckpointError, match="not readable as a saved stream"):
            await load_stream(TrajectoryStream([JUDGE]), tmp_path)

    run(main())


def test_mistakes_are_named(new_store: NewStore) -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE], new_store())
        with pytest.raises(StreamError, match=r"column 'text' holds .*arrays of numbers only"):
            await stream.put([Row({"text": np.array(["a"], object)})])
        with pytest.raises(StreamError, match="same columns"):
            await stream.put([row(1), Row({"other": np.zeros(1)})])
        with pytest.raises(StreamError, match="no consumer 'lerner'; there are 'judge'"):
            await stream.next_batch("lerner")
        (row_id,) = await stream.put([row(1)])
        with pytest.raises(StreamError, match="has column 'tokens' already"):
            await stream.write([row_id], [{"tokens": np.zeros(1)}])
        with pytest.raises(StreamError, match="row 5 was never put"):
            await stream.write([5], [reward(1)])
        batch = await stream.next_batch("judge")
        assert batch is not None
        await stream.release(batch)
        with pytest.raises(StreamError, match="has ended already"):
            await stream.release(batch)
        await stream.put([row(2, group="g", group_size=1)])
        with pytest.raises(StreamError, match="this is one more"):
            await stream.put([row(3, group="g")])

    run(main())


def test_an_error_that_breaks_the_stream_reaches_everybody_who_waits() -> None:
    async def main() -> None:
        stream = TrajectoryStream([JUDGE], capacity_rows=1)
        reader = asyncio.create_task(TrajectoryStream.next_batch(stream, "judge", 3))
        await stream.put([row(1)])
        writer = asyncio.create_task(stream.put([row(2)]))
        await asyncio.sleep(0)
        stream.fail(RuntimeError("the source is broken"))
        for task in (reader, writer):
            with pytest.raises(RuntimeError, match="the source is broken"):
                await task

    run(main())
