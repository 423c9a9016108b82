"""`roll-flash envs check CONFIG.yaml`: tests if the rows of a data set are fit to train on.

It finds what trains badly and raises no error: rows that repeat or contradict each other, rows that are trained on and
held out too but for their spelling, prompts that leave no room for an answer, answers that their own reward rejects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from roll_flash.config.tree import DATASET_ENV, EnvConfig, ModelConfig
from roll_flash.envs.check.checks import TOLERANCE, EnvCheck, EnvReport
from roll_flash.envs.datasets.env import DatasetEnv
from roll_flash.envs.datasets.rewards import READY
from roll_flash.envs.datasets.rows import Hashes, digest_of
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.envs.datasets.splits import Numbers
from roll_flash.errors import EnvError, first_line
from roll_flash.types import Message, Task

SCORED_ROWS = 400
"""Rows whose answer is scored, evenly taken from all."""
LONGEST_ROWS = 200
"""Rows with the longest prompts, of which tokens are counted."""
NEEDS_NO_ANSWER = ("regex", "json_schema", "python_tests")
"""Rewards whose row holds a pattern, a schema or tests: no answer that could be scored."""

_BETWEEN_WORDS = re.compile(r"""[\s_.,:;!?"'()…“”‘’。，？！、]+""")
"""Blanks and punctuation. Other signs tell tasks apart: `3 + 4` and `3 - 4`, or boards drawn with `#` and `@`."""

CountTokens = Callable[[Sequence[Message]], int]
"""Tokens of a prompt with the chat template of the model."""


@dataclass(frozen=True, slots=True)
class Room:
    """What limits a prompt: an episode has `max_length` tokens, of which the first turn may take `answer`."""

    count: CountTokens
    max_length: int
    answer: int


def check_data_set(env: EnvConfig, room: Room | None, model: ModelConfig | None = None) -> EnvReport:
    """Check the rows of one entry of `envs`, without those that training leaves out because their prompt does not fit
    into `model`. Without `room` tokens are not counted.

    Raises ConfigError, with its line, for the first row that is no task, and if no row is left.
    """
    source = DatasetTasks(env, model)
    found = _Rows.read(source)
    left_out = f", {source.without_room:,} left out" if source.without_room else ""
    detail = f"{source.size:,} to train on, {source.held_out_size:,} held out{left_out}"
    sizes = EnvCheck("rows are tasks", "pass", detail)
    checks = [sizes, _repeats(found), _contradicts(found), _leaks(found)]
    if env.id == DATASET_ENV:
        checks += [_leaves_room(source, found, room), _scorers_accept(env, source)]
    assert env.data is not None
    return EnvReport(f"{env.id} of {env.data.path}", tuple(checks))


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Training rows and the rows that they resemble, by number."""

    rows: Numbers
    others: Numbers

    def first(self, source: DatasetTasks, other: Callable[[int], Task]) -> str:
        """Name the pair that comes first in the order of the training rows."""
        place = int(self.rows.argmin())
        return f"{source.task(int(self.rows[place])).task_id} and {other(int(self.others[place])).task_id}"


@dataclass(frozen=True, slots=True)
class _Rows:
    """What one pass over all rows found. It remembers numbers, 32 bytes for each row."""

    source: DatasetTasks
    repeated: _Pairs
    """Rows whose prompt and answer were there before."""
    contradicting: _Pairs
    """Rows with the prompt of an earlier row and another answer."""
    leaked: _Pairs
    """Rows that ask the same as a held-out row but for blanks, case and punctuation."""
    longest: Numbers
    """The rows with the longest prompts, longest first."""

    @classmethod
    def read(cls, source: DatasetTasks) -> _Rows:
        prompts, answers, words = (np.empty(source.size, np.uint64) for _ in range(3))
        characters = np.empty(source.size, np.int64)
        for number in range(source.size):
            task = source.task(number)
            asked = _asked(task)
            prompts[number], answers[number] = _hash(asked), _hash(repr(task.kwargs.get("answer")))
            words[number], characters[number] = _hash(_words(asked)), len(asked)
        held_out = np.fromiter(
            (_hash(_words(_asked(source.held_out_task(index)))) for index in range(source.held_out_size)), np.uint64
        )
        later, first = _equal(prompts)
        same = answers[later] == answers[first]
        longest = np.argsort(-characters, kind="stable")[:LONGEST_ROWS]
        repeated, contradicting = _Pairs(later[same], first[same]), _Pairs(later[~same], first[~same])
        return cls(source, repeated, contradicting, _in_both(words, held_out), longest)


def _equal(hashes: Hashes) -> tuple[Numbers, Numbers]:
    """Return the numbers of the rows that equal an earlier one, and of the first of their kind."""
    order = np.argsort(hashes, kind="stable")
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = hashes[order[1:]] != hashes[order[:-1]]
    first = order[np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))]
    return order[~is_new], first[~is_new]


def _in_both(trained: Hashes, held_out: Hashes) -> _Pairs:
    order = np.argsort(held_out, kind="stable")
    places = np.searchsorted(held_out, trained, sorter=order).clip(max=max(0, len(order) - 1))
    found = np.flatnonzero(held_out[order[places]] == trained) if len(order) else np.empty(0, np.int64)
    return _Pairs(found, order[places[found]] if len(order) else found)


def _asked(task: Task) -> str:
    """What a task asks, as text; of other environments than Dataset-v0 all that their row gives."""
    return msgspec.json.encode(task.kwargs.get("messages", task.kwargs), enc_hook=repr).decode()


def _words(text: str) -> str:
    return _BETWEEN_WORDS.sub(" ", text.casefold())


def _hash(text: str) -> int:
    return int.from_bytes(digest_of(text.encode()))


def _repeats(found: _Rows) -> EnvCheck:
    name, repeated, source = "no row is there twice", found.repeated.rows, found.source
    if not len(repeated):
        return EnvCheck(name, "pass", f"{source.size:,} rows")
    first = source.task(int(repeated.min())).task_id
    detail = f"{len(repeated):,} of {source.size:,} training rows repeat an earlier one, first {first}"
    return EnvCheck(name, "skip", detail, "fine if they are to be drawn more often; else remove them")


def _contradicts(found: _Rows) -> EnvCheck:
    name, pairs = "one prompt has one answer", found.contradicting
    if not len(pairs.rows):
        return EnvCheck(name, "pass", "no two rows contradict each other")
    pair = pairs.first(found.source, found.source.task)
    detail = f"{len(pairs.rows):,} rows ask what an earlier one asks and expect another answer, first {pair}"
    return EnvCheck(
        name, "fail", detail, "keep the right one; several right answers are one row with a list of answers"
    )


def _leaks(found: _Rows) -> EnvCheck:
    name, pairs = "held-out rows are not trained on", found.leaked
    if not len(pairs.rows):
        return EnvCheck(name, "pass", "also not in other case, blanks or punctuation")
    pair = pairs.first(found.source, found.source.held_out_task)
    rows = f"{len(pairs.rows):,} training rows"
    detail = f"{rows} ask what a held-out row asks, but for case, blanks or punctuation, first {pair}"
    return EnvCheck(name, "fail", detail, "write them alike, so that they come to one side, or remove them")


def _leaves_room(source: DatasetTasks, found: _Rows, room: Room | None) -> EnvCheck:
    name = "prompts leave room for an answer"
    if room is None:
        return EnvCheck(name, "skip", "tokens were not counted", "give a config whose model is there")
    tasks = [task for task in map(source.task, found.longest.tolist()) if task.env_id == DATASET_ENV]
    tokens = {task.task_id: room.count(task.kwargs["messages"]) for task in tasks}
    if not tokens:
        return EnvCheck(name, "skip", "the longest rows are of other environments")
    row, most = max(tokens.items(), key=lambda item: item[1])
    too_long = sum(count + room.answer > room.max_length for count in tokens.values())
    detail = f"the longest has {most:,} tokens ({row}), model.max_length is {room.max_length:,}"
    if not too_long:
        return EnvCheck(name, "pass", detail)
    at_least = "at least " if too_long == len(tokens) < source.size else ""
    return EnvCheck(
        name,
        "skip",
        f"{at_least}{too_long:,} prompts leave fewer than rollout.max_new_tokens={room.answer} tokens; {detail}",
        "fine if answers are shorter; else raise model.max_length, or leave rows out with data.max_prompt_characters",
    )


def _scorers_accept(env: EnvConfig, source: DatasetTasks) -> EnvCheck:
    """Score each row's own answer, as if the model had written it where `answer_in` looks for it."""
    name = "right answers earn the full reward"
    scored = [reward for reward in env.reward if reward.function not in NEEDS_NO_ANSWER and reward.weight > 0]
    if not scored:
        return EnvCheck(
            name, "skip", "rows hold no answers, but patterns, schemas or tests", "look at a few transcripts"
        )
    rejected, tried = asyncio.run(_score(env, source, {reward.label for reward in scored}))
    if rejected:
        task, reason = rejected[0]
        detail = f"{len(rejected):,} of {tried:,} rows: {task}: {reason}"
        return EnvCheck(name, "fail", detail, "correct the rows, or choose another reward or answer_in")
    return EnvCheck(name, "pass", f"{tried:,} rows")


