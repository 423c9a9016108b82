"""How a row of a data set becomes the arguments of an environment."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from roll_flash.chat.model_text import MAX_DEPTH, is_deeper
from roll_flash.chat.templates import Tools
from roll_flash.config.sections.data import COLUMNS, DEMONSTRATION_COLUMNS, RewardConfig
from roll_flash.config.tree import DATASET_ENV, EnvConfig
from roll_flash.envs.datasets.rewards import check_reward, fault_of_answer, is_empty, reads_answer, reads_row
from roll_flash.envs.hosting.waiting import call_in_time
from roll_flash.errors import ConfigError
from roll_flash.types import Message

_NAME = re.compile(r"(?!\d+\Z)[^\s.\[\]:!{}](?:[^.\[\]:!{}]*[^\s.\[\]:!{}])?")
"""A name of a column in a template, as `str.format_map` looks it up."""
LOADING_S = 300.0
"""Maximum seconds to import what a reward needs; it may load a model."""
PER_ROW = ("answer_in", "tools", "max_turns")
NEVER_IN_ROWS = ("mcp_servers", "mcp_allow")
"""Arguments of an environment with which a data set from elsewhere could make a worker call any host."""
KWARGS = (*PER_ROW, *NEVER_IN_ROWS)
"""Keyword arguments of Dataset-v0 that an entry of `envs` can set; the others come from rows."""
ROW_KWARGS = (*PER_ROW, "reward")
"""What a row of Dataset-v0 can set for itself; `tools` and `reward`: some of the entry's. Otherwise a data set from
elsewhere could name any function, which would run in a worker with what a model writes."""


@dataclass(frozen=True, slots=True)
class UsedColumns:
    """Which columns of a data set are read. What the others hold does not matter."""

    names: frozenset[str] | None
    """None: all."""
    required: tuple[frozenset[str], ...] = ()
    """One of each of these must be in a row."""
    by_rewards: bool = False
    """Functions of the user get the other columns too, as far as a row can hold them."""

    def of(self, present: Sequence[str]) -> list[str]:
        """Return those of `present` to read: all if a required one is missing, for the message that names them."""
        if self.names is None or self.by_rewards or any(one.isdisjoint(present) for one in self.required):
            return list(present)
        return [name for name in present if name in self.names]

    def must_hold(self, name: str) -> bool:
        """Return True if a row is useless without the column."""
        return self.names is None or name in self.names


def used_columns(env: EnvConfig) -> UsedColumns:
    """Return what an entry of `envs`, whose rewards `AnswerCheck` has accepted, reads of its data."""
    assert env.data is not None
    data = env.data
    own = {name for name in (data.environment_column, data.kwargs_column) if name is not None}
    if data.kwargs_column is None and (env.id != DATASET_ENV or own):  # columns are keyword arguments
        return UsedColumns(None)
    ours = {name: data.columns.get(name, name) for name in COLUMNS}
    named = frozenset({*data.columns.values(), *_fields(data.template or ""), *own})
    asked = frozenset({ours["prompt"], ours["messages"]} if data.template is None else ())
    answer = frozenset([ours["answer"]])
    required = [frozenset([name]) for name in named]
    if env.id == DATASET_ENV and not own:
        required += [asked] * bool(asked) + [answer] * any(map(reads_answer, env.reward))
    return UsedColumns(named | asked | answer | {ours["id"]}, tuple(required), any(map(reads_row, env.reward)))


def environment_of(env: EnvConfig, row: Mapping[str, Any], place: object) -> str:
    """Return the id of the row's environment. `place`: file and line, for messages. Raises ConfigError."""
    assert env.data is not None
    column = env.data.environment_column
    if column is None or (chosen := row.get(column)) is None:
        return env.id
    if not isinstance(chosen, str):
        raise ConfigError(f"{place}: {column!r} is {_shown(chosen)}, not the id of an environment")
    source, of_module, name = chosen.rpartition(":")
    if of_module:
        named = (known.rpartition(":")[0] for known in (env.id, *env.data.environments))
        own = next((known for known in named if known and Path(known).name == Path(source).name), None)
        if own is None:
            raise ConfigError(
                f"{place}: {column!r} is {_shown(chosen)}: rows name no code but that of the entry's id and of "
                "data.environments"
            )
        return f"{own}:{name}"
    if chosen == DATASET_ENV != env.id:
        raise ConfigError(f"{place}: rows of {DATASET_ENV} need a reward; make it the id of the entry of envs")
    return chosen


