"""How a row of a data set becomes the arguments of an environment."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

from roll_flash.chat.templates import Tools
from roll_flash.config.tree import DATASET_ENV, EnvConfig
from roll_flash.errors import ConfigError
from roll_flash.types import Message


def prompt_of(env: EnvConfig, row: Mapping[str, Any], place: str) -> str | list[Message]:
    """Return the text or the chat that a row asks; for other environments than Dataset-v0, all its columns.

    `place`: file and line, for messages. Raises ConfigError.
    """
    assert env.data is not None
    data = env.data
    if env.id != DATASET_ENV:
        return [dict(row)]
    if data.template is not None:
        missing = [name for name in _fields(data.template) if name not in row]
        if missing:
            raise ConfigError(f"{place}: no column {missing[0]!r}, which data.template names; it has {_names(row)}")
        return data.template.format_map(row)
    messages = data.columns.get("messages", "messages")
    if messages in row:
        return _checked_messages(row[messages], messages, place)
    prompt = data.columns.get("prompt", "prompt")
    if prompt not in row:
        raise ConfigError(
            f"{place}: no column {prompt!r} or {messages!r}; it has {_names(row)}; say which one asks, for example "
            f"data.columns.prompt={next(iter(row), 'question')}"
        )
    if isinstance(row[prompt], list):
        return _checked_messages(row[prompt], prompt, place)
    if not isinstance(row[prompt], str) or not row[prompt].strip():
        raise ConfigError(f"{place}: {prompt!r} is {_shown(row[prompt])}, not a text")
    return str(row[prompt])


def task_arguments(env: EnvConfig, row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the keyword arguments of one task's environment."""
    assert env.data is not None
    data = env.data
    if env.id != DATASET_ENV:
        ours = {theirs: name for name, theirs in data.columns.items()}
        return {**env.kwargs, **{ours.get(name, name): value for name, value in row.items() if name != "id"}}
    prompt = prompt_of(env, row, place)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if data.system is not None:
        messages = [{"role": "system", "content": data.system}, *messages]
    asked = {*_fields(data.template or ""), *(data.columns.get(name, name) for name in ("prompt", "messages"))}
    answer = data.columns.get("answer", "answer")
    return {
        **env.kwargs,
        "messages": messages,
        "answer": row.get(answer),
        "row": {name: value for name, value in row.items() if name not in asked and name != answer},
        "rewards": [reward.model_dump() for reward in env.reward],
    }


def demonstration_of(row: Mapping[str, Any], columns: Mapping[str, str], place: str) -> tuple[list[Message], Tools]:
    """Return the conversation of a row that a model is to imitate, and the tools that it calls. Raises ConfigError."""
    name = {ours: columns.get(ours, ours) for ours in ("messages", "prompt", "answer", "tools")}
    tools = _from_json(row.get(name["tools"]), name["tools"], place)
    if name["messages"] in row:
        value = _from_json(row[name["messages"]], name["messages"], place)
        messages = [
            {key: item for key, item in message.items() if item is not None}  # columnar files fill in all keys
            for message in _checked_messages(value, name["messages"], place, is_prompt=False)
        ]
    elif name["prompt"] in row and name["answer"] in row:
        prompt = row[name["prompt"]]
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        messages = [*asked, {"role": "assistant", "content": str(row[name["answer"]])}]
    else:
        raise ConfigError(
            f"{place}: no column {name['messages']!r}, nor {name['prompt']!r} and {name['answer']!r}; it has "
            f"{_names(row)}; name yours with warm_start.columns"
        )
    if next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0) == 0:
        raise ConfigError(f"{place}: an assistant message must come after at least one other")
    return messages, tools or None


def _from_json(value: Any, column: str, place: str) -> Any:
    """Read a list that a file without lists, such as CSV, has as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError as error:
        raise ConfigError(f"{place}: {column!r} is no JSON: {error}") from None


@cache
def _fields(template: str) -> tuple[str, ...]:
    """Return the names in braces. Raises ConfigError for text that is no template."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"data.template: {error}; write {{{{ and }}}} for braces") from None
    if any(not name.isidentifier() for name in names):
        raise ConfigError(
            "data.template: only columns can be in braces, such as {question}; write {{ and }} for braces"
        )
    return tuple(names)


def _checked_messages(value: Any, column: str, place: str, *, is_prompt: bool = True) -> list[Message]:
    is_chat = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    if not is_chat:
        raise ConfigError(f"{place}: {column!r} is {_shown(value)}, not a list of messages with roles")
    if any(isinstance(message.get("content"), list) for message in value):
        raise ConfigError(f"{place}: {column!r} has content in parts, such as images; only text can be played")
    if is_prompt and value[-1]["role"] == "assistant":
        raise ConfigError(
            f"{place}: {column!r} end with a message of the assistant, which leaves nothing to ask; leave it out, or "
            "imitate such rows first (warm_start.demonstrations)"
        )
    return list(value)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
