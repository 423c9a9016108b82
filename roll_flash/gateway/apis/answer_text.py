"""Split model output into text and tool calls in the model's own format.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, Llama 3 writes only
`{"name": ..., "parameters": {...}}`. An invalid call stays text, so that the agent sees it and can react.
Text after the first MAX_CALLS calls stays text too.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

from roll_flash.chat.model_text import MAX_CALLS, after_blanks, encodable
from roll_flash.gateway.model_call import ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_LLAMA_START = re.compile(r'\s*+(?:<\|python_tag\|>)?\s*+(?=\{\s*+"(?:name|type|function)")')
_SEPARATOR = re.compile(r"[; \n\t]*+")
_decoder = json.JSONDecoder(strict=False)  # models write raw newlines into strings


def split_tool_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return (text without the calls, calls). `names` are the declared tools; if empty, nothing is a call."""
    if not names:
        return text, ()
    if start := _LLAMA_START.match(text):
        calls = _bare_calls(text[start.end() :], names)
        if calls:
            return "", calls
    return _tagged_calls(text)


def _tagged_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    kept: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    for _ in range(MAX_CALLS):
        if (found := text.find(CALL_OPEN, position)) < 0:
            break
        start = after_blanks(text, found + len(CALL_OPEN))
        call, end = _decode(text, start)
        kept.append(text[position:found])
        if call is None:
            end = start
            kept.append(text[found:end])
        else:
            calls.append(call)
            after = after_blanks(text, end)
            end = after + len(CALL_CLOSE) if text.startswith(CALL_CLOSE, after) else end
        position = end
    kept.append(text[position:])
    return "".join(kept).strip(), tuple(calls)


def _bare_calls(text: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """Parse an answer that consists only of calls; empty if it does not."""
    calls: list[ToolCall] = []
    position = 0
    while position < len(text):
        if len(calls) == MAX_CALLS:
            return ()
        call, position = _decode(text, position)
        if call is None or call.name not in names:
            return ()
        calls.append(call)
        separator = _SEPARATOR.match(text, position)
        position = separator.end() if separator else position
    return tuple(calls)


def _decode(text: str, start: int) -> tuple[ToolCall | None, int]:
    """Parse the call at `start`; return it and its end. JSON decides the end: arguments may contain closing tags."""
    try:
        value, end = _decoder.raw_decode(text, start)
        return _call_of(value), end
    except (ValueError, RecursionError):  # also nesting that can be parsed but not serialised
        return None, start


def _call_of(value: Any) -> ToolCall | None:
    """Raises ValueError and RecursionError for arguments that JSON cannot represent."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(new_call_id(), encodable(name), encodable(text) or "{}")


def new_call_id() -> str:
    """Return nine letters and digits: chat templates of Mistral's models refuse ids of another form."""
    return uuid.uuid4().hex[:9]
