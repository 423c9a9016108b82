"""Parse and check request fields; errors name the wrong field."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from roll_flash.chat.model_text import MAX_DEPTH, MAX_VALUES, has_more_values, is_deeper
from roll_flash.gateway.apis.api_error import ApiError, bad_request, unsupported
from roll_flash.types import Message

MAX_ANSWERS = 128
MAX_MARKS = 250_000
"""Maximum commas and opening brackets in one body: this many values block the whole process for 0.1 s."""
MAX_STRINGS, MAX_STRING_CHARACTERS = 32, 1024
"""Servers search for each stop string at each token."""
MAX_TOP_K = 1 << 24
"""Larger than any vocabulary; servers store it in 32 bits."""


def decode_object(content: bytes) -> dict[str, Any]:
    """Parse the body of a request. Raises ApiError for anything but a JSON object of bounded size and depth."""
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > MAX_MARKS:
        raise ApiError(413, "request_too_large", f"the body has more than {MAX_MARKS} commas and brackets")
    try:
        body = _decoded(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    if is_deeper(body, MAX_DEPTH):
        raise bad_request(f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    return body


def _decoded(content: bytes) -> Any:
    """Decode without the garbage collector, which would otherwise scan the whole process repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(content)
    finally:
        if was_enabled:
            gc.enable()


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}", name)
    return float(value)


def whole(body: Mapping[str, Any], name: str, low: int = 1, high: int = 1 << 62) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_request(f"{name} must be a whole number of at least {low}, not {_shown(value)}", name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, not {_shown(value)}", name)
    return bool(value)


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read one string or a list of strings."""
    value = body.get(name)
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise bad_request(f"{name} must be a string or a list of strings, not {_shown(value)}", name)
    if len(found) > MAX_STRINGS or any(len(text) > MAX_STRING_CHARACTERS for text in found):
        raise bad_request(f"{name}: at most {MAX_STRINGS} strings of {MAX_STRING_CHARACTERS} characters", name)
    return tuple(text for text in found if text)


def text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}{name} must be a string, not {_shown(value)}", f"{where}{name}")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{name} must be a list of objects, not {_shown(value)}", name)
    return value


def content_text(content: Any, where: str) -> str:
    """Return text, or the joined text of parts. Raises ApiError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts, not {_shown(content)}", where)
    return "\n".join(_part_text(part, where) for part in content)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_request(f"{where}: a part must be an object, not {_shown(part)}", where)
    if part.get("type") == "refusal":
        return text(part, "refusal", f"{where}.")
    if part.get("type") not in ("text", "input_text", "output_text"):
        raise unsupported(where, f"parts of type {part.get('type')!r} cannot be given to this model; send text")
    return text(part, "text", f"{where}.")


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a declared tool in OpenAI's form. Raises ApiError for an invalid one, and for a schema of so many values
    that to sort them, in one piece, would block the whole process."""
    if not isinstance(name, str) or not name:
        raise bad_request("a tool must have a name", "tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_request(f"tool {name[:60]}: its parameters must be a JSON schema", "tools")
    if parameters and has_more_values(parameters, MAX_VALUES):
        raise bad_request(f"tool {name[:60]}: its schema has more than {MAX_VALUES} values", "tools")
    schema = parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": str(description or ""), "parameters": schema},
    }


def refuse(body: Mapping[str, Any], name: str, harmless: Sequence[Any], why: str) -> None:
    """Reject a field that would change sampling and is not supported, instead of ignoring it."""
    if body.get(name) is not None and body[name] not in harmless:
        raise unsupported(name, why)


def require_conversation(messages: Sequence[Message], param: str) -> tuple[Message, ...]:
    if not messages:
        raise bad_request(f"{param} must hold at least one message", param)
    return tuple(messages)


def _shown(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case dict() | list():
            return "an object" if isinstance(value, dict) else "a list"
        case str():
            return json.dumps(value[:60])
    return json.dumps(value)[:60]
