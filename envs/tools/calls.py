"""Parser of tool calls in the text of a model, for all common formats.

- Hermes and Qwen: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them;
- Llama 3: the whole answer is `{"name": "add", "parameters": {"a": 1}}`, several separated by `;`;
- Mistral: `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, or `[TOOL_CALLS]add[ARGS]{"a": 1}`, also without the
  tokens in brackets, which decoding drops if they are special;
- Llama 3.2 and 4: the whole answer is a list of Python calls, `[add(a=1), add(a=2)]`;
- tags: `<add>{"a": 1, "b": 2}</add>`, `<add a="1" b="2"/>`, or `<sh>ls</sh>` if only one argument remains.

Text in `<think>` is never a call. Text that looks like a call but is invalid becomes a `BadCall`.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.chat.model_text import (
    MAX_CALLS,
    MAX_COMPARED,
    MAX_DEPTH,
    MAX_VALUES,
    after_blanks,
    has_more_values,
    is_deeper,
    parse_python_calls,
    unescaped,
    without_thinking,
)
from roll_flash.envs.tools.functions import ToolDescription

UNKNOWN = "(unknown)"
"""Name under which calls of unknown tools are counted."""

ANSWER_TAG = "answer"
RESERVED_NAMES = (ANSWER_TAG, "tool_call", "think")
"""Names that no tool can have, because they mean something else in a model's text."""

