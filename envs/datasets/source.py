"""The task source of a data set: each row is a task; which rows are held out is decided by their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roll_flash.config.data import DataConfig
from roll_flash.config.tree import DATASET_ENV, EnvConfig
from roll_flash.envs.datasets.columns import prompt_of, task_arguments
from roll_flash.envs.datasets.rewards import try_rewards
from roll_flash.envs.datasets.rows import Rows, open_rows
from roll_flash.errors import ConfigError
from roll_flash.scheduling.tasks import ShuffledTasks
from roll_flash.terminal import say
from roll_flash.types import Task

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Which rows are trained and which are held out, by number."""

    rows: Rows
    held_out_rows: Rows
    """The same as `rows`, unless the config names others."""
    train: np.ndarray[Any, np.dtype[np.int64]]
    held_out: np.ndarray[Any, np.dtype[np.int64]]
    digest: str
    """Of the training prompts, in order."""


class DatasetTasks(ShuffledTasks):
    """Training rows in an order shuffled by the run's seed, and held-out rows in the order of the file.

    Of the rows, only their places and hashes are in memory. Rows with equal prompts are on one side: training rows
    whose prompt is also held out are left out, and counted.
    """

    def __init__(self, env: EnvConfig) -> None:
        """Read all rows once per process. Raises ConfigError, with the line, for the first that is no task."""
        assert env.data is not None
        self._env, self._data = env, env.data
        self._name = Path(self._data.path).stem
        paths = (self._data.path, self._data.held_out)
        self._split = _split(env.model_dump_json(), tuple(_stamp(path) for path in paths))
        super().__init__(len(self._split.train))
        if env.id == DATASET_ENV:
            try_rewards(env.reward, self.task(0).kwargs)

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
        rows = self._split.held_out_rows
        side = "" if rows is self._split.rows else "held_out/"
        return [self._task_of(rows, int(index), side) for index in self._split.held_out[:count]]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rows": self._split.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["rows"] != self._split.digest:
            raise ValueError(f"the training rows of {self._data.path} are not those of the checkpoint")
        super().restore(state)

    def _task_of(self, rows: Rows, number: int, side: str) -> Task:
        row = rows[number]
        name = row.get(self._data.columns.get("id", "id"), number)
        arguments = task_arguments(self._env, row, rows.place(number))
        level = f"{self._env.id}[{self._name}]"
        return Task(f"{self._name}/{side}{name}", self._env.id, number, arguments, self._env.max_turns, level=level)


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    """Return what changes with a file's content; None for what is no file."""
    file = Path(path or "").expanduser()
    if not file.is_file():
        return None
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=8)  # a run opens its task source several times
def _split(env_json: str, stamps: object) -> _Split:
    """Read all rows and choose the held-out ones. `stamps`: of the files, to read them again when they change."""
    env = EnvConfig.model_validate_json(env_json)
    assert env.data is not None
    data, rows = env.data, open_rows(env.data.path, subset=env.data.subset, split=env.data.split)
    hashes, is_long = _read(env, rows)
    held_out_rows = _open_held_out(data)
    if held_out_rows is None:
        is_held_out = _held_out_by_content(hashes, data.held_out_share)
        held_out = np.flatnonzero(is_held_out & ~is_long)
    else:
        others, others_long = _read(env, held_out_rows)
        is_held_out = np.isin(hashes, others)
        held_out = np.flatnonzero(~others_long)
        _note(int(is_held_out.sum()), data, "are held out too and are not trained on")
    _note(int(is_long.sum()), data, f"have more than {data.max_prompt_characters} characters")
    train = np.flatnonzero(~is_held_out & ~is_long)
    if not train.size:
        raise ConfigError(f"data {data.path}: no row is left to train on")
    digest = blake2b(hashes[train].tobytes(), digest_size=8).hexdigest()
    return _Split(rows, held_out_rows or rows, train, held_out, digest)


def _open_held_out(data: DataConfig) -> Rows | None:
    if data.held_out is None:
        return None
    if Path(data.held_out).suffix:
        return open_rows(data.held_out)
    return open_rows(data.path, subset=data.subset, split=data.held_out)


def _read(env: EnvConfig, rows: Rows) -> tuple[Hashes, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Check all rows; return the hash of each row's prompt, and whether the prompt is too long."""
    assert env.data is not None
    data = env.data
    hashes, ids = np.empty(len(rows), np.uint64), np.empty(len(rows), np.int64)
    is_long, has_id = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
    id_column = data.columns.get("id", "id")
    for index, row in enumerate(rows):
        prompt = prompt_of(env, row, rows.place(index))
        text = prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)
        hashes[index] = int.from_bytes(blake2b(text, digest_size=8).digest())
        is_long[index] = data.max_prompt_characters is not None and len(text) > data.max_prompt_characters
        if id_column in row:
            ids[index], has_id[index] = hash(str(row[id_column])), True
    _require_different_ids(rows, np.flatnonzero(has_id), ids, id_column)
    return hashes, is_long


def _require_different_ids(rows: Rows, named: Any, ids: Any, column: str) -> None:
    in_order = named[np.argsort(ids[named], kind="stable")]
    same = np.flatnonzero(ids[in_order[1:]] == ids[in_order[:-1]])
    if same.size:
        first, second = int(in_order[same[0]]), int(in_order[same[0] + 1])
        name = rows[second][column]
        raise ConfigError(
            f"{rows.place(second)}: {column} {name!r} is also that of {rows.place(first)}; each row needs its own"
        )


def _held_out_by_content(hashes: Hashes, share: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Choose the prompts with the smallest hashes: about `share` of them, at least one if there are two."""
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        return np.zeros(len(hashes), np.bool_)
    count = min(len(distinct) - 1, max(1, round(share * len(distinct))))
    chosen: np.ndarray[Any, np.dtype[np.bool_]] = hashes <= distinct[count - 1]
    return chosen


def _note(count: int, data: DataConfig, what: str) -> None:
    if count:
        say(f"data {data.path}: {count:,} rows {what}", error=True)
