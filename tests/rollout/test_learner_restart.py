"""A learner that dies at any moment starts again where the run is: no step is lost, made twice or of something else.

Real trainer, rollout, stream, journal, episode log, publisher, checkpoints and run folder; fleet, servers and learner
are stand-ins. The learner's weights are a hash of all that it was trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_recovery import Fleet, config_of

from roll_flash import trainer
from roll_flash.config.tree import Config
from roll_flash.engines.inference import ServerUpdate, StagedWeights
from roll_flash.engines.learner import StepResult
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import InferenceError, LearnerError, LearnerLostError
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.processes.background import FirstFailure, background_task, first_failure
from roll_flash.rollout import episode_log
from roll_flash.rollout.rollout import Rollout
from roll_flash.run.checkpoints.writer import CheckpointWriter
from roll_flash.run.journal import Journal, read_journal
from roll_flash.run.run_dir import RunDir, list_checkpoints
from roll_flash.run.verify import verify_run
from roll_flash.stream import TrajectoryStream
from roll_flash.system import learner_restart
from roll_flash.trainer import Trainer
from roll_flash.types import FinishedGroup
from roll_flash.weight_sync.parity import Probe
from roll_flash.weight_sync.publication import Publisher

STEPS = 4
BEGINNING = "initial weights"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_log, "GROUP_COMMIT_S", 0.0)
    monkeypatch.setattr(learner_restart, "FIRST_PAUSE_S", 0.001)


def after(weights: str, batches: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps([weights, batches]).encode()).hexdigest()


class MortalLearner:
    """Dies in the calls with the numbers of `deaths`, in the middle of their work."""

    def __init__(self, async_ratio: float, deaths: Sequence[int]) -> None:
        self.lost = asyncio.Event()
        self.version = 0
        self.weights = BEGINNING
        self.starts = 0
        self.calls = 0
        self.deaths = set(deaths)
        self.hangs_at = -1
        """Version in whose step a gradient never ends, once; -1: none."""
        self._async_ratio = async_ratio
        self._now: list[Any] = []

    def die(self) -> None:
        self.weights = "lost"
        self.lost.set()

    async def start(self) -> None:
        await asyncio.sleep(0.001)
        self.starts += 1
        self.version, self.weights, self._now = 0, BEGINNING, []
        self.lost.clear()

    async def close(self) -> None:
        self.die()

    def raise_if_lost(self) -> None:
        if self.lost.is_set():
            raise LearnerLostError("learner rank 0 died")

    async def _works(self) -> None:
        """Take some time, and die in it if that is due."""
        self.raise_if_lost()
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0)
        if number in self.deaths:
            self.die()
        self.raise_if_lost()

    async def accumulate(self, groups: Sequence[FinishedGroup]) -> None:
        for episode in (episode for group in groups for episode in group.trajectories):
            assert episode.oldest_version >= self.version - self._async_ratio, "too old"
        self._now.append([[g.group_id, [[e.episode_id, e.reward] for e in g.trajectories]] for g in groups])
        if self.version == self.hangs_at:
            self.hangs_at = -1
            await asyncio.Event().wait()
        await self._works()

    async def finish_step(self) -> StepResult:
        self.weights, self._now = after(self.weights, self._now), []
        await self._works()
        self.version += 1
        return StepResult(self.version, 1, False, {"loss": float(self.version)})

    async def abandon_step(self) -> None:
        self._now = []

    async def logprobs_of(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        await self._works()
        return [np.zeros(len(text) - 1, np.float32) for text in texts]

    async def stage_weights(self) -> StagedWeights:
        await self._works()
        return StagedWeights(self.version, self.weights, 1)

    async def release_weights(self, weights: StagedWeights) -> None:
        await self._works()

    async def begin_save(self, folder: Path) -> asyncio.Task[None]:
        await self._works()
        return await self._in_background(folder, "state.json", {"version": self.version, "weights": self.weights})

    async def begin_export(self, folder: Path) -> asyncio.Task[None]:
        return await self._in_background(folder, "config.json", {})

    async def _in_background(self, folder: Path, name: str, content: dict[str, Any]) -> asyncio.Task[None]:
        async def write() -> None:
            await asyncio.to_thread(folder.mkdir)
            await self._works()
            (folder / name).write_text(json.dumps(content))

        return asyncio.create_task(write())

    async def load(self, folder: Path) -> None:
        await self._works()
        state = json.loads((folder / "state.json").read_text())
        self.version, self.weights = state["version"], state["weights"]


class Servers:
    """Read the learner's memory, which is gone with it; note what they had."""

    def __init__(self, learner: MortalLearner) -> None:
        self._learner = learner
        self.had: list[tuple[int, str]] = []

    async def publish(self, weights: StagedWeights, *, in_flight: str) -> list[ServerUpdate]:
        await asyncio.sleep(0.002)
        if self._learner.lost.is_set():
            raise InferenceError("server 0: no such file")
        self.had.append((weights.version, weights.path))
        return [ServerUpdate("server", weights.version, 0.0, 0.0)]

    async def score(self, text: Sequence[int]) -> list[NDArray[np.float32]]:
        return [np.zeros(len(text) - 1, np.float32)]


