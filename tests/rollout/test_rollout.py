"""The rollout around the scheduler: a run that can only lose ends with one line, one without tasks ends in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from scheduler_world import failure, trajectory

from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.config.tree import load_config
from roll_flash.errors import RunError
from roll_flash.rollout import episode_log
from roll_flash.rollout.fleet import Ended
from roll_flash.rollout.rollout import Rollout
from roll_flash.rollout.turns import SentTurn, TurnBook
from roll_flash.rollout.worker import Outcome
from roll_flash.scheduling.tasks import CurriculumTasks, MixedTasks, SeedTasks
from roll_flash.stream import TrajectoryStream
from roll_flash.types import EpisodeSpec, FinishedGroup, Task

Play = Callable[[EpisodeSpec, int], Ended | None]
"""How an episode ends, from its spec and the version of the weights; None: it never does."""


class ThisProcess:
    """A fleet whose episodes end in the next turn of the event loop, as `play` says."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.version = 0
        self.played: list[EpisodeSpec] = []
        self.turns = TurnBook()

    async def submit(self, episodes: Sequence[EpisodeSpec], receive: Callable[[Ended], None]) -> None:
        for episode in episodes:
            self.played.append(episode)
            if (outcome := self.play(episode, self.version)) is not None:
                asyncio.get_running_loop().call_soon(receive, outcome)

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        pass

    async def status(self) -> list[Any]:
        return []


class Log:
    """Stands in for the files of a run."""

    def __init__(self) -> None:
        self.dropped: list[Mapping[str, Any]] = []

    def write(self, step: int, outcome: Outcome) -> None:
        pass

    def write_line(self, step: int, line: bytes) -> None:
        pass

    def write_dropped(self, step: int, group: Mapping[str, Any]) -> None:
        self.dropped.append(group)

    def sync(self) -> None:
        pass


class ThreeTasks(SeedTasks):
    """A source that ends."""

    def next(self) -> Task:
        if self.cursor >= 3:
            raise StopIteration
        return super().next()


def tasks_of(env_id: str = "Env-v0", *, end: bool = False) -> SeedTasks:
    return (ThreeTasks if end else SeedTasks)(env_id, {}, (0, 100), seed=0)


def train(
    fleet: ThisProcess,
    tasks: Any,
    *,
    steps: int,
    log: Log | None = None,
    stream: TrajectoryStream | None = None,
    **settings: Any,
) -> tuple[list[list[FinishedGroup]], Rollout, list[str]]:
    """The groups of each step, until the source has ended or `steps` are done; and what the user is told."""
    defaults = {"async_ratio": 0.0, "groups_per_step": 2, "group_size": 2, "max_failures_in_a_row": 8}
    of_scheduler = {key: value for key, value in settings.items() if key in SchedulerConfig.model_fields}
    of_rollout = {key: value for key, value in settings.items() if key not in of_scheduler}
    config = load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": "Env-v0"}],
            "scheduler": defaults | of_scheduler,
            "rollout": {"max_concurrent": 16, "retries": 0} | of_rollout,
            "monitor": {"stall_timeout_s": 20.0},
        }
    )
    made: list[list[FinishedGroup]] = []
    notices: list[str] = []

    async def run() -> Rollout:
        async with (
            asyncio.timeout(60),
            Rollout(config, fleet, tasks, log or Log(), stream or TrajectoryStream()) as run,
        ):  # type: ignore[arg-type]
            for version in range(1, steps + 1):
                groups = [group async for several in run.groups_for_step() for group in several]
                if not groups:
                    break
                made.append(groups)
                await run.version_advanced(version)
                notices.extend(run.take_notices())
                fleet.version = version
                run.published(version)
            notices.extend(run.take_notices())
            return run

    return made, asyncio.run(run()), notices


def plays(reward: float | None = None) -> Play:
    return lambda spec, version: trajectory(spec, [version], spec.replica if reward is None else reward)


