"""Tasks of an evaluation: held-out seeds of an environment, or its task folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from roll_flash.config.tree import EnvConfig, EvalConfig
from roll_flash.types import EpisodeSpec, SamplingParams, Task

TASK_FOLDER_ENV = "TaskFolder-v0"


def held_out_tasks(env: EnvConfig, eval: EvalConfig) -> list[Task]:
    """One task per held-out seed, or per task folder (the first `eval.tasks`)."""
    if env.id == TASK_FOLDER_ENV and "folder" in env.kwargs:
        return folder_tasks(env)[: eval.tasks]
    seeds = range(eval.seeds_from, eval.seeds_from + eval.tasks)
    return [Task(f"{env.id}:{seed}", env.id, seed, env.kwargs) for seed in seeds]


def folder_tasks(env: EnvConfig) -> list[Task]:
    """One task per task folder below `env.kwargs["folder"]`, named by its relative path.

    Raises ConfigError if there is none.
    """
    from roll_flash.envs.adapters.task_folders.format import find_tasks

    root = Path(env.kwargs["folder"]).expanduser()
    found = find_tasks(root)
    names = [str(path.relative_to(root)) if path != root else path.resolve().name for path in found]
    return [
        Task(f"{env.id}:{name}", env.id, 0, {**env.kwargs, "folder": str(path)})
        for name, path in zip(names, found, strict=True)
    ]


def build_episodes(
    tasks: Sequence[Task], env: EnvConfig, eval: EvalConfig, sampling: SamplingParams, label: str
) -> list[EpisodeSpec]:
    """All attempts, first attempts first. Ids depend only on label, task and attempt."""
    run, specs = _slug(label), []
    for attempt in range(eval.attempts):
        for index, task in enumerate(tasks):
            group = f"{run}:{_distinct_slug(task.task_id.removeprefix(f'{env.id}:'))}"
            specs.append(
                EpisodeSpec(
                    episode_id=f"{group}:{attempt}",
                    group_id=group,
                    replica=attempt,
                    task=task,
                    sampling=_own_seed(sampling, index * eval.attempts + attempt),
                    max_turns=env.max_turns,
                )
            )
    return specs


def _distinct_slug(task: str) -> str:
    """Slug that keeps different names different: if characters are replaced (`a/b` and `a-b`), a hash is added."""
    slug = _slug(task)
    return slug if slug == task else f"{slug}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@-]+", "-", text)


def _own_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number)