class Run:
    """A run of STEPS steps with a learner that dies."""

    def __init__(self, config: Config, run_dir: RunDir, deaths: Sequence[int]) -> None:
        self.config, self.run_dir = config, run_dir
        self.learner = MortalLearner(config.scheduler.highest_async_ratio, deaths)
        self.servers = Servers(self.learner)
        self.said: list[str] = []
        self.rows: list[int] = []

    async def play(self, seed: int, also: Callable[[], Awaitable[None]] | None = None) -> Rollout:
        """Run to the end; `also` runs beside it."""
        with first_failure() as failure:
            async with asyncio.timeout(300):
                return await self._play(seed, also, failure)

    async def _play(self, seed: int, also: Callable[[], Awaitable[None]] | None, failure: FirstFailure) -> Rollout:
        config, run_dir, learner = self.config, self.run_dir, self.learner
        stream, journal = TrajectoryStream(), Journal(run_dir.journal)
        journal.begin(0)
        fleet: Any = Fleet(seed, 0, lambda: None)
        with EpisodesWriter(run_dir.episodes) as files:
            run = Rollout(config, fleet, open_tasks(config), files, stream, journal=journal)

            def published(version: int) -> None:
                assert version >= fleet.version, "versions of servers never go back"
                fleet.version = version
                run.published(version)

            publisher = Publisher(
                learner,  # type: ignore[arg-type]
                self.servers,  # type: ignore[arg-type]
                config.weights,
                probe=Probe([[1, 2, 3]]),
                threshold=1.0,
                on_published=published,
            )
            await publisher.check()
            checkpoints = CheckpointWriter(
                run_dir,
                learner,  # type: ignore[arg-type]
                rollout_state=run.state,
                episodes_written=run.written,
                config=config.checkpoint,
                checkpoint_bytes=0,
                timeout_s=20.0,
            )
            system: Any = SimpleNamespace(
                config=config,
                learner=learner,
                rollout=run,
                publisher=publisher,
                stream=stream,
                run_dir=run_dir,
                metrics=SimpleNamespace(log=lambda step, metrics: "step_s" in metrics and self.rows.append(step)),
                trained_tasks=SimpleNamespace(add=lambda step, trajectories: None, hashes=set()),
                checkpoints=checkpoints,
                episode_space=SimpleNamespace(metrics=dict, step_ended=lambda version: None),
                stages=SimpleNamespace(take_timeline=list),
                usage_metrics=self._nothing,
                before_first_step=self._nothing,
            )
            said = SimpleNamespace(note=self.said.append, status=lambda text: None, step=lambda *_: None)
            trainer = Trainer(system, said)  # type: ignore[arg-type]
            async with run, background_task(trainer._restart.watch(), "the watch"):
                beside = asyncio.create_task(also() if also else self._nothing())
                while trainer._version < STEPS:
                    assert await trainer._step()
                beside.cancel()
                await trainer.checkpoint()
                await trainer._settle()
            failure.raise_error()
            await publisher.close()
            await checkpoints.close()
        journal.close()
        return run

    async def _nothing(self) -> dict[str, float]:
        return {}

    def check(self, run: Rollout) -> None:
        """All that must hold of a run, however often its learner died."""
        events, damage = read_journal(self.run_dir.journal)
        assert damage is None
        trained = [event for event in events if event["event"] == "trained"]
        weights = [BEGINNING]
        for event in trained:
            weights.append(after(weights[-1], event["batches"]))
        assert [event["version"] for event in trained] == list(range(1, STEPS + 1)) == self.rows
        assert self.learner.weights == weights[-1], "it was trained on what the journal says, once and in this order"
        for version, path in self.servers.had:
            assert path == weights[version], "no version was published with two sets of weights"
        assert self.servers.had[-1][0] == STEPS
        assert list_checkpoints(self.run_dir.folder)[-1].step == STEPS
        books = run.books()
        dropped = sum(count for name, count in books.items() if name.startswith("dropped_"))
        assert books["produced"] == books["trained"] + dropped + books["waiting"]
        assert books["trained"] == 2 * 3 * STEPS
        assert not [finding for finding in verify_run(self.run_dir.folder) if not finding.ok and finding.check != "log"]


