"""One pass over all rows of a data set: which are trained on and which are held out, decided by their content."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roll_flash.config.sections.data import DataConfig
from roll_flash.config.tree import DATASET_ENV, EnvConfig, ModelConfig
from roll_flash.envs.datasets.columns import (
    AnswerCheck,
    UsedColumns,
    environment_of,
    prompt_of,
    task_arguments,
    used_columns,
)
from roll_flash.envs.datasets.formats import is_python, open_rows
from roll_flash.envs.datasets.prompt_lengths import too_long
from roll_flash.envs.datasets.rows import Hashes, Place, Rows, digest_of, hashes_of
from roll_flash.envs.datasets.trial import try_rewards
from roll_flash.errors import ConfigError
from roll_flash.terminal import say
from roll_flash.types import Message

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Which rows are trained and which are held out, by number."""

    rows: Rows
    held_out_rows: Rows
    """The same as `rows`, unless the config names others."""
    train: Numbers
    held_out: Numbers
    prompt_bytes: Numbers
    """Of each row of `rows`, without the system message."""
    examples: tuple[int, ...]
    """One of `rows` of each environment, and of each choice of rewards and tools."""

    @property
    def digest(self) -> str:
        """Of the training rows, in order."""
        return blake2b(self.rows.checksums[self.train].tobytes(), digest_size=8).hexdigest()


@lru_cache(maxsize=8)  # a run opens its task source several times
def split_rows(env_json: str, stamps: object) -> Split:
    """Read all rows, check them and choose the held-out ones. `stamps`: of the files, to read them again when they
    change. Raises ConfigError, with the line, for the first row that is no task."""
    env = EnvConfig.model_validate_json(env_json)
    assert env.data is not None
    data, answers, used = env.data, AnswerCheck(env), used_columns(env)
    rows = open_rows(data, data.path, data.split, used)
    read = _Read.of(env, rows, answers)
    _require_own_columns(data, rows)
    held_out_rows = _open_held_out(data, used)
    if held_out_rows is None:
        is_held_out = _held_out_by_content(read.prompts, data.held_out_share)
        held_out = np.flatnonzero(is_held_out & ~read.is_long)
    else:
        others = _Read.of(env, held_out_rows, answers)
        is_held_out = np.isin(read.prompts, others.prompts)
        held_out = np.flatnonzero(~others.is_long)
        _note(int(is_held_out.sum()), data, "are held out too and are not trained on")
    _note(int(read.is_long.sum()), data, f"have more than {data.max_prompt_characters} characters")
    train = np.flatnonzero(~is_held_out & ~read.is_long)
    if not train.size:
        raise ConfigError(
            f"data {data.path}: no row is left to train on: all are held out too, or have no room; give other rows, or "
            "another data.held_out"
        )
    examples = tuple(read.examples.values())
    for index in examples:
        if environment_of(env, rows[index], rows.place(index)) == DATASET_ENV:
            try_rewards(task_arguments(env, rows[index], rows.place(index)), rows.place(index))
    return Split(rows, held_out_rows or rows, train, held_out, read.prompt_bytes, examples)


@lru_cache(maxsize=8)
def trained_rows(env_json: str, stamps: object, model_json: str) -> Numbers:
    """Return the training rows whose prompt fits into `model.max_length`. Raises ConfigError if none does."""
    env, model = EnvConfig.model_validate_json(env_json), ModelConfig.model_validate_json(model_json)
    assert env.data is not None
    split = split_rows(env_json, stamps)

    def messages_of(index: int) -> Sequence[Message]:
        found: Sequence[Message] = task_arguments(env, split.rows[index], split.rows.place(index))["messages"]
        return found

    if split.prompt_bytes[split.train].max(initial=0) == 0:  # rows of other environments
        return split.train
    longest_first = split.train[np.argsort(-split.prompt_bytes[split.train], kind="stable")]
    is_long = np.zeros(len(split.rows), np.bool_)
    is_long[too_long(model, env.data, split.prompt_bytes, longest_first, messages_of)] = True
    kept = split.train[~is_long[split.train]]
    _note(
        len(split.train) - len(kept),
        env.data,
        f"have prompts that leave no room in model.max_length={model.max_length} tokens and are not trained on",
    )
    if not len(kept):
        raise ConfigError(
            f"data {env.data.path}: no prompt leaves room for an answer in model.max_length={model.max_length} tokens; "
            "raise it"
        )
    return kept


