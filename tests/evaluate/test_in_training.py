"""Evaluations beside training: none holds up a step, and which weights answered is known."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scripted_runner import ScriptedRunner, trajectory_of

from roll_flash.config.tree import Config, load_config
from roll_flash.errors import RunError
from roll_flash.evaluation.in_training import EvaluationsBesideTraining, evaluate_version, recorded_evaluation
from roll_flash.system import system
from roll_flash.types import EpisodeFailure, EpisodeSpec, Trajectory


def config(**eval: Any) -> Config:
    return load_config(
        {
            "model": {"path": "tiny"},
            "envs": [{"id": "Maze-v0"}, {"id": "Other-v0"}],
            "steps": 6,
            "rollout": {"max_concurrent": 16},
            "eval": {"tasks": 3, "every": 2, **eval},
        }
    )


class SlowRunner(ScriptedRunner):
    """Ends nothing before `go` is set."""

    def __init__(self) -> None:
        super().__init__(lambda spec: True)
        self.go = asyncio.Event()
        self.concurrent: list[int] = []

    async def run(
        self, episodes: Iterable[EpisodeSpec], *, max_concurrent: int
    ) -> AsyncIterator[Trajectory | EpisodeFailure]:
        self.concurrent.append(max_concurrent)
        await self.go.wait()
        async for outcome in super().run(episodes, max_concurrent=max_concurrent):
            yield outcome


class Lines:
    """What was logged and noted."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.notes: list[str] = []

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.rows.append((step, metrics))

    def steps_with(self, name: str) -> list[int]:
        return [step for step, metrics in self.rows if name in metrics]


def beside(runner: Any, settings: Config, folder: Path, lines: Lines) -> EvaluationsBesideTraining:
    return EvaluationsBesideTraining(runner, settings, folder, log=lines.log, note=lines.notes.append)


def test_steps_do_not_wait_and_an_evaluation_that_is_due_meanwhile_is_skipped_and_counted(tmp_path: Path) -> None:
    lines = Lines()

    async def train() -> None:
        runner = SlowRunner()
        async with beside(runner, config(before_and_after=False), tmp_path, lines) as evaluations:
            for version in range(1, 7):
                evaluations.after_step(version)
                await asyncio.sleep(0)
            assert lines.rows == [(4, {"eval/skipped": 1})]
            runner.go.set()
        assert runner.concurrent == [4, 4, 4, 4]  # a quarter of 16, for two environments twice

    asyncio.run(train())
    assert lines.steps_with("eval/success") == [2, 6]
    assert lines.steps_with("env_1/eval/success") == [2, 6]
    assert lines.notes[0].startswith("step 2, held-out: success 1.000")
    assert (tmp_path / "step_2" / "env_1" / "results.json").is_file()


def test_the_last_step_is_left_to_the_evaluation_after_training(tmp_path: Path) -> None:
    lines = Lines()

    async def train() -> None:
        async with beside(ScriptedRunner(lambda spec: True), config(every=6), tmp_path, lines) as evaluations:
            evaluations.after_step(6)

    asyncio.run(train())
    assert lines.rows == []


def test_when_training_ends_early_the_evaluation_is_given_up_and_keeps_what_it_has(tmp_path: Path) -> None:
    started = asyncio.Event()

    def script(spec: EpisodeSpec) -> bool:
        if len(runner.ran) == 2:
            started.set()
        return True

    runner = ScriptedRunner(script)

    async def train() -> None:
        async with beside(runner, config(), tmp_path, Lines()) as evaluations:
            evaluations.after_step(2)
            await started.wait()
            raise RunError("stopped")

    with pytest.raises(RunError, match="stopped"):
        asyncio.run(train())
    assert runner.closed
    results = json.loads((tmp_path / "step_2" / "results.json").read_text())
    assert 1 <= results["scored"] < 3