def settings(folder: Path, **checkpoint: Any) -> Config:
    return config_of(folder).model_copy(
        update={"checkpoint": config_of(folder).checkpoint.model_copy(update={"every_minutes": 0.0, **checkpoint})}
    )


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    opened: list[RunDir] = []

    def make(*deaths: int, **checkpoint: Any) -> Run:
        config = settings(tmp_path, **checkpoint)
        opened.append(RunDir.create(config, resume=False))
        return Run(config, opened[-1], deaths)

    yield make
    for run_dir in opened:
        run_dir.close()


def test_no_call_is_special_it_may_die_in_any_one(tmp_path: Path) -> None:
    async def calls(config: Config, run_dir: RunDir) -> int:
        run = Run(config, run_dir, ())
        run.check(await run.play(0))
        assert run.learner.starts == 0
        return run.learner.calls

    async def dies(config: Config, run_dir: RunDir, call: int) -> None:
        run = Run(config, run_dir, (call,))
        run.check(await run.play(0))
        assert run.learner.starts == 1
        assert "learner rank 0 died; starting the learner again, from " in run.said[0]
        assert any(line.startswith("the learner is back at step ") for line in run.said)

    with RunDir.create(settings(tmp_path / "none", every=2), resume=False) as run_dir:
        last = asyncio.run(calls(settings(tmp_path / "none", every=2), run_dir))
    assert last > 5 * STEPS
    for call in range(2, last - 2):  # the first is that of the start, the last two come or not
        config = settings(tmp_path / str(call), every=2)
        with RunDir.create(config, resume=False) as run_dir:
            asyncio.run(dies(config, run_dir, call))


@pytest.mark.parametrize("seed", range(8))
def test_it_may_die_again_and_again_also_while_it_repeats_steps(
    seed: int, new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_restart, "MAX_WITHOUT_STEP", 1000)
    draw = random.Random(seed)
    # Every run has the first 20 calls, on a busy machine often few more.
    calls = [*sorted(draw.sample(range(2, 20), 4)), *sorted(draw.sample(range(20, 100), 8))]
    run = new_run(*calls, every=draw.choice([0, 1, 3]))

    async def at_other_moments() -> None:
        for _ in range(8):  # on a busy machine more would leave no time for a step
            await asyncio.sleep(draw.random() * 0.3)
            run.learner.die()

    async def all_of_it() -> None:
        run.check(await run.play(seed, at_other_moments))

    asyncio.run(all_of_it())
    assert run.learner.starts >= 3


def test_an_idle_learner_is_started_again_before_it_is_needed(new_run: Callable[..., Run]) -> None:
    run = new_run(every=1)

    async def when_idle() -> None:
        while not run.rows:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        run.learner.die()

    async def all_of_it() -> None:
        run.check(await run.play(1, when_idle))

    asyncio.run(all_of_it())
    assert run.learner.starts == 1


def test_one_that_hangs_is_started_again(new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "LEARNER_FLOOR_S", 0.5)
    run = new_run(every=1)
    run.learner.hangs_at = 2

    async def all_of_it() -> None:
        run.check(await run.play(1))

    asyncio.run(all_of_it())
    assert run.learner.starts >= 1
    assert any("; it hangs; starting the learner again" in line for line in run.said), run.said


def test_one_that_dies_at_once_each_time_ends_the_run_and_says_how_often(new_run: Callable[..., Run]) -> None:
    run = new_run(*range(5, 1000), every=1)
    with pytest.raises(LearnerLostError, match="died; it was started again 3 times without a new step"):
        asyncio.run(run.play(0))
    assert run.learner.starts == learner_restart.MAX_WITHOUT_STEP
    starts = [line for line in run.said if "; starting the learner again" in line]
    pauses = ["again, from its beginning", "again in 0.001 s, from", "again in 0.002 s, from"]
    assert all(pause in line for pause, line in zip(pauses, starts, strict=True)), "each is twice as long"


def test_a_journal_that_does_not_lead_to_where_the_run_is_ends_it_and_nothing_is_written_of_such_a_learner(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(25, every=100)

    async def lost() -> None:
        while run.learner.starts == 0:
            await asyncio.sleep(0.001)
            for path in run.run_dir.journal.glob("*"):
                path.write_bytes(path.read_bytes().replace(b'"trained"', b'"treined"'))

    with pytest.raises(LearnerError, match="journal"):
        asyncio.run(run.play(0, lost))
    assert run.learner.lost.is_set()
