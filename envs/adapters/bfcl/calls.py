"""Converts the calls that a model writes for BFCL's functions to Python source that is safe to run.

A model writes `[f(a=1), g(b="x")]`, as BFCL's prompt asks, or calls in a native format (`envs/tools/calls.py`), read as
in bfcl-eval (a bare name is a string, a call with keywords may be an argument), but positional arguments, which it
drops, are kept. The source contains only known functions and literals.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.chat.model_text import MAX_CALLS, MAX_COMPARED, parse_python_calls, without_thinking
from roll_flash.envs.tools.calls import BadCall, ToolCall, looks_native, parse_tool_calls
from roll_flash.envs.tools.functions import ToolDescription

FAILING_CALL = "no_such_function()"
"""Replaces a call that cannot be run: it fails in bfcl-eval's checker, as the model's own call did."""
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call. `source` is run, unless `error_text` is set, which is then shown to the model."""

    name: str
    source: str
    written: str
    """The call as the model wrote it, to show in results."""
    error_text: str = ""


def parse_calls(text: str, functions: Mapping[str, ToolDescription]) -> list[FunctionCall | BadCall]:
    """Return at most MAX_CALLS calls of a model's answer; empty if there are none, which ends the user's turn."""
    text = without_thinking(text)
    if looks_native(text):
        return [
            call if isinstance(call, BadCall) and not call.wanted else _of_native(call, functions, i < MAX_COMPARED)
            for i, call in enumerate(parse_tool_calls(text, functions))
        ]
    try:
        calls = _python_calls(text)
        found: list[FunctionCall | BadCall] = [
            _of_python(call, functions, i < MAX_COMPARED) for i, call in enumerate(calls[:MAX_CALLS])
        ]
    except (ValueError, RecursionError):  # also numbers and nesting beyond Python's limits
        return []
    return found if len(calls) <= MAX_CALLS else [*found, BadCall(f"Only the first {MAX_CALLS} calls were read")]


def call_source(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the source `f(a=1, b='x')` of a call with plain data."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _of_native(call: ToolCall | BadCall, functions: Mapping[str, ToolDescription], compares: bool) -> FunctionCall:
    """`compares`: say which function the model may have meant."""
    if isinstance(call, BadCall):
        return FunctionCall(call.wanted, FAILING_CALL, f"{call.wanted}()", _undefined(call.wanted, functions, compares))
    odd = [key for key in call.arguments if not key.isidentifier()]
    if odd:
        said = f"Error during execution: {call.name}() has no argument {odd[0]!r}"
        return FunctionCall(call.name, FAILING_CALL, call.name, said)
    try:
        source = call_source(call.name, call.arguments)
    except (ValueError, RecursionError) as error:
        return FunctionCall(call.name, FAILING_CALL, call.name, f"Error during execution: {error}")
    return FunctionCall(call.name, source, source)


def _python_calls(text: str) -> Sequence[ast.Call]:
    text = text.strip("`\n ")
    text = text if text.startswith("[") else "[" + text
    text = text if text.endswith("]") else text + "]"
    return parse_python_calls(text.strip("'"))


def _of_python(call: ast.Call, functions: Collection[str], compares: bool) -> FunctionCall:
    name, written = ast.unparse(call.func), ast.unparse(call)
    source = _source(call, functions)
    if name not in functions:
        return FunctionCall(name, FAILING_CALL, written, _undefined(name, functions, compares))
    return FunctionCall(name, source, written)


def _source(node: ast.expr, functions: Collection[str]) -> str:
    """Return source with only literals and calls of known functions. Raises ValueError for other code."""
    match node:
        case ast.Constant():
            return repr("..." if node.value is Ellipsis else node.value)
        case ast.Name():
            return repr(node.id)
        case ast.Subscript():
            return repr(ast.unparse(node))
        case ast.UnaryOp() | ast.BinOp() if all(isinstance(part, _ARITHMETIC) for part in ast.walk(node)):
            return ast.unparse(node)
        case ast.List() | ast.Tuple():
            parts = [_source(element, functions) for element in node.elts]
            return f"[{', '.join(parts)}]" if isinstance(node, ast.List) else f"({''.join(f'{p}, ' for p in parts)})"
        case ast.Dict():
            keys = [_source(key, functions) for key in node.keys if key is not None]
            values = [_source(value, functions) for value in node.values]
            if len(keys) == len(values):
                return "{" + ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True)) + "}"
        case ast.Call():
            return _call_source(node, functions)
    raise ValueError("neither literals nor calls")


def _call_source(call: ast.Call, functions: Collection[str]) -> str:
    name = ast.unparse(call.func)
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("an argument without a name")
    positional = [_source(value, functions) for value in call.args]
    named = [f"{keyword.arg}={_source(keyword.value, functions)}" for keyword in call.keywords]
    return f"{name}({', '.join([*positional, *named])})" if name in functions else FAILING_CALL


def _undefined(name: str, functions: Collection[str], compares: bool) -> str:
    near = difflib.get_close_matches(name, functions, n=1) if compares else []
    hint = f". Did you mean {near[0]}?" if near else ""
    return f"Error during execution: name '{name[:60]}' is not defined{hint}"
