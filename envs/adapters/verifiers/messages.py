"""Conversion of messages of the package verifiers to ours, and of the model's text to their responses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll_flash.envs.tools.calls import UNKNOWN, BadCall, ToolCall
from roll_flash.envs.tools.functions import NOT_FINITE, ToolDescription, are_finite
from roll_flash.envs.tools.prompt import ToolFormat, show_results
from roll_flash.types import Message

MODEL = "policy"
_CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


def tools_of(definitions: Sequence[Any]) -> dict[str, ToolDescription]:
    return {
        tool.name: ToolDescription(tool.name, tool.description or "", dict(tool.parameters)) for tool in definitions
    }


def as_messages(theirs: Sequence[Any], tool_format: ToolFormat) -> list[Message]:
    """Convert messages. Consecutive tool results become one message, in the format of the tool descriptions."""
    found: list[Message] = []
    results: list[str] = []
    for message in theirs:
        role = str(message["role"])
        if role == "tool":
            results.append(_text(message.get("content")))
            continue
        if results:
            found += show_results(results, tool_format)
            results = []
        text = _text(message.get("content"))
        calls = message.get("tool_calls") or () if role == "assistant" else ()
        written = [f"<tool_call>\n{_written(call)}\n</tool_call>" for call in calls]
        found.append({"role": "user" if role == "text" else role, "content": "\n".join(filter(None, [text, *written]))})
    return found + (show_results(results, tool_format) if results else [])


def checked_call(call: ToolCall | BadCall) -> ToolCall | BadCall:
    """Refuse numbers that JSON does not have: the package passes arguments to its tools as they are."""
    if isinstance(call, BadCall) or are_finite(call.arguments):
        return call
    return BadCall(f"{call.name}: {NOT_FINITE}", call.name)


def as_response(package: Any, action: str, calls: Sequence[ToolCall | BadCall]) -> Any:
    """Return the model's turn as verifiers' client would parse it. A bad call keeps its place and number."""
    written = [
        package.ToolCall(
            id=call_id(number),
            # A bad call is not made: a tool may have defaults for all of its arguments.
            name=call.name if isinstance(call, ToolCall) else UNKNOWN,
            arguments=json.dumps(dict(call.arguments) if isinstance(call, ToolCall) else {}),
        )
        for number, call in enumerate(calls)
    ]
    message = package.ResponseMessage(
        content=_before_calls(action) if calls else action,
        tool_calls=written or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return package.Response(id="turn", created=0, model=MODEL, message=message)


def call_id(number: int) -> str:
    return f"call-{number}"


def explain_bad_calls(answers: Sequence[Any], calls: Sequence[ToolCall | BadCall]) -> None:
    """Replace the package's answer to a bad call, which is only `'name'`, by the error message for the model."""
    wrong = {call_id(number): call.message for number, call in enumerate(calls) if isinstance(call, BadCall)}
    for answer in answers:
        if answer["role"] == "tool" and answer["tool_call_id"] in wrong:
            answer["content"] = f"Error: {wrong[answer['tool_call_id']]}"


def _before_calls(action: str) -> str:
    starts = [at for mark in _CALL_MARKS if (at := action.find(mark)) >= 0]
    return action[: min(starts)].strip() if starts else ""


def _written(call: Any) -> str:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    return json.dumps({"name": call["name"], "arguments": arguments})


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else dict(part) for part in content]
    return "\n".join(str(part.get("text", f"({part.get('type')})")) for part in parts)