async def _score(env: EnvConfig, source: DatasetTasks, names: set[str]) -> tuple[list[tuple[str, str]], int]:
    """Return (row, why) for each row whose answer is rejected, and the number of rows that were scored."""
    rejected, tried = [], 0
    ready = {reward.label for reward in env.reward if reward.function in READY}
    for task in _evenly(source):
        chosen = {reward["name"] for reward in task.kwargs.get("rewards", ())} & names
        if task.env_id != DATASET_ENV or not chosen:
            continue
        tried += 1
        try:
            values = await _values_of_the_right_answer(task.kwargs, chosen)
        except EnvError as error:
            rejected.append((task.task_id, first_line(error)))
            continue
        except Exception as error:  # a reward of the user may raise anything
            rejected.append((task.task_id, f"raised {type(error).__name__}: {first_line(error)}"))
            continue
        low = [name for name, value in values.items() if name in ready and value < 1 - TOLERANCE]
        if low or max(values.values()) <= TOLERANCE:
            worst = (low or list(values))[0]
            rejected.append((task.task_id, f"{worst} gives {values[worst]:g} to {task.kwargs['answer']!r}"))
    return rejected, tried


async def _values_of_the_right_answer(kwargs: Mapping[str, Any], names: set[str]) -> Mapping[str, float]:
    rewards = [one for one in kwargs["rewards"] if one["name"] in names]
    played = DatasetEnv(**{**kwargs, "rewards": rewards, "tools": (), "mcp_servers": {}})
    await played.begin(0)
    return await played.score_answer(await played.oracle())


def _evenly(source: DatasetTasks) -> Iterator[Task]:
    step = max(1, source.size // SCORED_ROWS)
    for number in range(0, source.size, step):
        yield source.task(number)
