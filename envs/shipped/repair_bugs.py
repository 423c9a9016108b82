"""Bugs: one small change to a correct program, such as `<` for `<=`, that changes the result of some inputs."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_flash.envs.shipped.repair_programs import DRAWERS

TESTS = 10
_TRIALS, _VISIBLE = 60, 4
"""A bug is used if at least `_VISIBLE` of `_TRIALS` random inputs show it."""

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
    """A program with a bug. `expected` are the `repr`s of a correct program's results for `arguments`."""

    name: str
    broken: str
    right: str
    arguments: tuple[tuple[Any, ...], ...]
    expected: tuple[str, ...]
    passing: int
    """Number of tests that the broken program already passes."""
    example: str
    """A failing call, in words."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A function and the source of a broken version of it."""

    function: Callable[..., Any]
    broken: str

    def __str__(self) -> str:
        return self.broken


def draw_bug(chance: random.Random) -> Bug:
    function = chance.choice(list(DRAWERS))
    return Bug(function, chance.choice(broken_versions(function)))


def make_repair(bug: Bug, chance: random.Random) -> Repair:
    """Return the bug with `TESTS` inputs, some of which fail, and one more failing input to show to the model.

    The inputs are in random order: a program that counts its calls would know from their places which fail, and a yes
    or no has only one other value. Their results differ: else a program that always returns the same would be right.
    """
    function, name = bug.function, bug.function.__name__
    failing: list[_Trial] = []
    passing: list[_Trial] = []
    while len(failing) < 2 or len(failing) + len(passing) < TESTS + 1 or _same([*failing[1:], *passing]):
        trial = _try(function, _function(bug.broken, name), chance)
        (failing if trial.wrong != trial.right else passing).append(trial)
    hidden = _varied(failing[1:])[: TESTS // 2]
    others = _varied(passing)[: TESTS - len(hidden)]
    chosen = [*hidden, *others]
    chance.shuffle(chosen)
    return Repair(
        name=name,
        broken=bug.broken,
        right=source_of(function),
        arguments=tuple(trial.arguments for trial in chosen),
        expected=tuple(trial.right for trial in chosen),
        passing=len(others),
        example=_example(name, failing[0]),
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    arguments: tuple[Any, ...]
    right: str
    wrong: str


def _same(trials: Sequence[_Trial]) -> bool:
    """Return True if all have the same right result."""
    return len({trial.right for trial in trials}) < 2


def _varied(trials: Sequence[_Trial]) -> list[_Trial]:
    """Return them in another order: those first whose right result came less often before them."""
    before = [sum(each.right == trial.right for each in trials[:place]) for place, trial in enumerate(trials)]
    return [trials[place] for place in sorted(range(len(trials)), key=before.__getitem__)]


def _try(function: Callable[..., Any], broken: Callable[..., Any], chance: random.Random) -> _Trial:
    arguments = DRAWERS[function](chance)
    return _Trial(arguments, outcome(function, arguments), outcome(broken, arguments))


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Return the `repr` of the result, or the name of the exception, in the format of the grader in the sandbox."""
    try:
        return repr(function(*copy.deepcopy(arguments)))
    except Exception as error:  # a broken program may raise anything
        return f"raises {type(error).__name__}"


def source_of(function: Callable[..., Any]) -> str:
    return ast.unparse(ast.parse(inspect.getsource(function))) + "\n"


@functools.cache
def broken_versions(function: Callable[..., Any]) -> list[str]:
    """Return every program that differs from the correct one by one known change and fails on enough inputs."""
    right = ast.parse(inspect.getsource(function))
    count = sum(1 for _ in _changes(right))
    broken: list[str] = []
    for index in range(count):
        tree = copy.deepcopy(right)
        list(_changes(tree))[index]()
        broken.append(ast.unparse(tree) + "\n")
    return [source for source in sorted(set(broken)) if _is_visible(function, source)]


def _is_visible(function: Callable[..., Any], broken: str) -> bool:
    chance = random.Random(0)
    trials = [_try(function, _function(broken, function.__name__), chance) for _ in range(_TRIALS)]
    return sum(trial.wrong != trial.right for trial in trials) >= _VISIBLE


def _changes(tree: ast.AST) -> Iterator[Callable[[], None]]:
    """Yield all possible changes of this tree, each to be called at most once."""
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


@functools.cache
def _function(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile("from __future__ import annotations\n" + source, "program.py", "exec"), namespace)
    found: Callable[..., Any] = namespace[name]
    return found


def _example(name: str, trial: _Trial) -> str:
    call = f"{name}({', '.join(map(repr, trial.arguments))})"
    gives = trial.wrong if trial.wrong.startswith("raises ") else f"returns {trial.wrong}"
    return f"{call} should return {trial.right}, but {gives}."
