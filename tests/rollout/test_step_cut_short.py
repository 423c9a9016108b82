"""A step that is cut short when the learner has new weights already is counted and reported as any other.

Real rollout, stream and trainer; learner, servers and files are stand-ins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_rollout import Log, ThisProcess, plays, tasks_of

from roll_flash.config.tree import load_config
from roll_flash.engines.learner import StepResult
from roll_flash.errors import RunError
from roll_flash.monitor.metrics import STEP_S
from roll_flash.rollout.rollout import Rollout
from roll_flash.stream import TrajectoryStream
from roll_flash.trainer import OnStep, Trainer
from roll_flash.types import FinishedGroup


class Learner:
    """Hangs in the middle of the update of the second step where it is told to."""

    def __init__(self, hangs: bool) -> None:
        self.version = 0
        self.reached = asyncio.Event()
        self.lost = asyncio.Event()
        self._hangs = hangs
        self._has_stepped = False

    async def accumulate(self, groups: Sequence[FinishedGroup]) -> None:
        pass

    async def finish_step(self) -> StepResult:
        self._has_stepped = True
        if self._hangs and self.version == 1:
            self.reached.set()
            await asyncio.Event().wait()
        self.version, self._has_stepped = self.version + 1, False
        return StepResult(self.version, 1, False, {"loss": 1.0})

    async def abandon_step(self) -> None:
        self.version, self._has_stepped = self.version + self._has_stepped, False


class Servers:
    """Take the weights of the first step at once, or never."""

    def __init__(self, learner: Learner, fleet: ThisProcess, run: Rollout, hang: bool) -> None:
        self._learner, self._fleet, self._run, self._hang = learner, fleet, run, hang

    async def wait_published(self) -> None:
        if self._hang and self._learner.version == 2:
            self._learner.reached.set()
            await asyncio.Event().wait()

    async def begin(self) -> None:
        self._fleet.version = self._learner.version
        self._run.published(self._learner.version)


class Kept:
    """Rows of metrics, tasks that were trained, and what checkpoints held of the rollout."""

    def __init__(self, run: Rollout) -> None:
        self.rows: list[dict[str, Any]] = []
        self.trained: dict[int, set[str]] = {}
        self.states: list[dict[str, Any]] = []
        self.hashes: set[str] = set()
        self.timeline: list[dict[str, Any]] = []
        self._run = run

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.rows.append({"step": step, **metrics})

    def add(self, step: int, trajectories: Sequence[Any]) -> None:
        self.trained[step] = {one.task.task_id for one in trajectories}

    async def begin(self) -> None:
        self.states.append(self._run.state())

    async def settled(self) -> None:
        pass

    async def ended(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


class SlowJournal:
    """Of a disk that takes its time."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def begin(self, step: int) -> None:
        pass

    def write(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "trained":
            time.sleep(0.5)
        self.events.append(event)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


async def cut_short(
    where: str, on_step: OnStep | None = None, journal: SlowJournal | None = None, step_timeout_s: float = 60.0
) -> tuple[Kept, Rollout]:
    """Two steps, the second one cut at `where`, as Ctrl-C does it."""
    config = load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": "Env-v0"}],
            "scheduler": {"async_ratio": 1.0, "groups_per_step": 2, "group_size": 2},
            "rollout": {"max_concurrent": 16},
            "checkpoint": {"every_minutes": 0},
            "learner": {"step_timeout_s": step_timeout_s},
            "eval": {"before_and_after": False},
            "steps": 5,
        }
    )
    fleet = ThisProcess(plays())
    learner = Learner(hangs=where == "update")
    stream = TrajectoryStream()
    async with Rollout(config, fleet, tasks_of(), Log(), stream, journal=journal) as run:  # type: ignore[arg-type]
        kept = Kept(run)

        async def usage() -> dict[str, float]:
            return {}

        system: Any = SimpleNamespace(
            config=config,
            learner=learner,
            rollout=run,
            publisher=Servers(learner, fleet, run, hang=where == "publication"),
            stream=stream,
            run_dir=SimpleNamespace(
                folder=Path.cwd(), latest_checkpoint=lambda: None, log_timeline=kept.timeline.append
            ),
            metrics=kept,
            trained_tasks=kept,
            checkpoints=kept,
            episode_space=SimpleNamespace(metrics=dict, step_ended=lambda version: None),
            stages=SimpleNamespace(take_timeline=list),
            usage_metrics=usage,
        )
        said = SimpleNamespace(note=lambda text: None, status=lambda text: None, step=lambda *of_step: None)
        trainer = Trainer(system, said, on_step)  # type: ignore[arg-type]

        async def steps() -> None:
            while await trainer._step():
                pass

        stepping = asyncio.create_task(steps())
        await asyncio.wait({stepping, asyncio.ensure_future(learner.reached.wait())}, return_when="FIRST_COMPLETED")
        assert not stepping.done(), stepping.result()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
    await trainer.stop_early(KeyboardInterrupt())
    return kept, run


