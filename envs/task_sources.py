"""The task sources of a config: an entry of `envs` gives seeds or rows, levels a curriculum, entries a mixture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypeVar

from roll_flash.config.fields import require_json
from roll_flash.config.tree import Config, EnvConfig, ModelConfig
from roll_flash.config.user_code import load_object
from roll_flash.errors import ConfigError, DataError, RollFlashError, RunError, TaskError, first_line
from roll_flash.scheduling.tasks import CurriculumTasks, MixedTasks, SeedTasks, TaskSource
from roll_flash.types import Task

T = TypeVar("T")

OWN_SOURCES = {"TaskFolder-v0": "roll_flash.envs.adapters.task_folders.source:FolderTasks"}
"""Environments whose tasks are not seeds, and their task sources."""
NAMED_SOURCES = {"fork_points": "roll_flash.replay.fork_points:ForkPoints"}
"""Task sources that `task_source.entry_point` gives by name."""
ROWS_SOURCE = "roll_flash.envs.datasets.source:DatasetTasks"
_KINDS: dict[str, type] = {"task_id": str, "env_id": str, "seed": Integral, "level": str, "kwargs": Mapping}
"""Types of what a task of a user has."""


@dataclass(frozen=True, slots=True)
class EntryTasks:
    """The task sources of one entry of `envs`. Each is made once, because a user's own may take minutes."""

    env: EnvConfig
    levels: Sequence[TaskSource]
    """One for each of `env.variants`."""
    source: TaskSource
    """What training draws from, and whose held-out tasks are evaluated: the only level, or a curriculum."""


def open_entries(config: Config) -> list[EntryTasks]:
    """Return the task sources of each entry of `envs`, not shuffled yet. Raises ConfigError."""
    return [_open_entry(env, config.eval.seeds_from, config.model) for env in config.envs]


def open_tasks(config: Config) -> TaskSource:
    """Return the task source of a run, in the order of its seed. Raises ConfigError."""
    sources = [entry.source for entry in open_entries(config)]
    source = sources[0] if len(sources) == 1 else MixedTasks(sources, [env.weight for env in config.envs])
    source.shuffle(config.seed)
    return source


def open_source(env: EnvConfig, held_out_from: int) -> TaskSource:
    """Return the tasks of one entry of `envs`, for its held-out ones. `held_out_from`: the first held-out seed. Raises
    ConfigError."""
    return _open_entry(env, held_out_from, None).source


def first_tasks(config: Config) -> list[Task]:
    """Return the first training task of each level of each environment, and one of each kind of rows. Raises
    ConfigError."""
    return [tasks[0] for tasks in first_tasks_of_levels(open_entries(config), config.seed, 1)]


def first_tasks_of_levels(entries: Sequence[EntryTasks], seed: int, count: int) -> list[list[Task]]:
    """Return up to `count` training tasks, at least one, of each level of each environment; of a level with several
    kinds of rows one of each kind, apart. Raises ConfigError."""
    found: list[list[Task]] = []
    for entry in entries:
        for source in entry.levels:
            source.shuffle(seed)
            try:
                kinds = source.examples()
            except StopIteration:
                raise ConfigError(f"envs: the task source of {entry.env.id} has no training task") from None
            more = _next_tasks(source, count - 1) if len(kinds) == 1 else []
            found.extend([kind, *more] for kind in kinds)
    return found


def _next_tasks(source: TaskSource, count: int) -> list[Task]:
    found: list[Task] = []
    try:
        while len(found) < count:
            found.append(source.next())
    except StopIteration:
        return found
    return found


def _open_entry(env: EnvConfig, held_out_from: int, model: ModelConfig | None) -> EntryTasks:
    """`model`: the one that trains, into which the prompts of rows must fit."""
    levels = [_open_level(env, kwargs, held_out_from, model) for kwargs in env.variants]
    if not env.levels:
        return EntryTasks(env, levels, levels[0])
    evaluated = _open_level(env, env.kwargs, held_out_from, model)
    return EntryTasks(env, levels, CurriculumTasks(levels, evaluated=evaluated))


