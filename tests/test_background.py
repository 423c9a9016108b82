"""What runs in the background cannot end unseen, and whatever ends a run saves it first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash import trainer
from roll_flash.config.tree import CheckpointConfig, load_config
from roll_flash.errors import CheckpointError, LearnerError, RollFlashError, RunError
from roll_flash.processes.background import cancel_on_failure, first_failure, in_thread, start_background
from roll_flash.processes.deadlines import LearnedDeadline, RecentCount
from roll_flash.processes.interrupt import Interrupts, run_to_end
from roll_flash.processes.ray import watch as ray_watch
from roll_flash.processes.ray.watch import RayDiedError, RayProcess, watching_ray
from roll_flash.run.checkpoints.writer import CheckpointSchedule
from roll_flash.stream import TrajectoryStream, finished_group
from roll_flash.system import system
from roll_flash.system.start_checks import Checked
from roll_flash.types import FinishedGroup
from tests.learner.samples import make_group

T = TypeVar("T")


async def fails(error: BaseException) -> None:
    raise error


async def for_ever() -> None:
    await asyncio.Event().wait()


class Ended:
    """How a run ended: what it raised, what it was saved for, and what was said at once."""

    def __init__(self) -> None:
        self.saved: list[BaseException] = []
        self.said: list[str] = []

    def run(self, work: Callable[[], Coroutine[Any, Any, None]], save_error: RollFlashError | None = None) -> None:
        async def save(reason: BaseException) -> None:
            self.saved.append(reason)
            if save_error is not None:
                raise save_error

        async def run() -> None:
            with first_failure() as failure:
                async with Interrupts(self.said.append) as interrupts:
                    await interrupts.run_until_stopped(work(), failure=failure, save=save)

        asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RunError("no worker is left"), "^no worker is left$"),
        (TypeError("cannot pickle 'generator' object"), "the feed failed: TypeError: cannot pickle 'generator' object"),
        (OSError(28, "No space left on device"), r"the feed failed: OSError: .* No space left on device"),
        (asyncio.CancelledError(), "^the feed was cancelled by what it waited for$"),
    ],
)
def test_an_error_in_the_background_ends_the_run_at_once_with_its_cause(error: BaseException, says: str) -> None:
    ended = Ended()

    async def work() -> None:
        start_background(fails(error), "the feed")
        await for_ever()

    with pytest.raises(RunError, match=says):
        ended.run(work)
    assert len(ended.saved) == 1


def test_an_error_in_the_background_ends_a_start_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's control store may die while a model loads for minutes."""
    happened: list[str] = []

    async def start_ray(stack: AsyncExitStack, *_: object, **__: object) -> None:
        stack.push_async_callback(close)
        start_background(fails(RunError("Ray is gone")), "the watch over Ray")
        await for_ever()

    async def close() -> None:
        start_background(fails(RunError("a server died")), "the supervision of a server")
        await asyncio.sleep(0.01)
        happened.append("closed in order")

    monkeypatch.setattr(system, "_start_ray", start_ray)
    start = Mock(resume_at=None, sandboxes=())
    start.config.distill, start.config.policies, start.config.stages = None, {}, ()
    start.config.stall_timeout_s = start.config.learner.step_timeout_s = start.config.usual_start_s = 600.0

    async def run() -> None:
        async with asyncio.timeout(5):
            await trainer._train(start, Mock(), Mock())

    with pytest.raises(RunError, match=r"^Ray is gone$"):
        asyncio.run(run())
    assert happened == ["closed in order"]


def test_an_error_in_the_background_ends_the_start_of_an_evaluation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    async def start_ray(stack: AsyncExitStack, *_: object, **__: object) -> None:
        stack.callback(happened.append, "closed in order")
        start_background(fails(RunError("Ray is gone")), "the watch over Ray")

    monkeypatch.setattr(system, "_start_ray", start_ray)
    monkeypatch.setattr(system, "_open_engine", lambda *_: Mock(start=for_ever))
    monkeypatch.setattr(system, "_open_workers", lambda *_: Mock(start=for_ever))
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "tests.counting:Counting-v0"}]})

    async def run() -> None:
        with first_failure() as failure:
            async with (
                asyncio.timeout(5),
                system.open_rollout(config, Checked(Path(), (), (), None, None), failure, logs=Path()),
            ):
                raise AssertionError("nothing has started")

    with pytest.raises(RunError, match=r"^Ray is gone$"):
        asyncio.run(run())
    assert happened == ["closed in order"]


