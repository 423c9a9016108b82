"""Bugs: one small change to a right program, such as `<` for `<=`, chosen so that some inputs show it."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll_flash.envs.repair_programs import DRAWERS

TESTS = 10
_TRIALS = 60
"""Inputs tried to find some that a bug fails on; a bug that none of them shows is not used."""

_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
}
_OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Repair:
    """A program with a bug. `expected` are the `repr`s of what a right program returns for `arguments`."""

    name: str
    about: str
    broken: str
    right: str
    arguments: tuple[tuple[Any, ...], ...]
    expected: tuple[str, ...]
    passing: int
    """How many of the tests the broken program passes already."""
    example: str
    """A call that fails, in words."""

    def __str__(self) -> str:
        return self.broken


def draw_repair(chance: random.Random) -> Repair:
    """A program, one bug in it, and `TESTS` inputs of which the broken program fails some."""
    while True:
        function = chance.choice(list(DRAWERS))
        broken = chance.choice(broken_versions(function))
        inputs = [DRAWERS[function](chance) for _ in range(_TRIALS)]
        right = [outcome(function, arguments) for arguments in inputs]
        wrong = [outcome(_function(broken, function.__name__), arguments) for arguments in inputs]
        failing = [index for index in range(_TRIALS) if right[index] != wrong[index]]
        if len(failing) < 2:
            continue
        shown, hidden = failing[0], failing[1 : 1 + TESTS // 2]
        others = [index for index in range(_TRIALS) if index not in failing]
        chosen = [*hidden, *others[: TESTS - len(hidden)]]
        return Repair(
            name=function.__name__,
            about=inspect.getdoc(function) or "",
            broken=broken,
            right=source_of(function),
            arguments=tuple(inputs[index] for index in chosen),
            expected=tuple(right[index] for index in chosen),
            passing=len(chosen) - len(hidden),
            example=_example(function.__name__, inputs[shown], right[shown], wrong[shown]),
        )


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """`repr` of what it returns, or the name of what it raises, as the grader in the sandbox says it."""
    try:
        return repr(function(*copy.deepcopy(arguments)))
    except Exception as error:  # a broken program may raise anything
        return f"raises {type(error).__name__}"


def source_of(function: Callable[..., Any]) -> str:
    return ast.unparse(ast.parse(inspect.getsource(function))) + "\n"


@functools.cache
def broken_versions(function: Callable[..., Any]) -> list[str]:
    """Every program that differs from the right one by one of the changes known here."""
    right = ast.parse(inspect.getsource(function))
    count = sum(1 for _ in _changes(right))
    broken: list[str] = []
    for index in range(count):
        tree = copy.deepcopy(right)
        list(_changes(tree))[index]()
        broken.append(ast.unparse(tree) + "\n")
    return sorted(set(broken) - {source_of(function)})


def _changes(tree: ast.AST) -> Iterator[Callable[[], None]]:
    """All changes that could be made to this tree, each to be called at most once."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
                yield functools.partial(_set, node, "ops", [_COMPARISONS[type(operator)]()])
            case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
                yield functools.partial(_set, node, "op", _OPERATORS[type(operator)]())
            case ast.Constant(value=bool(value)):
                yield functools.partial(_set, node, "value", not value)
            case ast.Constant(value=int(value)) if value < 500:
                yield functools.partial(_set, node, "value", value + 1)
            case ast.BoolOp(op=ast.And()):
                yield functools.partial(_set, node, "op", ast.Or())
            case ast.Subscript(slice=ast.Slice(lower=None, upper=ast.expr() as upper) as part):
                yield functools.partial(_swap_ends, part, upper)


def _set(node: ast.AST, attribute: str, value: Any) -> None:
    setattr(node, attribute, value)


def _swap_ends(part: ast.Slice, upper: ast.expr) -> None:
    part.lower, part.upper = upper, None


def _function(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile("from __future__ import annotations\n" + source, "program.py", "exec"), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def _example(name: str, arguments: tuple[Any, ...], right: str, wrong: str) -> str:
    call = f"{name}({', '.join(map(repr, arguments))})"
    gives = wrong if wrong.startswith("raises ") else f"returns {wrong}"
    return f"{call} should return {right}, but {gives}."
