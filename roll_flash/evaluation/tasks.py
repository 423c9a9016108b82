"""Tasks of an evaluation: the held-out tasks of an environment's task source."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import EnvConfig
from roll_flash.envs.task_sources import open_source
from roll_flash.errors import ConfigError
from roll_flash.scheduling.tasks import TaskSource
from roll_flash.types import EpisodeSpec, SamplingParams, Task

MAX_SLUG = 200
"""Characters of a task's name in those of files, which may have 255: a row of a data set may have any text as id."""


def held_out_tasks(env: EnvConfig, eval: EvalConfig) -> Sequence[Task]:
    """Return the first `eval.tasks` held-out tasks. Raises ConfigError if there is none."""
    return held_out_of(open_source(env, eval.seeds_from), env, eval)


def held_out_of(source: TaskSource, env: EnvConfig, eval: EvalConfig) -> Sequence[Task]:
    """As `held_out_tasks`, from the `source` of `env`."""
    if not (tasks := source.held_out(eval.tasks)):
        without = "or train without evaluation (eval.before_and_after=false, eval.every=0)"
        if env.data is not None:
            raise ConfigError(
                f"envs: data {env.data.path}: no row can be held out, because all have one prompt or are too long; add "
                f"others, {without}"
            )
        raise ConfigError(f"envs: the task source of {env.id} has no held-out tasks; give it some, {without}")
    return tasks


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
                    sampling=sampling.with_own_seed(index).with_own_seed(attempt),
                    max_turns=task.max_turns or env.max_turns,
                )
            )
    return specs


def _distinct_slug(task: str) -> str:
    """Slug that keeps different names different: if characters are replaced (`a/b` and `a-b`) or left out, a hash is
    added."""
    slug = _slug(task)[:MAX_SLUG]
    return slug if slug == task else f"{slug}-{hashlib.sha256(task.encode()).hexdigest()[:8]}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._@-]+", "-", text)