async def _turned_into_an_error_of_its_own() -> None:
    try:
        await for_ever()
    except asyncio.CancelledError:
        raise RunError("no server started") from None


async def _fails_in_the_same_moment() -> None:
    for _ in range(2):  # until it is known, and nobody has been told
        await asyncio.sleep(0)
    raise RunError("no server started")


async def _held_back() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await for_ever()


@pytest.mark.parametrize("start", [_turned_into_an_error_of_its_own, _fails_in_the_same_moment, _held_back])
def test_a_start_that_fails_of_an_error_in_the_background_names_that_one(
    start: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    left: list[int] = []

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            with first_failure() as failure:
                async with asyncio.timeout(5), cancel_on_failure(failure):
                    start_background(fails(RunError("Ray is gone")), "the watch over Ray")
                    await start()
        finally:
            left.append(task.cancelling())

    with pytest.raises(RunError, match=r"^Ray is gone$"):
        asyncio.run(run())
    assert left == [0], "a cancellation is left that a later wait would take for its own"


def test_ctrl_c_in_a_start_is_not_cut_short_by_what_fails_then() -> None:
    happened: list[str] = []

    async def run() -> None:
        with first_failure() as failure:
            async with Interrupts(happened.append), cancel_on_failure(failure):
                os.kill(os.getpid(), signal.SIGINT)
                try:
                    await for_ever()
                finally:
                    start_background(fails(RunError("a server died")), "the supervision of a server")
                    await asyncio.sleep(0.01)
                    happened.append("closed in order")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert happened[1:] == ["closed in order"]


def test_what_is_cancelled_in_the_background_is_no_failure() -> None:
    async def work() -> None:
        task = start_background(for_ever(), "the feed")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)

    ended = Ended()
    ended.run(work)
    assert ended.saved == []


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """Tests may themselves run under nohup, whose SIGHUP stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_stops_and_saves_and_is_answered_at_once(number: signal.Signals) -> None:
    ended = Ended()

    async def work() -> None:
        os.kill(os.getpid(), number)
        await for_ever()

    with pytest.raises(KeyboardInterrupt):
        ended.run(work)
    assert [type(reason) for reason in ended.saved] == [KeyboardInterrupt]
    assert len(ended.said) == 1
    assert ended.said[0].startswith("stopping (")


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_run_starts_ends_what_was_started(number: signal.Signals) -> None:
    closed: list[str] = []

    async def run() -> None:
        async with Interrupts(closed.append):
            try:
                os.kill(os.getpid(), number)
                await for_ever()
            finally:
                closed.append("closed in order")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert closed[1:] == ["closed in order"]


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ended = Ended()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)

    try:
        ended.run(work)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.said == []


def test_an_error_of_the_run_itself_is_saved_for_and_raised() -> None:
    ended = Ended()
    with pytest.raises(RunError, match="every episode failed"):
        ended.run(lambda: fails(RunError("every episode failed")))
    assert len(ended.saved) == 1


def test_a_second_signal_does_not_wait_for_the_checkpoint() -> None:
    said: list[str] = []

    async def save(reason: BaseException) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    async def run() -> None:
        with first_failure() as failure:
            async with Interrupts(said.append) as interrupts:
                await interrupts.run_until_stopped(work(), failure=failure, save=save)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert len(said) == 2


def test_ctrl_c_that_cannot_be_saved_says_so() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    with pytest.raises(CheckpointError, match="full"):
        Ended().run(work, save_error=CheckpointError("full"))


# In a notebook: an event loop runs already


def in_a_cell(call: Callable[[], T]) -> T:
    """Call it where an event loop runs, as a cell of a notebook is; like IPython, keep Ctrl-C from that loop."""

    async def cell() -> tuple[list[T], KeyboardInterrupt | None]:
        try:
            return [call()], None
        except KeyboardInterrupt as error:
            return [], error

    found, interrupt = asyncio.run(cell())
    if interrupt is not None:
        raise interrupt
    return found[0]


def test_work_runs_to_its_end_with_and_without_a_running_event_loop() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert run_to_end(work()) == "done"
    assert in_a_cell(lambda: run_to_end(work())) == "done"


def test_an_error_of_work_in_a_notebook_is_raised_in_the_cell() -> None:
    with pytest.raises(RunError, match="no server"):
        in_a_cell(lambda: run_to_end(fails(RunError("no server"))))


def test_ctrl_c_in_a_notebook_stops_and_saves() -> None:
    said: list[str] = []
    saved: list[BaseException] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    async def save(reason: BaseException) -> None:
        saved.append(reason)

    async def run() -> None:
        with first_failure() as failure:
            async with Interrupts(said.append) as interrupts:
                await interrupts.run_until_stopped(work(), failure=failure, save=save)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: run_to_end(run()))
    assert [type(reason) for reason in saved] == [KeyboardInterrupt]
    assert [text.partition(":")[0] for text in said] == ["stopping (Ctrl-C)"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_a_notebook_ends_work_that_handles_no_signals() -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await for_ever()
        finally:
            closed.append("closed in order")

    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: run_to_end(work()))
    assert closed == ["closed in order"]


@pytest.mark.timeout(60)
def test_ctrl_c_in_a_notebook_is_seen_even_if_it_does_not_wake_the_waiting_thread() -> None:
    async def work() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # like one that came just before the wait began
        await for_ever()

    with pytest.raises(KeyboardInterrupt):
        in_a_cell(lambda: run_to_end(work()))


def test_in_a_thread_of_the_user_no_signal_is_handled_and_nothing_fails() -> None:
    async def work() -> str:
        async with Interrupts(lambda text: None):
            return "done"

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: run_to_end(work())).result(20) == "done"


def due(config: CheckpointConfig, minutes_per_step: float, steps: int, *, has_one: bool = False) -> list[int]:
    schedule = CheckpointSchedule(config, has_one=has_one, now_s=0.0)
    return [step for step in range(1, steps + 1) if schedule.is_due(step, step * minutes_per_step * 60)]


def test_by_default_there_is_a_checkpoint_after_the_first_step_and_every_ten_minutes() -> None:
    assert due(CheckpointConfig(), 4, 10) == [1, 4, 7, 10]
    assert due(CheckpointConfig(), 30, 4) == [1, 2, 3, 4]
    assert due(CheckpointConfig(), 4, 10, has_one=True) == [3, 6, 9]


def test_checkpoints_by_steps_and_none_at_all() -> None:
    assert due(CheckpointConfig(every=4, every_minutes=0), 1, 9) == [1, 4, 8]
    assert due(CheckpointConfig(every_minutes=0), 1, 9) == []


@given(st.lists(st.floats(0, 50), max_size=40))
def test_only_what_went_wrong_lately_counts(gaps_s: list[float]) -> None:
    recent, now_s, times = RecentCount(100.0), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        times.append(now_s)
        assert recent.add(now_s) == sum(now_s - time_s <= 100.0 for time_s in times)
    assert recent.count(now_s + 101) == 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_a_deadline_follows_what_it_is_for(taken_s: list[float]) -> None:
    deadline = LearnedDeadline(floor_s=30, max_s=600)
    assert deadline.limit_s() == 600
    for seconds in taken_s:
        deadline.record(seconds)
    assert 30 <= deadline.limit_s() <= 600
    assert deadline.limit_s() >= min(600, 10 * max(taken_s[-20:]))


def test_a_deadline_grows_with_the_work_and_learns_nothing_where_there_was_none() -> None:
    deadline = LearnedDeadline(floor_s=30, max_s=600)
    deadline.record(0.001, size=0)
    assert deadline.limit_s(5_000) == 600, "nothing was computed so far"
    deadline.record(4, size=1_000)
    assert [deadline.limit_s(size) for size in (0, 10, 5_000, 50_000)] == [600, 30, 200, 600]


@pytest.mark.parametrize("first_has_signal", [False, True])
def test_a_large_group_after_one_that_was_quickly_done_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, first_has_signal: bool
) -> None:
    """Groups without a signal are not computed at all, and small ones soon."""
    monkeypatch.setattr(trainer, "LEARNER_FLOOR_S", 0.1)
    small = make_group(0, prompt=20, rewards=[float(first_has_signal), 0, 0, 0])
    large = replace(make_group(1, prompt=2000, rewards=[1, 0, 0, 0]), group_id="large")

    async def groups(_: object) -> AsyncIterator[list[FinishedGroup]]:
        for group in (finished_group(small), finished_group(large)):
            for one in group.trajectories:
                stream.put(one.episode_id, group.group_id, one, {"reward": one.reward})
            yield [group]
            await asyncio.sleep(0.2)

    async def accumulate(given: Sequence[FinishedGroup]) -> None:
        is_large = given[0].trajectories[0].tokens > 1000
        await asyncio.sleep(0.5 if is_large else 0.005 * first_has_signal)

    async def finish_step() -> None:
        raise LearnerError("all is accumulated")

    stream = TrajectoryStream()

    async def run() -> None:
        learner = Mock(version=0, accumulate=accumulate, finish_step=finish_step)
        config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "Any-v0"}]})
        parts = Mock(config=config, stream=stream, learner=learner, rollout=Mock(groups_for_step=groups))
        await trainer.Trainer(parts, Mock())._step()

    with pytest.raises(LearnerError, match="all is accumulated"):
        asyncio.run(run())


def test_work_that_takes_far_longer_than_before_is_said_to_hang() -> None:
    async def run() -> None:
        deadline = LearnedDeadline(floor_s=0.2, max_s=600)
        assert await deadline.run(asyncio.sleep(0.001, "done"), "the step") == "done"
        await deadline.run(for_ever(), "the step")

    with pytest.raises(RunError, match=r"the step did not end within \d s, while it took 0 s at most before; it hangs"):
        asyncio.run(run())


def test_ctrl_c_while_a_thread_starts_something_waits_for_it_once_and_leaves_it_the_second_time() -> None:
    told, left, may_go_on = threading.Event(), threading.Event(), threading.Event()

    @contextmanager
    def slow() -> Iterator[None]:
        may_go_on.wait(60)
        try:
            yield
        finally:
            left.set()

    async def use() -> None:
        async with in_thread(slow(), cancel=told.set):
            raise AssertionError("it was cancelled before")

    async def interrupted(times: int) -> None:
        task = asyncio.create_task(use())
        for _ in range(times):
            await asyncio.sleep(0.05)
            assert not task.done()
            task.cancel()
        if times == 1:
            may_go_on.set()
        async with asyncio.timeout(10):
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    began = time.monotonic()
    asyncio.run(interrupted(2))
    assert time.monotonic() - began < 30, "a thread that hangs does not keep the process from ending"
    assert told.is_set()
    assert not left.is_set()
    asyncio.run(interrupted(1))
    assert left.is_set(), "what it began is left in order"


def test_what_fails_to_start_after_ctrl_c_is_ctrl_c_still() -> None:
    may_fail = threading.Event()

    @contextmanager
    def fails_late() -> Iterator[None]:
        may_fail.wait(60)
        raise RunError("Ray on this machine is not available")
        yield

    async def use() -> None:
        async with in_thread(fails_late(), cancel=may_fail.set):
            pass

    async def interrupted() -> None:
        task = asyncio.create_task(use())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(interrupted())


def test_the_death_of_ray_is_noticed_and_named_as_the_cause_of_what_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in that listens as Ray does; the death of Ray's own processes is a nightly test."""
    monkeypatch.setattr(ray_watch, "EVERY_S", 0.01)
    # A connection that asyncio is accepting while the stand-in closes stays open, and nobody answers.
    monkeypatch.setattr(ray_watch, "ANSWER_TIMEOUT_S", 1.0)

    async def run(fails_too: bool) -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(ray_watch, "ray_processes", lambda: [RayProcess("Ray's raylet", "127.0.0.1", port)])
        with first_failure() as failure:
            async with asyncio.timeout(30), watching_ray() as is_alive:
                await asyncio.sleep(0.1)
                assert failure.error is None
                assert await is_alive()
                server.close()
                assert not await is_alive()
                if fails_too:
                    raise LearnerError("a rank died")
                await failure.happened.wait()
            failure.raise_error()

    for fails_too in (False, True):
        with pytest.raises(RayDiedError, match=r"Ray's raylet (is gone|accepts connections)"):
            asyncio.run(run(fails_too))


def test_a_ray_that_accepts_connections_but_does_not_answer_is_waited_for_by_name_and_then_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process that is stopped by SIGSTOP: the kernel still accepts."""
    monkeypatch.setattr(ray_watch, "EVERY_S", 0.01)
    monkeypatch.setattr(ray_watch, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(ray_watch, "CONNECT_TIMEOUT_S", 0.3)
    waited: list[str] = []

    @contextmanager
    def waiting(name: str) -> Iterator[None]:
        waited.append(name)
        yield
        waited.remove(name)

    async def run() -> None:
        stopped = socket.create_server(("127.0.0.1", 0))
        process = RayProcess("Ray's raylet", "127.0.0.1", stopped.getsockname()[1])
        monkeypatch.setattr(ray_watch, "ray_processes", lambda: [process])
        with stopped, first_failure() as failure:
            async with asyncio.timeout(30), watching_ray(waiting) as is_alive:
                await failure.happened.wait()
                assert not await is_alive()
            failure.raise_error()

    with pytest.raises(RayDiedError, match=r"accepts connections at .* but has not answered for 0\.3 s: it is stopped"):
        asyncio.run(run())
    assert waited == ["Ray's raylet"]
