"""Evaluations of a training run: before it, after it, and every N steps during it.

Evaluations during training get a share of the concurrent episodes and never block a step: one that becomes due while
another runs is skipped and counted, except after the last step. The weights change meanwhile; the result lists the
weight versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from roll_flash.config.tree import Config
from roll_flash.errors import ConfigError, RollFlashError
from roll_flash.evaluation.evaluation import EpisodeRunner, evaluate_environments, is_complete
from roll_flash.evaluation.result import EvalResult
from roll_flash.processes.background import start_background
from roll_flash.run.files import free_name

SHARE_BESIDE_TRAINING = 4
"""Divisor: without `eval.max_concurrent`, an evaluation during training gets a quarter of `rollout.max_concurrent`."""
Log = Callable[[int, dict[str, Any]], None]


async def evaluate_version(
    runner: EpisodeRunner,
    config: Config,
    folder: Path,
    version: int,
    *,
    max_concurrent: int,
    trained: Collection[str] = (),
) -> tuple[EvalResult, dict[str, Any]]:
    """Evaluate the held-out tasks of each environment into `folder`/step_N; also return the metrics to log.

    Returns the result of the first environment, with those of the others in its `others`.
    """
    name = f"step_{version}"
    _set_another_aside(config, folder / name, name)
    result = await evaluate_environments(
        runner, config, folder / name, label=lambda _: name, max_concurrent=max_concurrent, trained=trained
    )
    metrics: dict[str, Any] = _figures(result)
    for env, other in result.others.items():
        metrics |= {f"{env}/{figure}": value for figure, value in _figures(other).items()}
    return result, metrics


def _set_another_aside(config: Config, folder: Path, label: str) -> None:
    """Rename what an earlier start of the run has evaluated at this version with other settings, or what is damaged."""
    if not folder.is_dir():
        return
    try:
        is_complete(config, folder, label=lambda _: label)
    except ConfigError:
        folder.rename(free_name(folder))


async def recorded_evaluation(config: Config, folder: Path) -> EvalResult | None:
    """Score again what an earlier start of the run evaluated before its first step; None if there is nothing, or it had
    other settings."""
    name = "step_0"
    if not (folder / name).is_dir():
        return None
    try:
        result = await evaluate_environments(None, config, folder / name, label=lambda _: name, max_concurrent=1)
    except ConfigError:
        return None
    was_made = not any("not_run" in each.failures for each in (result, *result.others.values()))
    return result if was_made else None


def _figures(result: EvalResult) -> dict[str, float]:
    versions = [int(version) for version in result.versions]
    span = {"eval/oldest_version": min(versions), "eval/newest_version": max(versions)} if versions else {}
    return {**result.metrics(), **span, "eval/seconds": result.seconds}


class EvaluationsBesideTraining:
    """Run at most one evaluation at a time. Leaving the context waits for it; an error or Ctrl-C cancels it."""

    def __init__(
        self,
        runner: EpisodeRunner,
        config: Config,
        folder: Path,
        *,
        log: Log,
        note: Callable[[str], None],
        trained: Collection[str] = (),
    ) -> None:
        self._runner = runner
        self._trained = trained
        self._config = config
        self._folder = folder
        self._log = log
        self._note = note
        self._running: asyncio.Task[None] | None = None
        self._at_the_end: int | None = None
        self.skipped = 0
        self.failed = 0

    def after_step(self, version: int) -> None:
        """Start an evaluation if one is due. Raises the error of the previous one, if that was a bug of ours."""
        every = self._config.eval.every
        ends_here = version == self._config.steps and self._config.eval.before_and_after
        if not every or version % every or ends_here:
            return
        if self._running is not None and not self._running.done():
            if version == self._config.steps:
                self._at_the_end = version  # no later step that it could delay
                return
            self.skipped += 1
            self._log(version, {"eval/skipped": self.skipped})
            return
        if self._running is not None:
            self._running.result()
        self._running = start_background(self._evaluate(version), f"the evaluation of step {version}")

    async def _evaluate(self, version: int) -> None:
        config = self._config
        share = config.eval.max_concurrent or max(1, config.rollout.max_concurrent // SHARE_BESIDE_TRAINING)
        try:
            result, metrics = await evaluate_version(
                self._runner, config, self._folder, version, max_concurrent=share, trained=self._trained
            )
        except RollFlashError as error:
            self.failed += 1
            self._log(version, {"eval/given_up": self.failed})
            self._note(f"the evaluation of step {version} was given up: {error}")
            return
        self._log(version, metrics)
        versions = ", ".join(result.versions) or "not known"
        self._note(
            f"step {version}, {result.kind}: {result.scores}, "
            f"{result.seconds:.0f} s beside training (weights {versions})"
        )

    async def __aenter__(self) -> EvaluationsBesideTraining:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is None:
            return
        try:
            if kind is None:
                await self._running
                if self._at_the_end is not None:
                    await self._evaluate(self._at_the_end)
        finally:
            if not self._running.done():
                self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