def prompt_of(env: EnvConfig, row: Mapping[str, Any], place: object) -> str | list[Message]:
    """Return the text or the chat that a row asks; for other environments than Dataset-v0, all its columns.

    Raises ConfigError.
    """
    assert env.data is not None
    data = env.data
    if environment_of(env, row, place) != DATASET_ENV:
        return [dict(row)]
    if data.template is not None:
        missing = [name for name in _fields(data.template) if name not in row]
        if missing:
            raise ConfigError(f"{place}: no column {missing[0]!r}, which data.template names; it has {_names(row)}")
        if empty := [name for name in _fields(data.template) if row[name] is None]:
            raise ConfigError(
                f"{place}: {empty[0]!r} is null, and data.template names it; fill it in or leave out the row"
            )
        return data.template.format_map(row)
    messages = data.columns.get("messages", "messages")
    if messages in row and ("prompt" not in data.columns or "messages" in data.columns):
        return _checked_messages(_from_json(row[messages], messages, place), messages, place)
    prompt = data.columns.get("prompt", "prompt")
    if prompt not in row:
        raise ConfigError(
            f"{place}: no column {prompt!r} or {messages!r}; it has {_names(row)}; say which one "
            f"asks: data: {{path: ..., columns: {{prompt: {next(iter(row), 'question')}}}}}"
        )
    asked = row[prompt]
    if isinstance(asked, list):
        return _checked_messages(asked, prompt, place)
    if not isinstance(asked, str) or not asked.strip():
        raise ConfigError(f"{place}: {prompt!r} is {_shown(asked)}, not a text")
    return asked


class AnswerCheck:
    """Checks that rows have the columns that the config names, and answers that the rewards can be computed with."""

    def __init__(self, env: EnvConfig) -> None:
        """Raises ConfigError for a reward, or an argument of Dataset-v0, that does not exist."""
        assert env.data is not None
        if env.id == DATASET_ENV and (unknown := [name for name in env.kwargs if name not in KWARGS]):
            raise ConfigError(f"kwargs has {unknown[0]!r}; {DATASET_ENV} takes {', '.join(KWARGS)}")
        self._env = env
        self._column = env.data.columns.get("answer", "answer")
        self._named = {ours: theirs for ours, theirs in env.data.columns.items() if ours not in ("prompt", "messages")}
        for reward in env.reward:
            check = partial(check_reward, reward.function, reward.kwargs)
            call_in_time(check, f"the code of reward {reward.function}", LOADING_S)
        self._readers = [reward for reward in env.reward if reads_answer(reward)]
        self._are_alike = not (env.data.environment_column or env.data.kwargs_column)

    def check(self, row: Mapping[str, Any], place: object) -> None:
        """Raises ConfigError with `place`, file and line."""
        for ours, theirs in self._named.items():
            if theirs not in row:
                raise ConfigError(
                    f"{place}: no column {theirs!r}, which data.columns.{ours} names; it has {_names(row)}"
                )
        for reward in self._readers if self._are_alike else self._readers_of(row, place):
            if self._column not in row:
                raise ConfigError(
                    f"{place}: no column {self._column!r}, which reward {reward.label} needs; it has {_names(row)}; "
                    "say which one it is: data: {path: ..., columns: {answer: NAME}}"
                )
            if fault := fault_of_answer(reward, row[self._column]):
                raise ConfigError(
                    f"{place}: {self._column!r} is {_shown(row[self._column])}: reward {reward.label} {fault}"
                )

    def _readers_of(self, row: Mapping[str, Any], place: object) -> Sequence[RewardConfig]:
        if environment_of(self._env, row, place) != DATASET_ENV:
            return ()
        chosen = rewards_of(self._env, row, place)
        return [reward for reward in self._readers if reward in chosen]