def _open_level(env: EnvConfig, kwargs: Mapping[str, Any], held_out_from: int, model: ModelConfig | None) -> TaskSource:
    if env.task_source is not None:
        entry_point = env.task_source.entry_point
        if (named := NAMED_SOURCES.get(entry_point)) is not None:
            return _call(named, _at_level(env, kwargs), {**env.task_source.kwargs, "held_out_from": held_out_from})
        source = _call(entry_point, _at_level(env, kwargs), env.task_source.kwargs)
        return UsersSource(source, entry_point, env.max_turns)
    if env.data is not None:
        return _call(ROWS_SOURCE, _at_level(env, kwargs), {"model": model})
    if env.id in OWN_SOURCES:
        return _call(OWN_SOURCES[env.id], _at_level(env, kwargs), {})
    return SeedTasks(env.id, kwargs, env.train_seeds, max_turns=env.max_turns, held_out_from=held_out_from)


def _at_level(env: EnvConfig, kwargs: Mapping[str, Any]) -> EnvConfig:
    return env.model_copy(update={"kwargs": dict(kwargs), "levels": ()})


def _call(entry_point: str, env: EnvConfig, kwargs: Mapping[str, Any]) -> TaskSource:
    try:
        source = load_object(entry_point)(env, **kwargs)
    except RollFlashError as error:
        kind = DataError if env.data else TaskError
        raise kind(f"envs: {'' if env.data else 'task_source: '}{error}") from None
    except Exception as error:  # user code may raise anything
        what = f"data {env.data.path}" if env.data else f"task_source: {entry_point}"
        raise ConfigError(f"envs: {what} raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(source, TaskSource):
        raise ConfigError(
            f"envs: task_source: {entry_point} gave a {type(source).__name__}, not a roll_flash.TaskSource"
        )
    return source


class UsersSource(TaskSource):
    """A task source that a user wrote: its mistakes end the run with one line that names it.

    Calls `source`. Raises RunError if it raises, gives no task, or gives what no checkpoint can hold. `max_turns`: of
    its entry of `envs`, for tasks that say nothing of their turns.
    """

    def __init__(self, source: TaskSource, name: str, max_turns: int | None = None) -> None:
        self._source = source
        self._name = name
        self._max_turns = max_turns

    def next(self) -> Task:
        return self._checked(self._call("next", self._source.next))

    def held_out(self, count: int) -> Sequence[Task]:
        tasks = [self._checked(task) for task in self._call("held_out", lambda: list(self._source.held_out(count)))]
        name, uses = next(iter(Counter(task.task_id for task in tasks).most_common(1)), ("", 1))
        if uses > 1:
            raise RunError(
                f"task source {self._name}: {uses} held-out tasks have the task_id {name!r}; each has its own"
            )
        return tasks

    def shuffle(self, seed: int) -> None:
        self._call("shuffle", lambda: self._source.shuffle(seed))

    @property
    def size(self) -> int | None:
        return self._call("size", lambda: self._source.size)

    def report(self, task: Task, score: float) -> None:
        self._call("report", lambda: self._source.report(task, score))

    def metrics(self) -> dict[str, float]:
        return self._call("metrics", self._source.metrics)

    def state(self) -> dict[str, Any]:
        state = self._call("state", self._source.state)
        self._require(json.dumps, state, "its state")
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, as for every source whose state is another one's."""
        try:
            self._source.restore(state)
        except Exception as error:  # user code may raise anything
            raise ValueError(f"task source {self._name}: restore raised {type(error).__name__}: {error}") from error

    def _call(self, name: str, method: Callable[[], T]) -> T:
        try:
            return method()
        except (StopIteration, RollFlashError):
            raise
        except Exception as error:  # user code may raise anything
            raise RunError(f"task source {self._name}: {name} raised {type(error).__name__}: {error}") from error

    def _checked(self, task: Any) -> Task:
        if not isinstance(task, Task):
            raise RunError(f"task source {self._name}: gave a {type(task).__name__}, not a roll_flash.Task")
        for name, kind in _KINDS.items():
            if not isinstance(value := getattr(task, name), kind):
                raise RunError(f"task source {self._name}: a task's {name} is {value!r:.60}, no {kind.__name__}")
        self._require(require_json, dict(task.kwargs), f"the kwargs of task {task.task_id}")
        # A seed may be NumPy's, which neither `random` nor gymnasium takes.
        return replace(task, seed=int(task.seed), max_turns=task.max_turns or self._max_turns)

    def _require(self, check: Callable[[Any], object], value: Any, what: str) -> None:
        try:
            check(value)
        except (TypeError, ValueError) as error:
            raise RunError(f"task source {self._name}: no checkpoint can hold {what}: {error}") from None