@pytest.mark.parametrize("where", ["update", "publication"])
def test_it_is_in_the_metrics_and_its_tasks_are_not_played_again(where: str) -> None:
    kept, run = asyncio.run(asyncio.wait_for(cut_short(where), 60))
    assert [row["step"] for row in kept.rows if STEP_S in row] == [1, 2]
    assert [len(tasks) for tasks in kept.trained.values()] == [2, 2]
    books = run.books()
    assert books["trained"] == 8
    assert kept.rows[-1]["books/trained"] == 8
    (state,) = kept.states
    waiting = {task["task_id"] for _, task, _, _ in state["groups"]}
    assert waiting
    assert not waiting & set().union(*kept.trained.values())


def test_a_step_of_which_the_metrics_tell_is_in_the_journal() -> None:
    """Else `verify` finds a run wrong that was killed between the two."""
    journal, known = SlowJournal(), list[list[int]]()

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        known.append([event["version"] for event in journal.events if event["event"] == "trained"])

    asyncio.run(asyncio.wait_for(cut_short("update", on_step, journal), 60))
    assert known == [[1]]


def test_a_disk_that_does_not_take_the_journal_ends_the_run() -> None:
    with pytest.raises(RunError, match=r"the disk has not taken the journal within 0.1 s \(learner.step_timeout_s\)"):
        asyncio.run(asyncio.wait_for(cut_short("update", journal=SlowJournal(), step_timeout_s=0.1), 60))


def test_the_timeline_has_when_the_learner_worked_on_what() -> None:
    kept, _ = asyncio.run(asyncio.wait_for(cut_short("publication"), 60))
    assert [line["step"] for line in kept.timeline] == [1, 2]
    first = kept.timeline[0]
    assert [work for work, *_ in first["learner"]][-2:] == ["update", "stage"]
    assert first["learner"][0][0] == "accumulate"
    times = [first["started_s"], *(time for _, start, end, _ in first["learner"] for time in (start, end))]
    assert times == sorted(times)
    assert times[-1] <= first["ended_s"]


def test_a_callback_is_given_each_step_after_its_report_with_the_metrics_of_its_row() -> None:
    seen: list[dict[str, float]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        seen.append({"step": step, **metrics})

    kept, _ = asyncio.run(asyncio.wait_for(cut_short("publication", on_step), 60))
    assert seen == [row for row in kept.rows if STEP_S in row][:1], "the second step was cut short"
    assert {"reward", "loss", "async_ratio"} <= seen[0].keys()


@pytest.mark.parametrize("error", [ValueError("no space"), SystemExit("no space")])
def test_an_error_in_a_callback_ends_the_run_and_is_its_cause(error: BaseException) -> None:
    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        raise error

    with pytest.raises(RunError, match=rf"on_step failed after step 1: {type(error).__name__}: no space") as ended:
        asyncio.run(asyncio.wait_for(cut_short("update", on_step), 60))
    assert ended.value.__cause__ is error
