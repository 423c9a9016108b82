"""API-independent form of one model call: messages, tools and sampling parameters.

Messages have one internal form: `content` is always text, and an assistant's `tool_calls` have their arguments as JSON
text, as in OpenAI's chat completions. Conversations with the same keys are the same: an agent that parses and
re-serialises a tool call, or drops the thinking, does not count as rewriting its history. That holds for arguments of
every kind: some agents get those that are no object as `input_of`, and JavaScript knows no difference of 1.0 and 1, and
rounds whole numbers above EXACT_INTEGER.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from roll_flash.chat.model_text import MAX_DEPTH, is_deeper, without_thinking
from roll_flash.types import FinishReason, Message

Key = bytes
MAX_ARGUMENT_VALUES = 20_000
"""Maximum values in the arguments of one tool call."""
EXACT_INTEGER = 1 << 53
"""Larger integers are not exact in JavaScript."""
MESSAGE_CHARACTERS = 64
"""Fixed cost of rendering a message, in characters."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text."""

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
class RequestedSampling:
    """Sampling parameters of the agent; None if not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Keys of a conversation, one after each message; each key also covers the tools."""

    keys: tuple[Key, ...]
    sizes: tuple[int, ...]
    """Characters of each message as sent."""
    tools_size: int

    def characters(self, known: int) -> int:
        """Approximate characters to render for a call whose first `known` messages are recorded."""
        return self.tools_size + sum(size + MESSAGE_CHARACTERS for size in self.sizes[known:])


@dataclass(frozen=True)
class ModelCall:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or `name:TOOL`."""
    requested: RequestedSampling = field(default_factory=RequestedSampling)
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
    """Content of one sampled turn. `raw` is the full text; `content` excludes thinking and tool calls."""

    raw: str
    content: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop_string: str | None
    tokens: tuple[SampledToken, ...]
    """Empty if tokens are not known."""

    @property
    def message(self) -> Message:
        """Message as sent to the agent and recorded."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.thinking:
            message["reasoning_content"] = self.thinking
        return message


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; 0 if an endpoint does not report them."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The `n` answers to one call."""

    answers: tuple[Answer, ...]
    usage: Usage


def keys_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> CallKeys:
    declared = _as_text(list(tools))
    key, keys, sizes = _digest(b"", declared), [], []
    for message in messages:
        text = _as_text(_meaning(message))
        key = _digest(key, text)
        keys.append(key)
        sizes.append(len(_as_text(message)))  # includes fields outside the key, such as thinking: templates render all
    return CallKeys(tuple(keys), tuple(sizes), len(declared))


def next_key(key: Key, message: Message) -> Key:
    """Key of the conversation `key` with one more message."""
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
        [call["function"]["name"], _meant(call["function"]["arguments"])] for call in message.get("tool_calls") or ()
    ]
    return ["assistant", without_thinking(content).strip(), calls]


def _meant(arguments: Any) -> Any:
    value = parsed_arguments(arguments)
    match value:
        case {"arguments": str(text)} if value == input_of(text):
            value = parsed_arguments(text)
    return _with_whole_numbers(value)


def _with_whole_numbers(value: Any) -> Any:
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case int() if EXACT_INTEGER < abs(value) <= sys.float_info.max:
            return int(float(value))
        case dict():
            return {name: _with_whole_numbers(one) for name, one in value.items()}
        case list():
            return [_with_whole_numbers(one) for one in value]
    return value


def parsed_arguments(arguments: Any) -> Any:
    """Parse JSON text; return it unchanged if it is invalid, or has too many values or too deep nesting."""
    if not isinstance(arguments, str) or sum(map(arguments.count, ",[{")) > MAX_ARGUMENT_VALUES:
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_deeper([value], MAX_DEPTH) else value


def input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments as the object that Anthropic's API requires. What is no object, or what JSON cannot say
    (halves of characters, NaN), is passed as its raw text."""
    value = parsed_arguments(arguments)
    return value if isinstance(value, dict) and _can_be_sent(value) else {"arguments": arguments}


def _can_be_sent(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
