"""The table of rows: exactly once for each consumer, whole groups, nothing lost and every drop counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from roll_flash.errors import StreamError
from roll_flash.stream import Consumer, Row, TrajectoryStream


def put(stream: TrajectoryStream, *names: str, group: str = "g", **columns: float) -> None:
    for name in names:
        stream.put(name, group, data=name, columns=columns)


def ids(rows: list[Row]) -> list[str]:
    return [row.row_id for row in rows]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_two_tasks_of_one_consumer_share_its_rows_and_each_row_comes_once() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge")])
        taken: list[str] = []

        async def work() -> None:
            while len(taken) < 10:
                taken.extend(ids(await stream.next_batch("judge")))

        tasks = [asyncio.create_task(work()) for _ in range(2)]
        await asyncio.sleep(0)
        for number in range(10):
            put(stream, f"r{number}")
            await asyncio.sleep(0)
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        for task in tasks:
            task.cancel()
        assert Counter(taken) == {f"r{number}": 1 for number in range(10)}

    run(main())


def test_a_consumer_gets_a_row_as_soon_as_the_columns_it_needs_are_there() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge"), Consumer("last", needs=("score", "style"), batch_size=8)])
        put(stream, "a", "b")
        last = asyncio.create_task(stream.next_batch("last"))
        first, second = [(await stream.next_batch("judge"))[0] for _ in range(2)]
        stream.write("judge", second, {"score": 1.0})
        await asyncio.sleep(0)
        assert not last.done(), "style is missing"
        stream.write("judge", first, {"score": 0.5, "style": 2.0})
        assert ids(await last) == ["a"]

    run(main())


def test_rows_without_a_column_are_counted_until_they_have_it_or_are_gone() -> None:
    stream = TrajectoryStream([Consumer("scorer")])
    for name in ("a", "b", "c"):
        stream.put(name, "g", None, {})
    assert stream.without("score") == 3
    (row,) = asyncio.run(stream.next_batch("scorer"))
    stream.write("scorer", row, {"score": 1.0})
    assert stream.without("score") == 2
    stream.drop_group("g", "stale")
    assert stream.without("score") == 0


def test_a_column_is_written_once_and_a_row_put_once() -> None:
    stream = TrajectoryStream()
    put(stream, "a", reward=1.0)
    with pytest.raises(StreamError, match="row 'a' is in the stream already"):
        put(stream, "a")
    [row] = stream.close_group("g")
    with pytest.raises(StreamError, match="row 'a' has the column 'reward' already"):
        stream.write("judge", row, {"reward": 2.0})


def test_whole_groups_come_when_complete_and_a_row_that_joins_later_comes_alone() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge", whole_groups=True)])
        put(stream, "a1", "a2", group="a")
        put(stream, "b1", group="b")
        stream.complete("b")
        assert ids(await stream.next_batch("judge")) == ["b1"]
        put(stream, "b2", group="b")
        stream.complete("a")
        assert ids(await stream.next_batch("judge")) == ["b2"]
        assert ids(await stream.next_batch("judge")) == ["a1", "a2"]

    run(main())


def test_what_is_given_back_comes_again_before_all_others() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge", batch_size=2)])
        put(stream, "a", "b", "c")
        taken = await stream.next_batch("judge")
        stream.drop(taken[:1], "stale")
        stream.give_back("judge", taken)
        assert ids(await stream.next_batch("judge")) == ["b", "c"]

    run(main())


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_task_that_is_cancelled_while_a_row_comes_leaves_it_to_the_others(when: int) -> None:
    """Cancelled before the row is put, in the same turn of the event loop, or in the next."""

    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge")])
        tasks = [asyncio.create_task(stream.next_batch("judge")) for _ in range(2)]
        await asyncio.sleep(0)
        if when == 0:
            tasks[0].cancel()
            await asyncio.sleep(0)
        put(stream, "a")
        if when == 2:
            await asyncio.sleep(0)
        tasks[0].cancel()
        got = await asyncio.gather(*tasks[: 1 + (when < 2)], return_exceptions=True)
        assert sum(isinstance(rows, list) for rows in got) == 1
        tasks[1].cancel()

    run(main())


def test_rows_of_a_group_that_a_stage_dropped_are_dropped_also_when_they_come_later() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge", whole_groups=True)])
        put(stream, "a", "b")
        stream.complete("g")
        rows = await stream.next_batch("judge")
        put(stream, "late")
        stream.drop(rows, "stage_judge_failed", whole_groups=True)
        put(stream, "later")
        assert stream.close_group("g") == []
        assert stream.counts() == {"produced": 4, "consumed": 0, "dropped_stage_judge_failed": 4, "waiting": 0}

    run(main())


def test_a_group_that_the_scheduler_drops_leaves_nothing_and_late_scores_do_no_harm() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge")])
        put(stream, "a", "b")
        [row] = await stream.next_batch("judge")
        stream.drop_group("g", "stale")
        stream.write("judge", row, {"score": 1.0})
        stream.drop_group("no such group", "stale")
        assert stream.counts() == {"produced": 2, "consumed": 0, "dropped_stale": 2, "waiting": 0}
        assert stream.metrics()["ready_judge"] == 0

    run(main())


def test_rows_are_settled_when_each_has_its_column_or_is_gone() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge", batch_size=3)])
        put(stream, "a", "b", "c")
        first, second, third = await stream.next_batch("judge")
        settled = asyncio.create_task(stream.settled(stream.close_group("g"), "reward"))
        await asyncio.sleep(0)
        stream.write("judge", first, {"reward": 1.0})
        stream.drop([second], "stage_judge_failed")
        await asyncio.sleep(0)
        assert not settled.done()
        assert stream.behind() == "judge (1 rows)"
        stream.write("judge", third, {"reward": 1.0})
        await settled
        assert stream.behind() == "none that is known"

    run(main())


def test_a_failure_reaches_all_that_wait_and_all_that_come_later() -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("judge")])
        waiting = asyncio.create_task(stream.next_batch("judge"))
        await asyncio.sleep(0)
        stream.fail(StreamError("the judge is broken"))
        stream.fail(StreamError("a later error"))
        for each in (waiting, stream.next_batch("judge")):
            with pytest.raises(StreamError, match="the judge is broken"):
                await each
        await stream.failed()
        with pytest.raises(StreamError, match="the judge is broken"):
            stream.raise_failure()

    run(main())


GROUPS = [f"g{number}" for number in range(4)]
CONSUMERS = (Consumer("judge", batch_size=2), Consumer("group judge", whole_groups=True), Consumer("last", ("a", "b")))


class Histories(RuleBasedStateMachine):
    """Plays a rollout, two stages that write `a` and `b`, one that needs both, and a learner."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stream = TrajectoryStream(CONSUMERS)
        self.put_ids: list[str] = []
        self.taken: Counter[tuple[str, str]] = Counter()
        self.held: list[tuple[str, list[Row]]] = []
        self.complete: set[str] = set()
        self.closed: set[str] = set()
        self.handed_out: list[Row] = []
        self.consumed: set[str] = set()

    def teardown(self) -> None:
        self.loop.close()

    @rule(group=st.sampled_from(GROUPS))
    def put(self, group: str) -> None:
        if group not in self.closed:
            self.put_ids.append(f"r{len(self.put_ids)}")
            put(self.stream, self.put_ids[-1], group=group)

    @rule(group=st.sampled_from(GROUPS))
    def finish(self, group: str) -> None:
        self.complete.add(group)
        self.stream.complete(group)

    @rule(name=st.sampled_from([consumer.name for consumer in CONSUMERS]))
    def take(self, name: str) -> None:
        if self.stream.metrics()[f"ready_{name}"] == 0:
            return
        rows = self.loop.run_until_complete(self.stream.next_batch(name))
        assert rows
        for row in rows:
            assert not row.is_gone
            self.taken[name, row.row_id] += 1
            assert self.taken[name, row.row_id] == 1, "every consumer gets a row once"
            assert name != "last" or {"a", "b"} <= row.columns.keys()
            assert name != "group judge" or row.group_id in self.complete
        assert name != "group judge" or len({row.group_id for row in rows}) == 1
        self.held.append((name, rows))

    @rule(how=st.sampled_from(["write", "write", "give back", "drop"]))
    def settle(self, how: str) -> None:
        if not self.held:
            return
        name, rows = self.held.pop(0)
        if how == "give back":
            self.stream.give_back(name, rows)
            self.taken.subtract((name, row.row_id) for row in rows if not row.is_gone)
        elif how == "drop":
            self.stream.drop(rows, f"stage_{name}_failed", whole_groups=name == "group judge")
        else:
            for row in rows:
                self.stream.write(name, row, {{"judge": "a", "group judge": "b", "last": "reward"}[name]: 1.0})

    @rule(group=st.sampled_from(GROUPS), is_taken=st.booleans())
    def leave(self, group: str, is_taken: bool) -> None:
        if group in self.closed:
            return
        self.closed.add(group)
        if is_taken:
            self.handed_out += self.stream.close_group(group)
        else:
            self.stream.drop_group(group, "stale")

    @rule()
    def train(self) -> None:
        rows = [row for row in self.handed_out if "reward" in row.columns]
        self.consumed |= {row.row_id for row in rows if not row.is_gone}
        self.stream.consume(rows)
        assert all(row.is_gone for row in rows)

    @invariant()
    def counts_balance(self) -> None:
        metrics = self.stream.metrics()
        assert metrics["balanced"] == 1
        assert metrics["produced"] == len(self.put_ids)
        assert metrics["consumed"] == len(self.consumed)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
