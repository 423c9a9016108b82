"""The task source of a data set: each row is a task; which rows are held out is decided by their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_flash.config.tree import EnvConfig, ModelConfig
from roll_flash.envs.datasets.columns import environment_of, task_arguments
from roll_flash.envs.datasets.formats import is_python
from roll_flash.envs.datasets.rows import Rows
from roll_flash.envs.datasets.splits import split_rows, trained_rows
from roll_flash.scheduling.tasks import ShuffledTasks
from roll_flash.types import Task


class DatasetTasks(ShuffledTasks):
    """Training rows in an order shuffled by the run's seed, and held-out rows in the order of the file.

    Of the rows, only their places and hashes are in memory. Rows with equal prompts are on one side: training rows
    whose prompt is also held out are left out, and counted; so are training rows whose prompt does not fit into the
    model. Held-out rows do not depend on the model, so that models can be compared.
    """

    def __init__(self, env: EnvConfig, model: ModelConfig | None = None) -> None:
        """Read all rows once per process. `model`: what prompts must fit into. Raises ConfigError, with the line, for
        the first row that is no task."""
        assert env.data is not None
        self._env, self._data = env, env.data
        functions = [reward.function for reward in env.reward]  # they are tried when the rows are read
        stamps = tuple(_stamp(path) for path in (self._data.path, self._data.held_out, *functions))
        self._split = split = split_rows(env.model_dump_json(), stamps)
        if model is not None:
            trained = trained_rows(env.model_dump_json(), stamps, model.model_dump_json())
            self._split = replace(split, train=trained)
        self.without_room = len(split.train) - len(self._split.train)
        """Training rows that are left out because their prompt does not fit into the model."""
        super().__init__(len(self._split.train))

    def shuffle(self, seed: int) -> None:
        super().shuffle(seed)
        if not self._data.shuffle:
            self._offset, self._stride = 0, 1

    def next(self) -> Task:
        if self._data.epochs is not None and self.cursor >= self._data.epochs * len(self._split.train):
            raise StopIteration
        return super().next()

    def task(self, index: int) -> Task:
        return self._task_of(self._split.rows, int(self._split.train[index]), "")

    def held_out(self, count: int) -> Sequence[Task]:
        return [self.held_out_task(index) for index in range(min(count, self.held_out_size))]

    @property
    def held_out_size(self) -> int:
        return len(self._split.held_out)

    def held_out_task(self, index: int) -> Task:
        rows = self._split.held_out_rows
        return self._task_of(rows, int(self._split.held_out[index]), "" if rows is self._split.rows else "held_out/")

    def examples(self) -> Sequence[Task]:
        if len(self._split.examples) == 1:
            return super().examples()
        return [self._task_of(self._split.rows, index, "") for index in self._split.examples]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rows": self._split.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["rows"] != self._split.digest:
            raise ValueError(
                f"the training rows of {self._data.path} are not those of the checkpoint: a row, a key of data or "
                "model.max_length has changed"
            )
        super().restore(state)

    def _task_of(self, rows: Rows, number: int, side: str) -> Task:
        row, place, data = rows[number], rows.place(number), self._data
        name = row.get(data.columns.get("id", "id"), number)
        arguments, env_id = task_arguments(self._env, row, place), environment_of(self._env, row, place)
        level = f"{env_id}[{data.label}]"
        return Task(f"{data.label}/{side}{name}", env_id, number, arguments, self._env.max_turns, level=level)


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    """Return what changes with a file's content; None for what is no file."""
    text = path or ""
    file = Path(text.rpartition(":")[0] if is_python(text) else text).expanduser()
    if not file.is_file():
        return None
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
