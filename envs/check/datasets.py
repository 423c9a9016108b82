"""`roll-flash envs check CONFIG.yaml`: tests if the rows of a data set are fit to train on.

It finds what trains badly and raises no error: rows that repeat or contradict each other, rows that are trained on and
held out too but for their spelling, prompts that leave no room for an answer, answers that their own reward rejects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from roll_flash.config.tree import DATASET_ENV, EnvConfig
from roll_flash.envs.check.checks import TOLERANCE, EnvCheck, EnvReport
from roll_flash.envs.datasets.env import DatasetEnv
from roll_flash.envs.datasets.rewards import READY
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.errors import EnvError, first_line
from roll_flash.types import Message, Task

SCORED_ROWS = 400
"""Rows whose answer is scored, evenly taken from all."""
LONGEST_ROWS = 200
"""Rows with the longest prompts, of which tokens are counted."""
NEEDS_NO_ANSWER = ("regex", "json_schema", "python_tests")
"""Rewards whose row holds a pattern, a schema or tests: no answer that could be scored."""

ALL = 1 << 62
_BETWEEN_WORDS = re.compile(r"[\W_]+")

CountTokens = Callable[[Sequence[Message]], int]
"""Tokens of a prompt with the chat template of the model."""


@dataclass(frozen=True, slots=True)
class Room:
    """What limits a prompt: an episode has `max_length` tokens, of which the first turn may take `answer`."""

    count: CountTokens
    max_length: int
    answer: int


def check_data_set(env: EnvConfig, room: Room | None) -> EnvReport:
    """Check all rows of one entry of `envs`. Without `room` tokens are not counted.

    Raises ConfigError, with its line, for the first row that is no task.
    """
    source = DatasetTasks(env)
    held_out = source.held_out(ALL)
    found = _Rows.read(source, held_out)
    sizes = EnvCheck("rows are tasks", "pass", f"{found.trained:,} to train on, {len(held_out):,} held out")
    checks = [sizes, _repeats(found), _contradicts(found), _leaks(found)]
    if env.id == DATASET_ENV:
        checks += [_leaves_room(source, found, room), _scorers_accept(env, source)]
    assert env.data is not None
    return EnvReport(f"{env.id} of {env.data.path}", tuple(checks))


@dataclass(slots=True)
class _Rows:
    """What one pass over all rows remembers: hashes, not texts."""

    trained: int
    repeated: list[str]
    """Training rows whose prompt and answer were there before."""
    contradicting: list[tuple[str, str]]
    """Training rows with the prompt of an earlier row and another answer, with that row."""
    leaked: list[tuple[str, str]]
    """Training rows that ask the same as a held-out row but for blanks, case and punctuation, with that row."""
    longest: list[tuple[int, int]]
    """(characters, number) of the training rows with the longest prompts."""

    @classmethod
    def read(cls, source: DatasetTasks, held_out: Sequence[Task]) -> _Rows:
        said = {_hash(_words(_asked(task))): task.task_id for task in held_out}
        seen: dict[int, tuple[int, str]] = {}
        found = cls(source.size, [], [], [], [])
        for number in range(source.size):
            task = source.task(number)
            asked = _asked(task)
            prompt, answer = _hash(asked), _hash(repr(task.kwargs.get("answer")))
            first = seen.setdefault(prompt, (answer, task.task_id))
            if first[1] != task.task_id:
                if first[0] == answer:
                    found.repeated.append(task.task_id)
                else:
                    found.contradicting.append((task.task_id, first[1]))
            if (twin := said.get(_hash(_words(asked)))) is not None:
                found.leaked.append((task.task_id, twin))
            found._remember_length(len(asked), number)
        return found

    def _remember_length(self, characters: int, number: int) -> None:
        if len(self.longest) < 2 * LONGEST_ROWS:
            self.longest.append((characters, number))
            return
        self.longest = [*sorted(self.longest, reverse=True)[:LONGEST_ROWS], (characters, number)]


def _asked(task: Task) -> str:
    """What a task asks, as text; of other environments than Dataset-v0 all that their row gives."""
    return msgspec.json.encode(task.kwargs.get("messages", task.kwargs), enc_hook=repr).decode()


def _words(text: str) -> str:
    return _BETWEEN_WORDS.sub(" ", text.casefold())


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _repeats(found: _Rows) -> EnvCheck:
    name, repeated = "no row is there twice", found.repeated
    if not repeated:
        return EnvCheck(name, "pass", f"{found.trained:,} rows")
    detail = f"{len(repeated):,} of {found.trained:,} training rows repeat an earlier one, first {repeated[0]}"
    return EnvCheck(name, "skip", detail, "fine if they are to be drawn more often; else remove them")


def _contradicts(found: _Rows) -> EnvCheck:
    name, pairs = "one prompt has one answer", found.contradicting
    if not pairs:
        return EnvCheck(name, "pass", "no two rows contradict each other")
    detail = f"{len(pairs):,} rows ask what an earlier one asks and expect another answer, first {_pair(pairs)}"
    return EnvCheck(
        name, "fail", detail, "keep the right one; several right answers are one row with a list of answers"
    )


def _leaks(found: _Rows) -> EnvCheck:
    name, pairs = "held-out rows are not trained on", found.leaked
    if not pairs:
        return EnvCheck(name, "pass", "also not in other case, blanks or punctuation")
    detail = f"{len(pairs):,} training rows ask what a held-out row asks, but for case, blanks or punctuation, first "
    return EnvCheck(
        name, "fail", detail + _pair(pairs), "write them alike, so that they come to one side, or remove them"
    )


def _pair(pairs: Sequence[tuple[str, str]]) -> str:
    return f"{pairs[0][0]} and {pairs[0][1]}"


def _leaves_room(source: DatasetTasks, found: _Rows, room: Room | None) -> EnvCheck:
    name = "prompts leave room for an answer"
    if room is None:
        return EnvCheck(name, "skip", "tokens were not counted", "give a config whose model is there")
    longest = [number for _, number in sorted(found.longest, reverse=True)[:LONGEST_ROWS]]
    tokens = {source.task(number).task_id: room.count(source.task(number).kwargs["messages"]) for number in longest}
    row, most = max(tokens.items(), key=lambda item: item[1])
    too_long = sum(count + room.answer > room.max_length for count in tokens.values())
    detail = f"the longest has {most:,} tokens ({row}), model.max_length is {room.max_length:,}"
    if not too_long:
        return EnvCheck(name, "pass", detail)
    at_least = "at least " if too_long == len(tokens) < found.trained else ""
    return EnvCheck(
        name,
        "fail",
        f"{at_least}{too_long:,} prompts leave fewer than rollout.max_new_tokens={room.answer} tokens; {detail}",
        "raise model.max_length, or leave rows out with data.max_prompt_characters",
    )


def _scorers_accept(env: EnvConfig, source: DatasetTasks) -> EnvCheck:
    """Score each row's own answer, as if the model had written it where `answer_in` looks for it."""
    name = "right answers earn the full reward"
    scored = [reward for reward in env.reward if reward.function not in NEEDS_NO_ANSWER and reward.weight > 0]
    if not scored:
        return EnvCheck(
            name, "skip", "rows hold no answers, but patterns, schemas or tests", "look at a few transcripts"
        )
    rejected, tried = asyncio.run(_score(env, source, {reward.name for reward in scored}))
    if rejected:
        task, reason = rejected[0]
        detail = f"{len(rejected):,} of {tried:,} rows: {task}: {reason}"
        return EnvCheck(name, "fail", detail, "correct the rows, or choose another reward or answer_in")
    return EnvCheck(name, "pass", f"{tried:,} rows")


async def _score(env: EnvConfig, source: DatasetTasks, names: set[str]) -> tuple[list[tuple[str, str]], int]:
    """Return (row, why) for each row whose answer is rejected, and the number of rows that were scored."""
    rejected, tried = [], 0
    ready = {reward.name for reward in env.reward if reward.function in READY}
    for task in _evenly(source):
        tried += 1
        try:
            values = await _values_of_the_right_answer(task.kwargs, names)
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
    rewards = [one for one in kwargs["rewards"] if one["function"].rpartition(":")[2] in names]
    played = DatasetEnv(**{**kwargs, "rewards": rewards, "tools": ()})
    await played.begin(0)
    return await played.score_answer(await played.oracle())


def _evenly(source: DatasetTasks) -> Iterator[Task]:
    step = max(1, source.size // SCORED_ROWS)
    for number in range(0, source.size, step):
        yield source.task(number)
