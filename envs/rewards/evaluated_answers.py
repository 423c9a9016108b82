"""Guard for third-party scorers that evaluate an answer as Python, with `eval` or sympy's `parse_expr` (uses `eval`).

There a model's answer is a program, which could read the right answer or claim to be right. Only text that names no
code is passed on: data, and for sympy arithmetic that takes little time.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import re
import sys
from typing import Any

MAX_CHARACTERS = 5_000
MAX_BITS = 2_000.0
"""Approximate limit on the bits of any number in an expression: `9**9**9` would hold the GIL for ever."""
FUNCTIONS = frozenset(
    [
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
        *("exp", "log", "ln", "sqrt", "Abs", "abs"),
    ]
)
JSON_WORDS = frozenset({"true", "false", "null"})
_EVALUATES = re.compile(r"\b(?:eval|exec|compile)\s*\(")
_USES_SYMPY = re.compile(r"^\s*(?:import|from)\s+sympy\b", re.MULTILINE)
_NON_PLAIN_NUMERAL = re.compile(r"(?<![\w.])[0-9.]+[A-Za-z_]|#")
"""Numerals other than plain ones, and comments. Their exponents may be huge (`1e-999999999` is 0 to Python and a
fraction to sympy), and scorers that search an answer for numbers read `0x7b` and `# 3 5` differently."""
_NOT_FINITE = re.compile(r"(?<![^\W\d_])(?:nan|inf|infinity)[ij]?(?![^\W\d_])", re.IGNORECASE)
"""`min(1.0, nan)` is 1.0, and no distance to NaN exceeds a tolerance: scorers accept it as the right answer."""
_ESCAPED = re.compile(r"\\(?:u00[4-7]|U0000|x[4-7]|1[0-7][0-7]|N\{)|[A-Za-z]\\\r?\n[A-Za-z]")
"""Letters written as escapes in JSON and Python strings."""
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub)
_PARSES = re.compile(r"\b(?:parse_expr|sympify|S)\s*\(")


class UnsafeAnswerError(Exception):
    """An answer that is neither data nor plain arithmetic."""


def check_answer(answer: str, scorer: Any, right: str = "") -> None:
    """Check that `scorer`, an object of any class, can safely score the answer. Raises UnsafeAnswerError if the
    scorer would run it as code or mistake it for the right answer."""
    if any(map(str.isdigit, right)) and _could_be_non_finite(answer) and not _could_be_non_finite(right):
        raise UnsafeAnswerError("it is no finite number")
    source = _source_of(type(scorer))
    with_sympy = bool(_USES_SYMPY.search(source) and _PARSES.search(source))
    if not with_sympy and not _EVALUATES.search(source):
        return
    try:
        tree = _parsed(answer)
        if tree is None and not with_sympy:
            return  # not valid Python, so it is not run; sympy's syntax is larger than Python's
        if with_sympy and _NON_PLAIN_NUMERAL.search(answer):
            tree = None
        if tree is not None and with_sympy and _exceeds_arithmetic(tree, _parsed(right)):
            tree = None
        if tree is None or (_bits(tree) > MAX_BITS if with_sympy else not _is_data(tree, source)):
            raise UnsafeAnswerError("it is not plain arithmetic" if with_sympy else "it is not plain data")
    except RecursionError:
        raise UnsafeAnswerError("it is nested too deeply") from None


def _could_be_non_finite(text: str) -> bool:
    """Return True also for scorers that first remove blanks, or that read `i` as the imaginary unit."""
    return bool(_NOT_FINITE.search(text) or _NOT_FINITE.search("".join(text.split())) or _ESCAPED.search(text))


def _source_of(scorer: type[Any]) -> str:
    """Return the source of the modules of the class and its bases. Missing source counts as code that evaluates."""
    try:
        modules = [sys.modules[base.__module__] for base in scorer.__mro__ if base is not object]
        return "\n".join(inspect.getsource(module) for module in modules)
    except (OSError, TypeError, KeyError):
        return "eval("


def _parsed(answer: str) -> ast.expr | None:
    """Return None for text that is not an expression. Raises UnsafeAnswerError, RecursionError."""
    if len(answer) > MAX_CHARACTERS:
        raise UnsafeAnswerError(f"it is longer than {MAX_CHARACTERS} characters")
    try:
        return ast.parse(answer, mode="eval").body
    except SyntaxError:
        return None
    except (ValueError, MemoryError):
        raise UnsafeAnswerError("it cannot be read") from None


def _is_data(node: ast.expr, source: str) -> bool:
    """Return True for data. A word unknown to Python and the scorer is text: evaluating it fails."""
    match node:
        case ast.Constant():
            return True
        case ast.Name():
            is_known = hasattr(builtins, node.id) or re.search(rf"\b{re.escape(node.id)}\b", source)
            return node.id in JSON_WORDS or not (is_known or node.id.startswith("_"))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=ast.Constant(value=int() | float())):
            return True
        case ast.List() | ast.Tuple():
            return all(_is_data(item, source) for item in node.elts)
        case ast.Dict():
            return all(item is not None and _is_data(item, source) for item in (*node.keys, *node.values))
    return False


def _exceeds_arithmetic(tree: ast.expr, right: ast.expr | None) -> bool:
    """Return True if it has more than integers and basic arithmetic although the right answer has only these.

    With names (`x/x`, `log(E)`) one can write any number without using the given numbers.
    """

    def is_plain(node: ast.AST) -> bool:
        return isinstance(node, _ARITHMETIC) or (isinstance(node, ast.Constant) and type(node.value) is int)

    return right is not None and all(map(is_plain, ast.walk(right))) and not all(map(is_plain, ast.walk(tree)))


def _bits(node: ast.expr) -> float:
    """Return an upper estimate of the bits of the expression's value; infinite for anything but arithmetic."""
    match node:
        case ast.Constant(value=bool()):  # a bool is also a number
            return math.inf
        case ast.Constant(value=int() | float() | complex() as value):
            return math.log2(abs(value) + 2) if abs(value) < math.inf else math.inf
        case ast.Name() if not node.id.startswith("_") and not hasattr(builtins, node.id):
            return 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            return _bits(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_bits(node.left), _bits(node.right))
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return _bits(node.left) + _bits(node.right)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return max(_bits(node.left), _bits(node.right)) + 1
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return _power(2.0, _bits(argument))
    return math.inf


def _power(base_bits: float, exponent_bits: float) -> float:
    return base_bits * math.pow(2.0, min(exponent_bits, 1000.0))
