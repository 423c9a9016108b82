"""An evaluation: n held-out tasks x k attempts, resumable; only the model's own failures score 0.

An attempt either ended (it has a reward) or failed (it has a cause). Failures are shown but excluded from every score.
Infrastructure failures are retried at once; all failures are retried when the evaluation runs again on the same folder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import Config, EnvConfig
from roll_flash.evaluation.attempts import Attempts
from roll_flash.evaluation.budget import Budget
from roll_flash.evaluation.journal import Journal
from roll_flash.evaluation.pages.report import write_report
from roll_flash.evaluation.result import EvalResult, Usage, score, with_cut_off_failures
from roll_flash.evaluation.tasks import build_episodes, held_out_tasks
from roll_flash.monitor.episodes import Outcome
from roll_flash.types import EpisodeSpec, SamplingParams

Status = Callable[[str], None]
STATUS_S = 0.5
"""Minimum seconds between progress reports."""


class EpisodeRunner(Protocol):
    """Interface of everything that runs episodes. Yields each outcome once when it ends; a failure is data, never
    raised.

    The next item of `episodes` is requested only when it can start.
    """

    def run(self, episodes: Iterable[EpisodeSpec], *, max_concurrent: int) -> AsyncGenerator[Outcome, None]: ...


class Evaluation:
    """One environment, its held-out tasks and a folder. Raises ConfigError if the folder holds another evaluation.

    `sampling` is used as given, but each attempt gets a different seed if it has one. `about` (the model, the endpoint,
    ...) is saved with the results; `before` are results of environments that share the budget; `trained` are hashes of
    the tasks that the model was trained on (`trained_tasks.py`), and may grow while the evaluation runs.
    """

    def __init__(
        self,
        env: EnvConfig,
        eval: EvalConfig,
        sampling: SamplingParams,
        *,
        folder: Path,
        label: str,
        about: Mapping[str, Any] | None = None,
        before: Sequence[EvalResult] = (),
        trained: Collection[str] = (),
    ) -> None:
        self._eval = eval
        self._trained = trained
        self._seconds_before = sum(result.seconds for result in before)
        self._folder = folder
        self._label = label
        self._about = dict(about or {})
        tasks = held_out_tasks(env, eval)
        self._tasks = len(tasks)
        self._specs = build_episodes(tasks, env, eval, sampling, label)
        self._budget = Budget(
            eval,
            max_turns=env.max_turns,
            max_new_tokens=sampling.max_new_tokens,
            used_by_others=(
                sum(result.usage.prompt_tokens for result in before),
                sum(result.usage.completion_tokens for result in before),
            ),
        )
        self._journal = Journal(folder, evaluation_plan(env, eval, sampling, self._about), self._budget)
        self._journal.forget_changed(self._specs)
        self._attempts = Attempts(self._journal.unscored(self._specs), eval, self._budget)
        self._began_s = self._reported_s = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """True if there is nothing left to run."""
        return not self._journal.unscored(self._specs)

    async def run(self, runner: EpisodeRunner, *, max_concurrent: int, status: Status | None = None) -> None:
        """Run the attempts missing in the folder. Each ended episode is on disk before the next is awaited, so that
        Ctrl-C or `kill -9` loses only running ones."""
        self._journal.begin()
        minutes = self._eval.max_minutes
        scope = asyncio.timeout(None if minutes is None else minutes * 60 - self._seconds_before)
        try:
            async with scope:
                # Repeat for attempts that could start only after others ended: retries, the end of a budget.
                while self._attempts.may_start():
                    outcomes = runner.run(self._attempts.take(), max_concurrent=max_concurrent)
                    async with aclosing(outcomes):
                        async for outcome in outcomes:
                            self._take(outcome, status)
        except TimeoutError:
            if not scope.expired():
                raise
            self._attempts.stop(f"{minutes:g} minutes are over (--max-minutes); the same command again goes on")

    def result(self) -> EvalResult:
        """Return the current result; also write it and the report to the folder."""
        by_id = self._journal.records
        ended = [by_id[spec.episode_id] for spec in self._specs if spec.episode_id in by_id]
        records = with_cut_off_failures(ended)
        budget = self._budget
        result = score(
            records,
            label=self._label,
            tasks=self._tasks,
            attempts=self._eval.attempts,
            seconds=time.monotonic() - self._began_s,
            pass_at=self._eval.pass_at,
            usage=Usage(budget.prompt_tokens, budget.completion_tokens, budget.unknown, budget.cost),
            tried_again=self._attempts.tried_again,
            stopped=self._attempts.stop_reason,
            trained=self._trained,
        )
        self._journal.write_result({**result.to_dict(), "about": self._about})
        write_report(self._folder, result, records, self._about)
        return result

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, outcome: Outcome, status: Status | None) -> None:
        self._journal.add(outcome)
        self._attempts.ended(outcome)
        now = time.monotonic()
        if status is not None and now - self._reported_s > STATUS_S:
            self._reported_s = now
            status(self._progress())

    def _progress(self) -> str:
        kinds = [record["kind"] for record in self._journal.records.values()]
        scored, failed = kinds.count("trajectory"), kinds.count("failure")
        used = self._budget.prompt_tokens + self._budget.completion_tokens
        trouble = f", {failed} failed" if failed else ""
        return f"{scored} of {len(self._specs)} attempts scored{trouble}, {used:,} tokens"


async def evaluate(
    runner: EpisodeRunner | None,
    *,
    env: EnvConfig,
    eval: EvalConfig,
    sampling: SamplingParams,
    max_concurrent: int,
    folder: Path,
    label: str,
    about: Mapping[str, Any] | None = None,
    status: Status | None = None,
    before: Sequence[EvalResult] = (),
    trained: Collection[str] = (),
) -> EvalResult:
    """Run the attempts missing in `folder` and score all; without a runner, only score the folder.

    Ended attempts are scored and written also on cancellation. Raises ConfigError if the folder holds another
    evaluation.
    """
    with Evaluation(
        env, eval, sampling, folder=folder, label=label, about=about, before=before, trained=trained
    ) as evaluation:
        try:
            if runner is not None:
                await evaluation.run(runner, max_concurrent=max_concurrent, status=status)
        except (asyncio.CancelledError, KeyboardInterrupt):
            evaluation.result()
            raise
        return evaluation.result()


async def evaluate_environments(
    runner: EpisodeRunner | None,
    config: Config,
    folder: Path,
    *,
    label: Callable[[EnvConfig], str],
    max_concurrent: int,
    about: Mapping[str, Any] | None = None,
    status: Status | None = None,
    trained: Collection[str] = (),
) -> EvalResult:
    """Evaluate the environments of a config one after another, within one budget; arguments as in `evaluate`.

    Returns the result of the first, which is in `folder`; its `others` are those in the subfolders `env_N`.
    """
    results: list[EvalResult] = []
    for index, env in enumerate(config.envs):
        results.append(
            await evaluate(
                runner,
                env=env,
                eval=config.eval,
                sampling=eval_sampling(config),
                max_concurrent=max_concurrent,
                folder=_folder_of(folder, index),
                label=label(env),
                about=about,
                status=status,
                before=results,
                trained=trained,
            )
        )
    return replace(results[0], others={f"env_{index}": result for index, result in enumerate(results) if index})


def is_complete(
    config: Config, folder: Path, *, label: Callable[[EnvConfig], str], about: Mapping[str, Any] | None = None
) -> bool:
    """True if `evaluate_environments` has nothing left to run. Raises ConfigError as `evaluate` does."""
    for index, env in enumerate(config.envs):
        with Evaluation(
            env, config.eval, eval_sampling(config), folder=_folder_of(folder, index), label=label(env), about=about
        ) as evaluation:
            if not evaluation.is_complete:
                return False
    return True


def _folder_of(folder: Path, index: int) -> Path:
    return folder / f"env_{index}" if index else folder


def eval_sampling(config: Config) -> SamplingParams:
    """Sampling parameters: as in training, at the temperature of `eval`, and repeatable if the servers allow it."""
    return SamplingParams(
        temperature=config.eval.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop=config.rollout.stop,
        seed=config.seed,
    )


def evaluation_plan(
    env: EnvConfig, eval: EvalConfig, sampling: SamplingParams, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings that two evaluations in one folder must share; tasks and attempts may be added later."""
    return {
        "env_id": env.id,
        "env_kwargs": env.kwargs,
        "max_turns": env.max_turns,
        "seeds_from": eval.seeds_from,
        **({} if env.success_above is None else {"success_above": env.success_above}),
        **({} if env.task_source is None else {"task_source": env.task_source.model_dump()}),
        **({} if env.data is None else _rows(env)),
        # `end_ids` follow from the model; plans of earlier versions have none.
        "sampling": {name: value for name, value in asdict(sampling).items() if name != "end_ids"},
        "about": dict(about),
    }


def _rows(env: EnvConfig) -> dict[str, Any]:
    """Where the rows of an environment come from, and what earns a reward."""
    tree = env.model_dump(mode="json", include={"data", "reward"})
    return {**tree, "data": {name: value for name, value in tree["data"].items() if name not in ("epochs", "shuffle")}}
