"""A task source that a user wrote: its mistakes end the run with one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from roll_flash.errors import RollFlashError, RunError
from roll_flash.scheduling.tasks import TaskSource
from roll_flash.types import Task

T = TypeVar("T")


class UsersSource(TaskSource):
    """Calls `source`. Raises RunError if it raises, gives no task, or gives what no checkpoint can hold."""

    def __init__(self, source: TaskSource, name: str) -> None:
        self._source = source
        self._name = name

    def next(self) -> Task:
        return self._checked(self._call("next", self._source.next))

    def held_out(self, count: int) -> Sequence[Task]:
        return [self._checked(task) for task in self._call("held_out", lambda: list(self._source.held_out(count)))]

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
        self._require_json(state, "its state")
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
        self._require_json(dict(task.kwargs), f"the kwargs of task {task.task_id}")
        return task

    def _require_json(self, value: Any, what: str) -> None:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RunError(f"task source {self._name}: no checkpoint can hold {what}: {error}") from None
