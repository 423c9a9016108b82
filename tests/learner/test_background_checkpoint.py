"""A checkpoint of a run is written while its steps go on, and is whole or not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.config.tree import CheckpointConfig, load_config
from roll_flash.errors import CheckpointError, LearnerError
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.learner.ranks.rank import LearnerRank
from roll_flash.processes.background import FirstFailure, first_failure
from roll_flash.run.checkpoints.writer import CheckpointWriter
from roll_flash.run.run_dir import RunDir, list_checkpoints
from roll_flash.stream import TrajectoryStream
from roll_flash.trainer import Trainer
from tests.learner.in_process import assert_equal_weights, in_process, weights_of
from tests.learner.samples import make_group

GROUP = make_group(0, prompt=20)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    tree = {"name": "run", "runs": str(tmp_path), "model": {"path": "tiny"}, "envs": [{"id": "Any-v0"}]}
    with RunDir.create(load_config(tree), resume=False) as run:
        yield run


class Disk:
    """Says when the ranks have written: not before `done` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = False
        has_written = LearnerRank.has_written
        monkeypatch.setattr(LearnerRank, "has_written", lambda rank, at: self.done and has_written(rank, at))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


async def step(learner: FsdpLearner) -> None:
    await learner.accumulate([GROUP])
    await learner.finish_step()


class Run:
    """What a checkpoint is made of, and what would end the run."""

    def __init__(
        self, run_dir: RunDir, learner: FsdpLearner, failure: FirstFailure, keep: int = 5, timeout_s: float = 60.0
    ) -> None:
        self.run_dir = run_dir
        self.learner = learner
        self.books = {"next_group": 1}
        self.failure = failure
        self.writer = CheckpointWriter(
            run_dir,
            learner,
            rollout_state=lambda: dict(self.books),
            episodes_written=self.episodes_written,
            config=CheckpointConfig(keep=keep),
            checkpoint_bytes=0,
            timeout_s=timeout_s,
        )

    async def episodes_written(self) -> None:
        """There are none."""

    def complete(self) -> list[int]:
        return [checkpoint.step for checkpoint in list_checkpoints(self.run_dir.folder)]

    def files(self) -> list[str]:
        return sorted(os.listdir(self.run_dir.checkpoints_folder))


def during_a_run(
    model: Path, run_dir: RunDir, use: Callable[[Run], Awaitable[Any]], *, keep: int = 5, timeout_s: float = 60.0
) -> Any:
    async def in_learner(learner: FsdpLearner) -> Any:
        with first_failure() as failure:
            run = Run(run_dir, learner, failure, keep, timeout_s)
            try:
                return await use(run)
            finally:
                await run.writer.close()

    return in_process(model, in_learner)