def rewards_of(env: EnvConfig, row: Mapping[str, Any], place: object) -> Sequence[RewardConfig]:
    """Return the rewards of a row of Dataset-v0: those that its own kwargs name, else all. Raises ConfigError."""
    named = _own_kwargs(env, row, place).get("reward")
    if named is None:
        return env.reward
    known = {reward.label: reward for reward in env.reward}
    if named == []:
        raise ConfigError(f"{place}: reward [] is none of the entry's: {', '.join(known)}")
    return [known[name] for name in _chosen("reward", named, known, place)]


def _chosen(what: str, named: Any, known: Collection[str], place: object) -> list[str]:
    """Return the names that a row chooses of the entry's; a file before a name does not matter. Raises ConfigError."""
    given = named if isinstance(named, list) else [named]
    names = [str(name).rpartition(":")[2] for name in given]
    for name, as_given in zip(names, given, strict=True):
        if name not in known:
            raise ConfigError(
                f"{place}: {what} {_shown(as_given)} is none of the entry's: {', '.join(known) or 'none'}"
            )
    return names


def task_arguments(env: EnvConfig, row: Mapping[str, Any], place: object) -> dict[str, Any]:
    """Return the keyword arguments of one task's environment. Raises ConfigError."""
    assert env.data is not None
    data = env.data
    own = _own_kwargs(env, row, place)
    chosen = environment_of(env, row, place)
    if chosen != DATASET_ENV:
        if refused := [name for name in NEVER_IN_ROWS if name in (own if data.kwargs_column else row)]:
            raise ConfigError(f"{place}: a row cannot set {refused[0]!r}; write it into kwargs of the entry of envs")
        base = env.kwargs if chosen == env.id else {}
        if data.kwargs_column is not None:
            return {**base, **own}
        ours = {theirs: name for name, theirs in data.columns.items()}
        left_out = ("id", data.environment_column)
        return {**base, **{ours.get(name, name): value for name, value in row.items() if name not in left_out}}
    prompt = prompt_of(env, row, place)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if data.system is not None:
        messages = [{"role": "system", "content": data.system}, *messages]
    answer = data.columns.get("answer", "answer")
    asked = {*_fields(data.template or ""), *(data.columns.get(name, name) for name in ("prompt", "messages"))}
    asked |= {answer, *filter(None, (data.environment_column, data.kwargs_column))}
    return {
        **env.kwargs,
        **{name: value for name, value in own.items() if name != "reward"},
        "messages": messages,
        "answer": row.get(answer),
        "row": {name: value for name, value in row.items() if name not in asked},
        "rewards": [{**reward.model_dump(), "name": reward.label} for reward in rewards_of(env, row, place)],
    }


def _own_kwargs(env: EnvConfig, row: Mapping[str, Any], place: object) -> Mapping[str, Any]:
    """Return the keyword arguments in a column of the row. Raises ConfigError."""
    assert env.data is not None
    column = env.data.kwargs_column
    own = None if column is None else _from_json(row.get(column), column, place)
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"{place}: {column!r} is {_shown(own)}, not a mapping of keyword arguments")
    # Files with columns fill in the keys of other rows.
    own = {name: value for name, value in own.items() if value is not None}
    if environment_of(env, row, place) != DATASET_ENV:
        return own
    if unknown := [name for name in own if name not in ROW_KWARGS]:
        raise ConfigError(f"{place}: {column!r} has {unknown[0]!r}; a row can set {', '.join(ROW_KWARGS)}")
    turns = own.get("max_turns")
    if turns is not None and (type(turns) is not int or turns < 1):
        raise ConfigError(f"{place}: max_turns is {_shown(turns)}, not a whole number of at least 1")
    if own.get("tools") is not None:
        known = {tool.rpartition(":")[2]: tool for tool in env.kwargs.get("tools") or ()}
        return {**own, "tools": [known[name] for name in _chosen("tool", own["tools"], known, place)]}
    return own


def demonstration_columns(columns: Mapping[str, str]) -> UsedColumns:
    """Return what is read of demonstrations. `columns`: names where they differ from ours."""
    name = {ours: columns.get(ours, ours) for ours in DEMONSTRATION_COLUMNS}
    required = [frozenset([theirs]) for theirs in columns.values()]
    either = [frozenset([name["messages"], name[other]]) for other in ("prompt", "answer")]
    return UsedColumns(frozenset(name.values()), (*required, *either))