_LLAMA_START = re.compile(r'\s*+(?:<\|python_tag\|>)?\s*+(?=\{\s*+"(?:name|type|function)")')
_MISTRAL = "[TOOL_CALLS]"
_LIST_START = re.compile(r'\s*+(?=\[\s*+\{\s*+"(?:name|type|function)")')
_NAMED_JSON = re.compile(r"\s*+([A-Za-z_]\w*+)\s*+(?:\[CALL_ID\]\w*+)?\s*+(?:\[ARGS\])?\s*+(?=\{)")
_PYTHON_START = re.compile(r"\s*+(?:<\|python_start\|>)?\s*+(?=\[\s*+[A-Za-z_][\w.]*+\()")
_ONE_TAG = re.compile(r"\s*+<([A-Za-z_]\w*+)((?:\s[^<>]*+)?)>(.*)</\1>", re.DOTALL)
_ATTRIBUTE = re.compile(r"(?<!\w)([A-Za-z_]\w*+)\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)')")
_SEPARATOR = re.compile(r"[; \n\t]*+")
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_decoder = json.JSONDecoder(strict=False)  # models write raw newlines into strings


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; its arguments are not yet checked."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """An invalid call. `message` tells the model the error."""

    message: str
    name: str = UNKNOWN
    wanted: str = ""
    """The name that the model called, if no tool has that name."""


def parse_tool_calls(text: str, tools: Mapping[str, ToolDescription]) -> list[ToolCall | BadCall]:
    """Return at most MAX_CALLS calls in the order of the text; empty if there are none."""
    text = without_thinking(text)
    if start := _LLAMA_START.match(text):
        return _bounded(_json_calls(text[start.end() :], tools), tools)
    if _MISTRAL in text:
        parts = [part for part in text.split(_MISTRAL)[1:] if part.strip()]
        return _bounded([call for part in parts[: MAX_CALLS + 1] for call in _mistral_calls(part, tools)], tools)
    if _LIST_START.match(text) or ((match := _NAMED_JSON.match(text)) and match[1] in tools):
        return _bounded(_mistral_calls(text, tools), tools)
    if start := _PYTHON_START.match(text):
        return _bounded(_python_calls(text[start.end() :].replace("<|python_end|>", "").strip(), tools), tools)
    found = _bounded(_tagged_calls(text, tools), tools)
    if not found and (match := _ONE_TAG.fullmatch(text.rstrip())) and match[1] not in (ANSWER_TAG, *tools):
        return _bounded([_unknown(match[1], tools)], tools)
    return found


def _bounded(calls: list[ToolCall | BadCall], tools: Mapping[str, ToolDescription]) -> list[ToolCall | BadCall]:
    kept = [_bounded_call(call) for call in calls[:MAX_CALLS]]
    wrong = [(i, call.wanted) for i, call in enumerate(kept) if isinstance(call, BadCall) and call.wanted]
    for place, name in wrong[:MAX_COMPARED]:
        kept[place] = _unknown(name, tools, difflib.get_close_matches(name, tools, n=1))
    if len(calls) <= MAX_CALLS:
        return kept
    return [*kept, BadCall(f"Only the first {MAX_CALLS} calls were read")]


def _bounded_call(call: ToolCall | BadCall) -> ToolCall | BadCall:
    if isinstance(call, BadCall):
        return call
    if has_more_values(call.arguments, MAX_VALUES):
        return BadCall(f"{call.name}: its arguments have more than {MAX_VALUES} values", call.name)
    if is_deeper(call.arguments, MAX_DEPTH):
        return BadCall(f"{call.name}: its arguments are nested more than {MAX_DEPTH} deep", call.name)
    return call


def looks_native(text: str) -> bool:
    """Return True if the text, without its thinking, has calls in one of the native JSON formats."""
    return (
        _HERMES_OPEN in text
        or _MISTRAL in text
        or _LLAMA_START.match(text) is not None
        or _LIST_START.match(text) is not None
    )


def _mistral_calls(text: str, tools: Mapping[str, ToolDescription]) -> list[ToolCall | BadCall]:
    """Parse a JSON list of calls, or a name followed by its arguments."""
    named = _NAMED_JSON.match(text)
    start = named.end() if named else after_blanks(text, 0)
    try:
        value, _ = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return [_bad_json(error, start)]
    if named:
        return [_call_of({"name": named[1], "arguments": value}, tools)]
    entries = value if isinstance(value, list) else [value]
    return [_call_of(entry, tools) for entry in entries[: MAX_CALLS + 1]]


def _python_calls(text: str, tools: Mapping[str, ToolDescription]) -> list[ToolCall | BadCall]:
    """Parse a list of calls with literal arguments; text that only starts like one gives no calls."""
    try:
        found = parse_python_calls(text)
    except ValueError as error:
        name = text[1 : text.index("(")].strip()
        return [BadCall(f"The calls are not a valid Python list{error}", name)] if name in tools else []
    try:
        return [_python_call(call, tools) for call in found[: MAX_CALLS + 1]]
    except RecursionError:
        return [BadCall("The calls are nested too deeply")]


def _python_call(call: ast.Call, tools: Mapping[str, ToolDescription]) -> ToolCall | BadCall:
    name = ast.unparse(call.func)
    if name not in tools:
        return _unknown(name, tools)
    names = tools[name].argument_names
    if len(call.args) > len(names):
        return BadCall(f"{name}: it takes {len(names)} arguments, {len(call.args)} were given", name)
    given = [*zip(names, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    try:
        arguments = {str(key): ast.literal_eval(value) for key, value in given}
        json.dumps(arguments)  # bytes, sets and their like, which the other formats cannot say
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return BadCall(f"{name}: its arguments must be plain values, such as 1, 'text' or [1, 2]", name)
    return ToolCall(name, arguments)


def _tagged_calls(text: str, tools: Mapping[str, ToolDescription]) -> list[ToolCall | BadCall]:
    names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True))
    opening = re.compile(rf"<(?:tool_call|(?:{names})(?:\s[^<>]*?)?/?)>" if names else "<tool_call>")
    found: list[ToolCall | BadCall] = []
    position = 0
    while len(found) <= MAX_CALLS and (match := opening.search(text, position)):
        if match[0] == _HERMES_OPEN:
            call, position = _hermes_call(text, match.end(), tools)
        else:
            call, position = _tag_call(text, match, tools)
        found.append(call)
    return found


def _hermes_call(text: str, start: int, tools: Mapping[str, ToolDescription]) -> tuple[ToolCall | BadCall, int]:
    """Parse one call. The JSON decoder finds its end, because an argument may contain the closing tag."""
    start = after_blanks(text, start)
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        close = text.find(_HERMES_CLOSE, start)
        return _bad_json(error, start), len(text) if close < 0 else close + len(_HERMES_CLOSE)
    close = after_blanks(text, end)
    if text.startswith(_HERMES_CLOSE, close):
        end = close + len(_HERMES_CLOSE)
    return _call_of(value, tools), end


def _json_calls(text: str, tools: Mapping[str, ToolDescription]) -> list[ToolCall | BadCall]:
    found: list[ToolCall | BadCall] = []
    position = 0
    while position < len(text) and len(found) <= MAX_CALLS:
        try:
            value, position = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return [*found, _bad_json(error, 0)]
        found.append(_call_of(value, tools))
        separator = _SEPARATOR.match(text, position)
        position = separator.end() if separator else position
        if not text.startswith("{", position):
            break
    return found


def _call_of(value: Any, tools: Mapping[str, ToolDescription]) -> ToolCall | BadCall:
    if not isinstance(value, dict):
        return BadCall('A call is a JSON object: {"name": TOOL, "arguments": {...}}')
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = inner if isinstance(inner, str) else value.get("name")
    if not isinstance(name, str):
        return BadCall('The call has no "name": write {"name": TOOL, "arguments": {...}}')
    if name not in tools:
        return _unknown(name, tools)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        try:
            arguments = _decoder.decode(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"{name}: its arguments: {_bad_json(error, 0).message}", name)
    if not isinstance(arguments, dict):
        return BadCall(f'{name}: "arguments" must be a JSON object such as {_example(tools[name])}', name)
    return ToolCall(name, arguments)


def _tag_call(text: str, match: re.Match[str], tools: Mapping[str, ToolDescription]) -> tuple[ToolCall | BadCall, int]:
    name_and_attributes = match[0].strip("<>").removesuffix("/")
    name, _, attributes = name_and_attributes.partition(next((c for c in name_and_attributes if c.isspace()), " "))
    texts = {
        found[1]: unescaped(found[2] if found[2] is not None else found[3]) for found in _ATTRIBUTE.finditer(attributes)
    }
    given = {argument: _value_of(tools[name], argument, text) for argument, text in texts.items()}
    if match[0].endswith("/>"):
        return ToolCall(name, given), match.end()
    close = text.find(f"</{name}>", match.end())
    if close < 0:
        return BadCall(f"<{name}> is not closed: end it with </{name}>", name), len(text)
    call = _with_body(tools[name], given, text[match.end() : close])
    return call, close + len(name) + 3


def _with_body(tool: ToolDescription, given: dict[str, Any], body: str) -> ToolCall | BadCall:
    """Parse the text between the tags: a JSON object of arguments, or the value of the only remaining argument."""
    left = [name for name in tool.argument_names if name not in given]
    if body.lstrip().startswith("{") and not given:
        try:
            value = _decoder.decode(body)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and set(value) <= set(left):
            return ToolCall(tool.name, value)
    if not body.strip():
        return ToolCall(tool.name, {**given, left[0]: ""} if len(left) == 1 and given else given)
    required = [name for name in left if name in tool.parameters.get("required", ())]
    target = left[0] if len(left) == 1 else required[0] if len(required) == 1 else None
    if target is None:
        return BadCall(
            f"{tool.name}: write its arguments as JSON: <{tool.name}>{_example(tool)}</{tool.name}>", tool.name
        )
    return ToolCall(tool.name, {**given, target: _value_of(tool, target, body.removeprefix("\n").removesuffix("\n"))})


def _value_of(tool: ToolDescription, argument: str, text: str) -> Any:
    """Return the text of an argument in tags; if it must be a list or an object, the one that the text is as JSON."""
    kinds = _kinds(tool.parameters, tool.parameters.get("properties", {}).get(argument))
    if "string" in kinds or kinds.isdisjoint(("array", "object")):
        return text
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        return text


def _kinds(schema: Mapping[str, Any], part: Any, depth: int = 3) -> set[str]:
    """Return the JSON types that a part of a schema allows, as far as it says so in `type`, `anyOf` and `$ref`."""
    if not isinstance(part, Mapping) or not depth:
        return set()
    if isinstance(name := part.get("$ref"), str) and isinstance(known := schema.get("$defs"), Mapping):
        return _kinds(schema, known.get(name.rpartition("/")[2]), depth - 1)
    if isinstance(options := part.get("anyOf"), list):
        return {kind for option in options for kind in _kinds(schema, option, depth - 1)}
    return {str(part.get("type"))}


def _example(tool: ToolDescription) -> str:
    return json.dumps(dict.fromkeys(tool.argument_names, "..."))


def _unknown(name: str, tools: Mapping[str, ToolDescription], near: Sequence[str] = ()) -> BadCall:
    hint = f" Did you mean {near[0]}?" if near else ""
    return BadCall(f"There is no tool {name[:60]!r}.{hint} Tools: {', '.join(tools) or 'none'}", wanted=name)


def _bad_json(error: Exception, start: int) -> BadCall:
    if isinstance(error, json.JSONDecodeError):
        return BadCall(f"The call is not valid JSON: {error.msg} at character {max(0, error.pos - start) + 1}")
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:80]
    return BadCall(f"The call is not valid JSON: {reason}")