def test_the_next_step_goes_on_and_the_checkpoint_is_that_of_the_step_before(
    tiny_model: Path, run_dir: RunDir, slow_disk: Disk
) -> None:
    async def use(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        await step(run.learner)
        before = await weights_of(run.learner)
        waited_s = await run.writer.begin()
        run.books["next_group"] = 2
        await step(run.learner)
        assert run.complete() == []
        slow_disk.done = True
        await run.writer.settled()
        assert waited_s is not None
        assert run.writer.metrics()["checkpoint/written_s"] >= waited_s > 0
        assert await run.writer.begin() is not None
        return before, await weights_of(run.learner)

    before, after = during_a_run(tiny_model, run_dir, use)
    first, second = list_checkpoints(run_dir.folder)
    assert json.loads(first.trainer.read_text()) == {"version": 1, "next_group": 1}
    assert json.loads(second.trainer.read_text()) == {"version": 2, "next_group": 2}
    assert_equal_weights(load_file(first.hf / "model.safetensors"), before)
    assert_equal_weights(load_file(second.hf / "model.safetensors"), after)

    async def resumed(learner: FsdpLearner) -> dict[str, torch.Tensor]:
        await learner.load(first.state)
        await step(learner)
        return await weights_of(learner)

    assert_equal_weights(in_process(tiny_model, resumed), after)


def test_one_is_written_at_a_time_and_the_newest_stay(tiny_model: Path, run_dir: RunDir, slow_disk: Disk) -> None:
    async def use(run: Run) -> None:
        await step(run.learner)
        await run.writer.begin()
        await step(run.learner)
        second = asyncio.create_task(run.writer.begin())
        await asyncio.sleep(0.3)
        assert not second.done()
        assert run.files() == ["step_1.partial"]
        slow_disk.done = True
        waited_s = await second
        assert waited_s is not None
        assert waited_s > 0.25
        await run.writer.settled()
        assert await run.writer.begin() is None, "there is one of this version"
        assert run.files() == ["step_2"]

    during_a_run(tiny_model, run_dir, use, keep=1)


def test_a_full_disk_is_heard_at_once_and_leaves_the_checkpoint_before_as_the_newest(
    tiny_model: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Mock(free=100_000))

    async def use(run: Run) -> None:
        await step(run.learner)
        await run.writer.begin()
        await run.writer.settled()
        await step(run.learner)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with contextlib.suppress(CheckpointError):  # where it fails before it has copied
                await run.writer.begin()
            async with asyncio.timeout(60):
                await run.failure.happened.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(run.failure.error, CheckpointError)
        assert "cannot be written" in str(run.failure.error)
        assert "its disk is full (0.1 MiB left): free some" in str(run.failure.error)
        assert run.files() == ["step_1"]

    during_a_run(tiny_model, run_dir, use)


def test_a_run_that_ends_of_a_checkpoint_tries_once_more_for_its_newest_step(
    tiny_model: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written of the one that failed is removed: there may be space for another."""
    has_written, full = LearnerRank.has_written, [CheckpointError("No space left on device")]

    def once_full(rank: LearnerRank, folder: Path) -> bool:
        if full:
            raise full.pop()
        return has_written(rank, folder)

    monkeypatch.setattr(LearnerRank, "has_written", once_full)

    async def use(run: Run) -> None:
        await step(run.learner)
        await run.writer.begin()
        await step(run.learner)
        async with asyncio.timeout(60):
            await run.failure.happened.wait()
        assert run.failure.error is not None
        stream = TrajectoryStream()
        config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "Any-v0"}]})
        system = Mock(config=config, run_dir=run_dir, learner=run.learner, checkpoints=run.writer, stream=stream)
        await Trainer(system, Mock()).stop_early(run.failure.error)
        assert run.complete() == [2]

    during_a_run(tiny_model, run_dir, use)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_rank_killed_while_it_writes_is_a_clear_error_and_leaves_no_half_checkpoint(
    tiny_model: Path, run_dir: RunDir
) -> None:
    async def use() -> None:
        learner = FsdpLearner(tiny_model, LearnerConfig(learning_rate=1e-3, step_timeout_s=120), async_ratio=1)
        with first_failure() as failure:
            await kill_while_writing(learner, Run(run_dir, learner, failure))

    async def kill_while_writing(learner: FsdpLearner, run: Run) -> None:
        try:
            await learner.start()
            weights = await learner.stage_weights()
            await run.writer.begin()
            os.kill(int(weights.path.split("/")[2]), signal.SIGSTOP)  # before it could say that all is written
            os.kill(int(weights.path.split("/")[2]), signal.SIGKILL)
            with pytest.raises(LearnerError, match="learner rank 0 died"):
                await run.writer.settled()
            assert run.failure.error is None, "who waits for it can start the learner again"
            assert run.files() == []
        finally:
            await run.writer.close()
            await learner.close()

    asyncio.run(use())


def test_one_that_takes_too_long_is_given_up(tiny_model: Path, run_dir: RunDir, slow_disk: Disk) -> None:
    async def use(run: Run) -> None:
        await run.writer.begin()
        with pytest.raises(CheckpointError, match=r"not written within 0\.3 s \(learner\.step_timeout_s\)"):
            await run.writer.settled()
        await run.writer.close()
        assert run.files() == []

    during_a_run(tiny_model, run_dir, use, timeout_s=0.3)


@pytest.mark.parametrize("gives_up", [False, True])
def test_the_end_of_a_run_waits_for_the_one_under_way_unless_it_is_told_not_to(
    tiny_model: Path, run_dir: RunDir, slow_disk: Disk, gives_up: bool
) -> None:
    async def use(run: Run) -> None:
        await run.writer.begin()
        closing = asyncio.create_task(run.writer.close())
        await asyncio.sleep(0.2)
        assert not closing.done()
        if gives_up:
            run.writer.give_up()
        else:
            slow_disk.done = True
        await closing
        assert run.files() == ([] if gives_up else ["step_0"])
        assert run.failure.error is None

    during_a_run(tiny_model, run_dir, use)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_ctrl_c_while_weights_change_does_not_label_them_with_the_version_before(
    tiny_model: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    finishing: list[asyncio.Task[Any]] = []
    update = LearnerRank.update

    def interrupted(rank: LearnerRank, *args: Any, **kwargs: Any) -> Any:
        finishing[0].cancel()
        return update(rank, *args, **kwargs)

    monkeypatch.setattr(LearnerRank, "update", interrupted)

    async def use(learner: FsdpLearner) -> None:
        before = await weights_of(learner)
        await learner.accumulate([GROUP, make_group(1, prompt=20)])
        finishing.append(asyncio.create_task(learner.finish_step()))
        with pytest.raises(asyncio.CancelledError):
            await finishing[0]
        await learner.abandon_step()
        after = await weights_of(learner)
        assert any(not torch.equal(after[name], before[name]) for name in before)
        assert learner.version == 1
        await learner.accumulate([GROUP])
        await learner.abandon_step()
        assert learner.version == 1, "a step that changed nothing is none"

    in_process(tiny_model, use, minibatches=minibatches)


def test_ctrl_c_while_state_is_copied_does_not_spoil_the_checkpoint(tiny_model: Path, run_dir: RunDir) -> None:
    async def use(run: Run) -> None:
        await step(run.learner)
        begun = asyncio.create_task(run.writer.begin())
        await asyncio.sleep(0)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await run.learner.abandon_step()
        await run.writer.begin()
        await run.writer.settled()
        assert run.files() == ["step_1"]

    during_a_run(tiny_model, run_dir, use)