def demonstration_of(
    row: Mapping[str, Any], columns: Mapping[str, str], place: object
) -> tuple[list[Message], int, Tools]:
    """Return the conversation of a row, the place of the first message that a model is to imitate, and the tools that
    it calls: an answer is imitated, not what its prompt has of the assistant. Raises ConfigError."""
    name = {ours: columns.get(ours, ours) for ours in DEMONSTRATION_COLUMNS}
    if missing := [(ours, theirs) for ours, theirs in columns.items() if theirs not in row]:
        ours, theirs = missing[0]
        raise ConfigError(f"{place}: no column {theirs!r}, which columns.{ours} names; it has {_names(row)}")
    tools = _from_json(row.get(name["tools"]), name["tools"], place)
    if name["messages"] in row:
        value = _from_json(row[name["messages"]], name["messages"], place)
        messages = _checked_messages(value, name["messages"], place, is_prompt=False)
    elif name["prompt"] in row and name["answer"] in row:
        prompt, answer = row[name["prompt"]], row[name["answer"]]
        if is_empty(answer):
            raise ConfigError(f"{place}: {name['answer']!r} is empty: there is nothing to imitate")
        asked = (
            _checked_messages(prompt, name["prompt"], place)
            if isinstance(prompt, list)
            else [{"role": "user", "content": str(prompt)}]
        )
        said = answer[0] if isinstance(answer, list) else answer
        messages = [*asked, {"role": "assistant", "content": str(said)}]
    else:
        raise ConfigError(
            f"{place}: no column {name['messages']!r}, nor {name['prompt']!r} and {name['answer']!r}; it has "
            f"{_names(row)}; name yours with warm_start.columns"
        )
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    if first == 0:
        raise ConfigError(f"{place}: an assistant message must come after at least one other")
    roles = [message["role"] for message in messages]
    if ("assistant", "assistant") in pairwise(roles):
        raise ConfigError(f"{place}: two assistant messages follow each other; join them")
    return messages, first if name["messages"] in row else len(messages) - 1, tools or None


def _from_json(value: Any, column: str, place: object) -> Any:
    """Read what a file without lists, such as CSV, has as text."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {column!r} is no JSON: {error}") from None
    if is_deeper([found], MAX_DEPTH):
        raise ConfigError(f"{place}: {column!r} is nested more than {MAX_DEPTH} deep")
    return found


@cache
def _fields(template: str) -> tuple[str, ...]:
    """Return the names in braces. Raises ConfigError for text that is no template."""
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ConfigError(f"data.template: {error}; write {{{{ and }}}} for braces") from None
    names = [str(name) for _, name, _, _ in fields]
    if any(not _NAME.fullmatch(str(name)) or form or conversion for _, name, form, conversion in fields):
        raise ConfigError(
            "data.template: only columns can be in braces, such as {question} or {Question text}, and none whose name "
            "is a number or has one of . [ ] : ! in it; write {{ and }} for braces"
        )
    return tuple(names)


def _checked_messages(value: Any, column: str, place: object, *, is_prompt: bool = True) -> list[Message]:
    is_chat = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    if not is_chat:
        raise ConfigError(f"{place}: {column!r} is {_shown(value)}, not a list of messages with roles")
    if any(isinstance(message.get("content"), list) for message in value):
        raise ConfigError(f"{place}: {column!r} has content in parts, such as images; only text can be played")
    for message in value:
        if not isinstance(message["role"], str) or not _has_text(message):
            raise ConfigError(f"{place}: {column!r} has {_shown(message)}; a message is {{role, content}}, both texts")
    if is_prompt and value[-1]["role"] == "assistant":
        raise ConfigError(
            f"{place}: {column!r} end with a message of the assistant, which leaves nothing to ask; leave it out, or "
            "imitate such rows first (warm_start.demonstrations)"
        )
    # Files with columns fill in the keys that other messages have.
    return [{key: item for key, item in one.items() if item is not None or key == "content"} for one in value]


def _has_text(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