@pytest.mark.parametrize("for_ever", [False, True])
def test_what_ends_all_running_episodes_at_once_is_one_failure(for_ever: bool) -> None:
    """As an engine of sandboxes that is restarted does; with `for_ever` it does not come back."""
    fleet = ThisProcess(lambda spec, version: None)
    fleet.play = lambda spec, version: (
        failure(spec) if for_ever or len(fleet.played) <= 16 else trajectory(spec, [version], spec.replica)
    )
    settings = {"groups_per_step": 8, "retries": 100 if for_ever else 1}
    if for_ever:
        with pytest.raises(RunError, match=r"^the last \d+ episodes all failed \(env_error \d+\)"):
            train(fleet, tasks_of(), steps=1, **settings)
        return
    made, run, _ = train(fleet, tasks_of(), steps=1, **settings)
    assert [len(groups) for groups in made] == [8]
    assert sum(run.scheduler.failures.values()) == 16


def test_a_run_whose_groups_all_lose_replicas_ends_with_one_line() -> None:
    """One of four succeeds, so that episodes never fail in a row for long."""

    def play(spec: EpisodeSpec, version: int) -> Ended:
        return trajectory(spec, [version]) if spec.replica == 3 else failure(spec)

    fleet = ThisProcess(play)
    with pytest.raises(RunError, match=r"^the last 8 groups could not be trained \(env_error 24\); mend what fails"):
        train(fleet, tasks_of(), steps=1, group_size=4)
    assert len(fleet.played) < 200


def test_a_run_of_which_no_group_has_signal_says_so_at_each_step_and_then_ends() -> None:
    fleet = ThisProcess(plays(reward=1.0))
    with pytest.raises(RunError, match="no group of the last 2 steps had replicas with different rewards"):
        train(fleet, tasks_of(), steps=9, drop_groups_without_signal=True, max_steps_without_signal=2)
    made, _, notices = train(fleet, tasks_of(), steps=1, drop_groups_without_signal=True)
    assert len(made) == 1
    assert notices == ["nothing was learned: no group had replicas with different rewards"]


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_a_task_source_that_ends_ends_the_run_when_its_last_task_is_trained(alpha: float) -> None:
    made, rollout, notices = train(ThisProcess(plays()), tasks_of(end=True), steps=9, async_ratio=alpha)
    assert [len(groups) for groups in made] == [2, 1]
    assert notices == ["the task source has ended after 3 groups: what is there is trained"]
    assert rollout.is_over
    books = rollout.books()
    assert books["produced"] == books["trained"] == 6


def test_a_task_source_that_ends_while_its_last_group_fails_ends_the_run_too() -> None:
    def play(spec: EpisodeSpec, version: int) -> Ended:
        return failure(spec) if spec.group_id == "g00000002" else trajectory(spec, [version])

    log = Log()
    made, _, _ = train(ThisProcess(play), tasks_of(end=True), steps=9, log=log)
    assert [len(groups) for groups in made] == [2]
    assert [(group["group_id"], group["reason"]) for group in log.dropped] == [("g00000002", "too_few_trajectories")]


def test_a_source_learns_a_score_from_0_to_1_whatever_an_environment_pays() -> None:
    """Where it does not tell success, the score was the reward, such as 57 or -3."""
    scores: list[float] = []

    class Hears(SeedTasks):
        def report(self, task: Task, score: float) -> None:
            scores.append(score)

    paid = iter([57.0, -3.0, 0.25, 1.0])
    fleet = ThisProcess(lambda spec, version: trajectory(spec, [version], next(paid, 0.0)))
    train(fleet, Hears("Env-v0", {}, (0, 100)), steps=1, groups_per_step=1, group_size=4)
    assert sorted(scores[:4]) == [0.0, 0.25, 1.0, 1.0]