def test_an_evaluation_that_cannot_go_on_does_not_end_the_run(tmp_path: Path) -> None:
    class Broken(ScriptedRunner):
        async def run(self, episodes: Any, *, max_concurrent: int) -> Any:
            raise RunError("no worker is left")
            yield

    lines = Lines()

    async def train() -> None:
        async with beside(Broken(lambda spec: True), config(), tmp_path, lines) as evaluations:
            evaluations.after_step(2)

    asyncio.run(train())
    assert lines.rows == [(2, {"eval/given_up": 1})]
    assert "no worker is left" in lines.notes[0]


def test_the_weight_versions_that_answered_are_in_result_and_metrics(tmp_path: Path) -> None:
    class Updated(ScriptedRunner):
        def _outcome(self, spec: EpisodeSpec) -> Trajectory | EpisodeFailure:
            return trajectory_of(spec, True, versions=np.array([-1, -1, 4, 4, 5], np.int32))

    result, metrics = asyncio.run(evaluate_version(Updated(lambda spec: True), config(), tmp_path, 4, max_concurrent=2))
    assert result.versions == {"4": 6, "5": 3}
    assert (metrics["eval/oldest_version"], metrics["eval/newest_version"]) == (4, 5)
    assert "weight versions" in result.table()


def test_the_environments_of_a_run_share_the_budget_of_an_evaluation(tmp_path: Path) -> None:
    runner = ScriptedRunner(lambda spec: True)  # 13 tokens each
    limited = config(max_tokens_total=45)
    result, metrics = asyncio.run(evaluate_version(runner, limited, tmp_path, 4, max_concurrent=1))
    other = result.others["env_1"]
    assert (result.scored, other.scored) == (3, 1)
    assert "45 tokens are used" in str(other.stopped)
    assert metrics["env_1/eval/failed"] == 2


def test_a_run_that_goes_on_has_the_evaluation_of_its_first_start_if_settings_are_the_same(tmp_path: Path) -> None:
    async def evaluated() -> None:
        assert await recorded_evaluation(config(), tmp_path) is None
        assert not os.listdir(tmp_path)
        made, _ = await evaluate_version(ScriptedRunner(even), config(), tmp_path, 0, max_concurrent=1)
        found = await recorded_evaluation(config(), tmp_path)
        assert found is not None
        assert (found.success, found.task_hashes) == (made.success, made.task_hashes)
        assert found.others["env_1"].success == made.others["env_1"].success
        assert await recorded_evaluation(config(tasks=4), tmp_path) is None, "one task was not evaluated"
        assert await recorded_evaluation(config(temperature=0.5), tmp_path) is None

    def even(spec: EpisodeSpec) -> bool:
        return spec.task.seed % 2 == 0

    asyncio.run(evaluated())


def test_a_run_that_goes_on_with_other_settings_sets_the_evaluation_of_its_version_aside(tmp_path: Path) -> None:
    """A finished run that went on with another `eval.temperature` ended with the advice to choose another folder."""
    runner = ScriptedRunner(lambda spec: True)
    for temperature in (0.0, 0.0, 0.5):
        asyncio.run(evaluate_version(runner, config(temperature=temperature), tmp_path, 2, max_concurrent=1))
    assert sorted(os.listdir(tmp_path)) == ["step_2", "step_2.bak"]
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("step_2", "step_2.bak")]
    assert [plan["sampling"]["temperature"] for plan in plans] == [0.5, 0.0]


def test_evaluations_of_a_run_know_what_it_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def evaluate_version(*_: Any, trained: Any, **__: Any) -> tuple[Mock, dict[str, float]]:
        seen.append(trained)
        return Mock(), {}

    monkeypatch.setattr(system, "evaluate_version", evaluate_version)
    monkeypatch.setattr(system, "EvaluationsBesideTraining", lambda *_, trained, **__: seen.append(trained))
    run = system.System(**{field.name: Mock() for field in fields(system.System)})
    asyncio.run(run.evaluate())
    run.evaluations(print)
    assert seen == [run.trained_tasks.hashes, run.trained_tasks.hashes]
