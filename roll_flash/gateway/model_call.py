"""One call of the model as all APIs mean it: messages, tools and how to sample.

Messages have one form inside: `content` is always text, and an assistant's `tool_calls` have their arguments as JSON
text, as in OpenAI's chat completions. Two conversations are the same when their keys are: an agent that parsed and
re-serialised a tool call, or left out the thinking, has not rewritten anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from roll_flash.chat.model_text import MOST_DEPTH, is_deeper
from roll_flash.envs.tools.calls import without_thinking
from roll_flash.types import FinishReason, Message

Key = bytes
MAX_ARGUMENT_VALUES = 20_000
"""Values in the arguments of one tool call."""
MESSAGE_CHARACTERS = 64
"""Rendering a message costs about as much as so many characters."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Requested:
    """How the agent wants to sample; None is what it left open."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Of a call's conversation: after each of its messages, its tools being part of it."""

    keys: tuple[Key, ...]
    sizes: tuple[int, ...]
    """Characters of each message as it was sent."""
    tools_size: int

    def characters(self, known: int) -> int:
        """What there is to render of a call whose first `known` messages are recorded, about."""
        return self.tools_size + sum(size + MESSAGE_CHARACTERS for size in self.sizes[known:])


@dataclass(frozen=True)
class ModelCall:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `name:TOOL`."""
    requested: Requested = field(default_factory=Requested)
    n: int = 1
    wants_logprobs: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only an endpoint behind the gateway understands."""

    @cached_property
    def keys(self) -> CallKeys:
        return keys_of(self.messages, self.tools)


@dataclass(frozen=True, slots=True)
class SampledToken:
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What one sampled turn says. `raw` is all of its text; `content` has neither thinking nor tool calls in it."""

    raw: str
    content: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop_string: str | None
    tokens: tuple[SampledToken, ...]
    """Empty where tokens are not known."""

    @property
    def message(self) -> Message:
        """As it is told to the agent and recorded."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.thinking:
            message["reasoning_content"] = self.thinking
        return message


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; 0 where an endpoint does not tell."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to one call, `n` of them."""

    answers: tuple[Answer, ...]
    usage: Usage


def keys_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> CallKeys:
    declared = _as_text(list(tools))
    key, keys, sizes = _digest(b"", declared), [], []
    for message in messages:
        text = _as_text(_meaning(message))
        key = _digest(key, text)
        keys.append(key)
        sizes.append(len(_as_text(message)))  # with what counts for no key, such as thinking: a template takes it all
    return CallKeys(tuple(keys), tuple(sizes), len(declared))


def next_key(key: Key, message: Message) -> Key:
    """Of the conversation of `key` with one more message."""
    return _digest(key, _as_text(_meaning(message)))


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest(before: bytes, text: str) -> Key:
    return hashlib.blake2b(before + text.encode(errors="surrogatepass"), digest_size=16).digest()


def _meaning(message: Message) -> list[Any]:
    content = str(message.get("content") or "")
    if message["role"] != "assistant":
        return [message["role"], content]
    calls = [
        [call["function"]["name"], parsed_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return ["assistant", without_thinking(content).strip(), calls]


def parsed_arguments(arguments: Any) -> Any:
    """JSON text as what it says; what is none, or holds or nests more than anybody means, stays as it is."""
    if not isinstance(arguments, str) or sum(map(arguments.count, ",[{")) > MAX_ARGUMENT_VALUES:
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_deeper([value], MOST_DEPTH) else value
