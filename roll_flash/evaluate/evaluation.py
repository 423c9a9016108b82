"""An evaluation: n held-out tasks x k attempts, resumable, with nothing scored 0 that the model did not do.

An attempt either ended (it has a reward) or failed (it has a cause). Failures are shown and left out of every score,
and are tried again when the evaluation is started again on the same folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, cast

from roll_flash.config import Config, EnvConfig, EvalConfig
from roll_flash.errors import ConfigError
from roll_flash.evaluate.result import EvalResult, score
from roll_flash.monitor.episodes import Outcome, episode_record, transcript
from roll_flash.monitor.json_lines import JsonLinesFile, encode, read_lines
from roll_flash.types import EpisodeSpec, SamplingParams, Task

EPISODES_FILE = "episodes.jsonl"
RESULTS_FILE = "results.json"
PLAN_FILE = "plan.json"


class EpisodeRunner(Protocol):
    """Whatever can run episodes. Yields each outcome once, as it comes; a failed episode is data and never raises."""

    def run(self, episodes: Sequence[EpisodeSpec], *, max_concurrent: int) -> AsyncIterator[Outcome]: ...


async def evaluate(
    runner: EpisodeRunner | None,
    *,
    env: EnvConfig,
    eval: EvalConfig,
    sampling: SamplingParams,
    max_concurrent: int,
    folder: Path | None,
    label: str,
    about: Mapping[str, Any] | None = None,
) -> EvalResult:
    """Run what `folder` does not hold yet and score all of it.

    `sampling` is used as given, with a seed of its own for each attempt when it has one. `about` (the model, the
    endpoint, ...) is saved with the results. Each finished episode is on disk before the next is awaited, so that
    Ctrl-C or `kill -9` loses only what was in flight. Without a runner only what the folder holds is scored.
    Raises ConfigError when the folder holds another evaluation.
    """
    started = time.monotonic()
    plan = evaluation_plan(env, eval, sampling, about or {})
    specs = build_episodes(env, eval, sampling, label)
    journal = Journal(folder, plan)
    try:
        waiting = journal.unscored(specs)
        if waiting and runner is not None:
            await _collect(runner.run(waiting, max_concurrent=max_concurrent), journal)
    finally:
        journal.close()
    by_id = journal.records
    records = [by_id[spec.episode_id] for spec in specs if spec.episode_id in by_id]
    result = score(records, label=label, tasks=eval.tasks, attempts=eval.attempts, seconds=time.monotonic() - started)
    journal.save_result(result, about or {})
    return result


async def _collect(outcomes: AsyncIterator[Outcome], journal: Journal) -> None:
    try:
        async for outcome in outcomes:
            journal.add(outcome)
    finally:
        close = getattr(outcomes, "aclose", None)
        if close is not None:
            await close()


def eval_sampling(config: Config) -> SamplingParams:
    """How evaluations sample: as training does, at the temperature of `eval`, and repeatable where servers allow it."""
    return SamplingParams(
        temperature=config.eval.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        stop=config.rollout.stop,
        seed=config.seed,
    )


def is_complete(
    folder: Path, env: EnvConfig, eval: EvalConfig, sampling: SamplingParams, label: str, about: Mapping[str, Any]
) -> bool:
    """Whether `evaluate` with these arguments has nothing left to run. Raises ConfigError as `evaluate` does."""
    journal = Journal(folder, evaluation_plan(env, eval, sampling, about))
    try:
        return not journal.unscored(build_episodes(env, eval, sampling, label))
    finally:
        journal.close()


def build_episodes(env: EnvConfig, eval: EvalConfig, sampling: SamplingParams, label: str) -> list[EpisodeSpec]:
    """All attempts, first attempts first. Ids depend on nothing but label, seed and attempt."""
    name = re.sub(r"[^A-Za-z0-9._@-]+", "-", label)
    specs = []
    for attempt in range(eval.attempts):
        for index in range(eval.tasks):
            seed = eval.seeds_from + index
            task = Task(f"{env.id}:{seed}", env.id, seed, env.kwargs)
            specs.append(
                EpisodeSpec(
                    episode_id=f"{name}:{seed}:{attempt}",
                    group_id=f"{name}:{seed}",
                    replica=attempt,
                    task=task,
                    sampling=_own_seed(sampling, index * eval.attempts + attempt),
                    max_turns=env.max_turns,
                )
            )
    return specs


def _own_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number)


def evaluation_plan(
    env: EnvConfig, eval: EvalConfig, sampling: SamplingParams, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What must agree for two evaluations to share a folder; more tasks or attempts may be added to one."""
    return {
        "env_id": env.id,
        "env_kwargs": env.kwargs,
        "max_turns": env.max_turns,
        "seeds_from": eval.seeds_from,
        "sampling": asdict(sampling),
        "about": dict(about),
    }


class Journal:
    """The episodes of one evaluation by id, in memory and (with a folder) on disk. The last record of an id counts."""

    def __init__(self, folder: Path | None, plan: Mapping[str, Any]) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._file: JsonLinesFile | None = None
        if folder is not None:
            self._open(folder, plan)

    def _open(self, folder: Path, plan: Mapping[str, Any]) -> None:
        (folder / "transcripts").mkdir(parents=True, exist_ok=True)
        _check_plan(folder / PLAN_FILE, json.loads(encode(plan)[0]))
        try:
            for record in read_lines(folder / EPISODES_FILE):
                self.records[record["episode_id"]] = record
        except ValueError as error:
            raise ConfigError(f"{error}; or evaluate into another folder") from None
        except KeyError as error:
            raise ConfigError(f"{folder / EPISODES_FILE}: a record has no {error}; choose another folder") from None
        self._file = JsonLinesFile(folder / EPISODES_FILE)

    def unscored(self, specs: Sequence[EpisodeSpec]) -> list[EpisodeSpec]:
        """What is still to be run: attempts without a record, and those that failed."""
        done = {name for name, record in self.records.items() if record["kind"] == "trajectory"}
        return [spec for spec in specs if spec.episode_id not in done]

    def add(self, outcome: Outcome) -> None:
        record = episode_record(outcome)
        self.records[outcome.episode_id] = record
        if self._file is not None and self._folder is not None:
            self._file.write(record)
            name = f"seed_{outcome.task.seed}_attempt_{outcome.episode_id.rsplit(':', 1)[-1]}.md"
            (self._folder / "transcripts" / name).write_text(transcript(record), encoding="utf-8", errors="replace")

    def save_result(self, result: EvalResult, about: Mapping[str, Any]) -> None:
        if self._folder is not None:
            text = json.dumps({**result.to_dict(), "about": dict(about)}, indent=2, default=str)
            partial = self._folder / f"{RESULTS_FILE}.new"
            partial.write_text(text + "\n")
            partial.replace(self._folder / RESULTS_FILE)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _check_plan(path: Path, plan: dict[str, Any]) -> None:
    saved = _read_plan(path)
    if saved is None:
        path.write_text(json.dumps(plan, indent=2) + "\n")
        return
    for key, value in plan.items():
        if saved.get(key) != value:
            raise ConfigError(
                f"{path.parent}: holds an evaluation with {key} {saved.get(key)}, not {value}; choose another folder"
            )


def _read_plan(path: Path) -> dict[str, Any] | None:
    try:
        return cast(dict[str, Any], json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: not readable ({error}); remove the folder or choose another") from None