def test_when_one_of_several_sources_ends_the_others_go_on() -> None:
    mixed = MixedTasks([tasks_of("Short-v0", end=True), tasks_of("Long-v0")], [1, 1])
    drawn = [mixed.next().env_id for _ in range(12)]
    assert drawn[:6].count("Short-v0") == 3
    assert drawn[6:] == ["Long-v0"] * 6
    levels = CurriculumTasks([tasks_of("Short-v0", end=True), tasks_of("Long-v0")], seed=0)
    assert [levels.next().env_id for _ in range(40)].count("Short-v0") == 3
    for source in (MixedTasks([tasks_of(end=True)], [1]), CurriculumTasks([tasks_of(end=True)], seed=0)):
        for _ in range(3):
            source.next()
        with pytest.raises(StopIteration):
            source.next()


def test_requeue_plays_no_task_more_often_than_its_limit_and_the_books_say_so() -> None:
    """Task 0's episodes never end; with one redundant group every step goes on without it."""
    first = tasks_of().next().seed

    def play(spec: EpisodeSpec, version: int) -> Ended | None:
        return None if spec.task.seed == first else trajectory(spec, [version], spec.replica)

    fleet = ThisProcess(play)
    limits = {"max_requeues": 2, "extra_groups": 1}
    made, rollout, _ = train(fleet, tasks_of(), steps=8, on_stale="requeue", **limits)
    assert len(made) == 8
    assert sum(spec.task.seed == first and spec.replica == 0 for spec in fleet.played) == 3
    assert rollout.books()["groups_given_up"] >= 1


def test_a_stopped_episode_is_logged_with_its_time_and_its_finished_turns() -> None:
    """Replica 1 of task 0 never ends. It has finished two turns, which the fleet forgets when it is cancelled."""
    first = tasks_of().next().seed

    class Forgetful(ThisProcess):
        async def cancel(self, episode_ids: Iterable[str]) -> None:
            for name in episode_ids:
                self.turns.forget(name)

    def play(spec: EpisodeSpec, version: int) -> Ended | None:
        if spec.task.seed != first or spec.replica == 0:
            return trajectory(spec, [version], spec.replica)
        for index in range(2):
            fleet.turns.add(SentTurn(spec.episode_id, index, b""))
        return None

    fleet, log = Forgetful(play), Log()
    train(fleet, tasks_of(), steps=3, log=log, extra_groups=1)
    (group,) = (group for group in log.dropped if group["group_id"] == "g00000000")
    assert (group["reason"], group["stopped_turns"]) == ("stale", [2])
    assert 0 < group["stopped_s"][0] < 60


class EndedFiles(Log):
    """Keeps the names of the episodes that are written."""

    def __init__(self, hangs: bool = False) -> None:
        super().__init__()
        self.written: list[str] = []
        self._hangs = hangs

    def write(self, step: int, outcome: Outcome) -> None:
        if self._hangs:
            time.sleep(1.0)
        self.written.append(outcome.episode_id)


def test_rows_are_put_when_episodes_end_and_leave_with_their_group() -> None:
    """Group 0 has no signal, groups 1 and 2 are trained; all that ended is in the stream before any group is taken."""
    stream = TrajectoryStream()

    def play(spec: EpisodeSpec, version: int) -> Ended:
        return trajectory(spec, [version], 1.0 if spec.group_id == "g00000000" else spec.replica)

    files = EndedFiles()
    settings = {"async_ratio": 0.0, "drop_groups_without_signal": True}
    made, rollout, _ = train(ThisProcess(play), tasks_of(), steps=1, log=files, stream=stream, **settings)
    assert [group.group_id for group in made[0]] == ["g00000001", "g00000002"]
    books, counts = rollout.books(), stream.counts()
    assert counts["produced"] == books["produced"]
    assert counts["dropped_no_signal"] == books["dropped_no_signal"] == 2
    assert counts["waiting"] == counts["produced"] - 2, "the learner takes them"
    assert stream.metrics()["balanced"] == 1
    assert len(files.written) == books["produced"], "the log is complete when the rollout has ended"


def test_an_episode_log_that_hangs_holds_up_the_end_only_for_a_while_and_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episode_log, "CLOSE_TIMEOUT_S", 0.1)
    train(ThisProcess(plays()), tasks_of(), steps=1, log=EndedFiles(hangs=True))
    assert "4 ended episodes are not in the episode log" in caplog.text