@dataclass(slots=True, eq=False)
class _Read:
    """What one pass over the rows gives."""

    prompts: Hashes
    """Hash of each row's prompt."""
    prompt_bytes: Numbers
    is_long: Flags
    examples: dict[object, int]

    @classmethod
    def of(cls, env: EnvConfig, rows: Rows, answers: AnswerCheck) -> _Read:
        assert env.data is not None
        data, count = env.data, len(rows)
        digests, sizes = bytearray(), array("q")
        ids, is_long, has_id = np.empty(count, np.int64), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        id_column = data.columns.get("id", "id")
        examples: dict[object, int] = {}
        limit, are_alike = data.max_prompt_characters, not (data.environment_column or data.kwargs_column)
        place = Place(rows)
        for index, row in enumerate(rows):
            place.index = index
            prompt = prompt_of(env, row, place)
            answers.check(row, place)
            asked = prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)
            digests += digest_of(asked)
            sizes.append(len(asked))
            if limit is not None:
                is_long[index] = _characters(prompt) > limit
            if id_column in row:
                ids[index], has_id[index] = hash(str(row[id_column])), True
            if not are_alike:
                sizes[index] *= environment_of(env, row, place) == DATASET_ENV
                examples.setdefault(_kind(env, row), index)
        if are_alike:
            examples[env.id] = 0
        prompt_bytes = np.array(sizes, np.int64) * (not are_alike or env.id == DATASET_ENV)
        _require_different_ids(rows, np.flatnonzero(has_id), ids, id_column)
        return cls(hashes_of(digests), prompt_bytes, is_long, examples)


def _kind(env: EnvConfig, row: dict[str, Any]) -> object:
    """Return what the checks of a run depend on: environment and, for Dataset-v0, rewards and tools."""
    assert env.data is not None
    named, options = env.data.environment_column, env.data.kwargs_column
    chosen = env.id if named is None else row.get(named) or env.id
    own = None if options is None else row.get(options)
    if chosen != DATASET_ENV or not isinstance(own, dict):
        return chosen
    return chosen, repr(own.get("reward")), repr(own.get("tools"))


def _characters(prompt: str | Sequence[Message]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(value) for message in prompt for name, value in message.items() if _is_said(name, value))


def _is_said(name: str, value: object) -> bool:
    return name != "role" and isinstance(value, str)


def _require_own_columns(data: DataConfig, rows: Rows) -> None:
    """Raises ConfigError for a column that a row may lack, if all do: its name is then misspelt."""
    for key in ("environment_column", "kwargs_column"):
        column = getattr(data, key)
        if column is not None and not any(column in row for row in rows):
            names = ", ".join(map(repr, rows[0]))
            raise ConfigError(
                f"data {data.path}: no row has a column {column!r}, which data.{key} names; the first has {names}"
            )


def _open_held_out(data: DataConfig, used: UsedColumns) -> Rows | None:
    if data.held_out is None:
        return None
    if Path(data.held_out).suffix or is_python(data.held_out):
        return open_rows(data, data.held_out, data.split, used)
    return open_rows(data, data.path, data.held_out, used)


def _require_different_ids(rows: Rows, named: Any, ids: Any, column: str) -> None:
    in_order = named[np.argsort(ids[named], kind="stable")]
    same = np.flatnonzero(ids[in_order[1:]] == ids[in_order[:-1]])
    if same.size:
        first, second = int(in_order[same[0]]), int(in_order[same[0] + 1])
        name = rows[second][column]
        raise ConfigError(
            f"{rows.place(second)}: {column} {name!r} is also that of {rows.place(first)}; each row needs its own; "
            "data.columns.id names another column"
        )


def _held_out_by_content(hashes: Hashes, share: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Choose the prompts with the smallest hashes: about `share` of them, at least one if there are two."""
    ordered = np.sort(hashes)  # `np.unique` takes ten times as long
    distinct = ordered[np.append(True, ordered[1:] != ordered[:-1])]
    if len(distinct) < 2:
        return np.zeros(len(hashes), np.bool_)
    count = min(len(distinct) - 1, max(1, round(share * len(distinct))))
    chosen: np.ndarray[Any, np.dtype[np.bool_]] = hashes <= distinct[count - 1]
    return chosen


def _note(count: int, data: DataConfig, what: str) -> None:
    if count:
        say(f"data {data.path}: {count:,} rows {what}", error=True)
