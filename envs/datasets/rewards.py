"""Ready reward functions for answers, and the call of the user's own.

Each takes what the model answered and what the row expects, and returns 0 to 1. What a model wrote can make a parser
slow, so those that parse with a library run in a process with limits (`rewards/scoring_process.py`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import re
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from roll_flash.chat.model_text import decimal_number, is_deeper
from roll_flash.config.sections.data import RewardConfig
from roll_flash.config.user_code import load_function
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.rewards.functions import RewardOptions, options_of
from roll_flash.envs.rewards.scoring_process import ScoringEndedError, score_in_subprocess
from roll_flash.errors import ConfigError, EnvError, first_line

USERS_PARAMETERS = ("completion", "answer", "expected", "messages", "row")
"""What a function of the user may take: the model's last text, the answer in it, the row's answer, the prompt as chat,
and the row's other columns."""
MATH_S = 10.0
TEST_S = 10.0
ALL_TESTS_S = 40.0
"""Seconds of all tests of a program together: less than a reward and a step may take, because an episode that takes
longer fails and gives no sample, and an endless loop is the model's own failure."""
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")


def exact(answer: str, expected: Any, *, ignore_case: bool = True) -> float:
    """1 if the answer is the expected text, or one of a list of texts; numbers of blanks do not count."""
    wanted = expected if isinstance(expected, list) else [expected]
    given = _plain(answer, ignore_case)
    return float(bool(given) and given in [_plain(_text(one), ignore_case) for one in wanted if one is not None])


def number(answer: str, expected: Any, *, tolerance: float = 1e-6) -> float:
    """1 if the answer is the expected number, within `tolerance` of its size (of 1 for 0). Reads `1,234`, `$5` and
    `50%`."""
    found, wanted = _number(answer), _number(_text(expected))
    if wanted is None:
        raise EnvError(f"reward number: the row expects {expected!r}, which is no number")
    return float(found is not None and abs(found - wanted) <= tolerance * (abs(wanted) or 1.0))


def math(answer: str, expected: Any) -> float:
    """1 if both are the same expression or number, by the package math-verify: LaTeX, fractions, sets, equations."""
    import_optional("math_verify", package="math-verify[antlr4_13_2]", needed_by="reward math")
    if is_empty(answer) or is_empty(expected):
        return 0.0
    work = partial(_verify, answer[:MAX_MATH_CHARACTERS], _text(expected))
    return float(_limited(work, modules=("math_verify",), seconds=MATH_S))


MAX_MATH_CHARACTERS = 2000
DECIMALS, PRECISION = 6, 15
"""Decimals and digits that math-verify compares. An expected number below 0.001 needs more: else `0.0` would
be any that is small enough."""
FIRST_SMALL = 3
"""Decimals of 0.001."""
SIZE_DIGITS = 4


def regex(answer: str, expected: Any, *, pattern: str | None = None) -> float:
    """1 if a pattern is found in the answer: `pattern`, where `{expected}` is the row's answer, or the row's answer.

    An empty answer earns nothing, whatever the pattern. A pattern that takes too long to compile is no pattern.
    """
    chosen = _text(expected) if pattern is None else pattern.replace("{expected}", re.escape(_text(expected)))
    try:
        found = score_in_subprocess(partial(_search, chosen, answer))
    except ScoringEndedError:
        found = _fault_of_slow_pattern(chosen)
    if isinstance(found, str):
        raise EnvError(f"reward regex: {chosen[:200]!r} is no pattern: {found}")
    return float(found)


def json_schema(answer: str, expected: Any, *, schema: Mapping[str, Any] | None = None) -> float:
    """1 if the answer is JSON that fits a schema: `schema`, or that in the row. A fence of backticks is left out."""
    chosen = schema if schema is not None else expected
    try:
        chosen = json.loads(chosen) if isinstance(chosen, str) else chosen
    except (ValueError, RecursionError):
        raise EnvError(f"reward json_schema: {repr(chosen)[:200]} is no schema: it is no JSON") from None
    if not isinstance(chosen, Mapping):
        raise EnvError(f"reward json_schema: {chosen!r} is no schema: it is no object")
    found = _limited(partial(_fits, answer, dict(chosen)), modules=("jsonschema", "referencing.exceptions"))
    if isinstance(found, str):
        raise EnvError(f"reward json_schema: {chosen!r} is no schema: {found}")
    return float(found)


READY: dict[str, Callable[..., float]] = {
    "exact": exact,
    "number": number,
    "math": math,
    "regex": regex,
    "json_schema": json_schema,
}
IN_SANDBOX = "python_tests"
QUICK = ("exact", "number")
"""Rewards that need no thread."""
ANY_TEXT = ("exact", "math", "regex")
"""Rewards for which every text is an answer."""
JUDGE = "judge"


def check_reward(function: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for a reward that does not exist, or does not take its arguments."""
    if function == JUDGE:
        raise ConfigError(
            "reward judge: a judge is a stage, which scores while other episodes go on; add it to stages (docs/data.md "
            "has an example), with reward: replace if nothing else counts"
        )
    found = python_tests if function == IN_SANDBOX else READY.get(function) or _users_function(function)
    parameters = inspect.signature(found).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    unknown = [name for name in kwargs if name not in parameters]
    if unknown and not takes_all:
        takes = ", ".join(name for name in parameters if name not in USERS_PARAMETERS) or "none"
        raise ConfigError(f"reward {function}: there is no argument {unknown[0]!r}; it takes {takes}")
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in _VARIADIC]
    missing = [name for name in needed if name not in (*USERS_PARAMETERS, *kwargs)]
    if missing:
        raise ConfigError(
            f"reward {function}: nothing gives its argument {missing[0]!r}; it may take {', '.join(USERS_PARAMETERS)}, "
            "and what kwargs name"
        )
    if (options := options_of(found)) is not None and options != RewardOptions():
        raise ConfigError(
            f"reward {function}: arguments of @reward are for methods of an environment and are not read here; remove "
            f"the decorator, and write weight: {options.weight:g} beside function in the config"
        )
    if function == IN_SANDBOX:
        python_tests("", "", **kwargs)


def python_tests(answer: str, expected: Any, *, timeout_s: float = TEST_S) -> None:
    """Check the arguments of the reward that only a sandbox can compute (`DatasetEnv`). Raises ConfigError."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= ALL_TESTS_S:
        raise ConfigError(
            f"reward {IN_SANDBOX}: timeout_s is {timeout_s!r}; the seconds of one test are above 0 and at most "
            f"{ALL_TESTS_S:g}, which all tests of a program have together"
        )


def read_tests(expected: Any) -> str | list[Mapping[str, str]]:
    """Return the row's tests: Python code, or what the program reads and must print. Raises ValueError."""
    try:
        tests = json.loads(expected) if isinstance(expected, str) and expected.lstrip().startswith("[") else expected
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if isinstance(tests, str):
        return tests
    is_list = isinstance(tests, list) and tests and all(isinstance(test, Mapping) for test in tests)
    if not is_list or not all(isinstance(test.get(key), str) for test in tests for key in ("input", "output")):
        raise ValueError("tests are Python code or a list of {input, output}, both texts")
    return list(tests)


def check_code_of_tests(expected: Any, place: str) -> None:
    """Raises ConfigError for tests that are Python code which cannot run, or which every program passes."""
    tests = read_tests(expected)
    if not isinstance(tests, str):
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            found = [type(node) for node in ast.walk(ast.parse(tests))]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{place}: reward {IN_SANDBOX} needs tests: this is no Python: {first_line(error)}") from None
    if not {ast.Assert, ast.Raise, ast.Call}.intersection(found):
        raise ConfigError(
            f"{place}: reward {IN_SANDBOX} needs tests, such as `assert double(3) == 6`; every program passes "
            f"{tests!r:.60}"
        )


def reads_answer(reward: RewardConfig) -> bool:
    """Return True if the reward cannot be computed without the row's answer."""
    if reward.function == "regex":
        pattern = reward.kwargs.get("pattern")
        return pattern is None or "{expected}" in str(pattern)
    if reward.function == "json_schema":
        return reward.kwargs.get("schema") is None
    if reward.function in (*READY, IN_SANDBOX):
        return True
    expected = inspect.signature(_users_function(reward.function)).parameters.get("expected")
    return expected is not None and expected.default is expected.empty


def reads_row(reward: RewardConfig) -> bool:
    """Return True if the reward may read other columns of a row than prompt and answer."""
    if reward.function in (*READY, IN_SANDBOX):
        return False
    parameters = inspect.signature(_users_function(reward.function)).parameters
    return "row" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def fault_of_answer(reward: RewardConfig, expected: Any) -> str:
    """Return what the reward needs instead of this answer of a row, or an empty text. Only what is quick is checked; a
    function of the user may expect anything."""
    function = reward.function
    if function not in READY and function != IN_SANDBOX:
        return ""
    if is_empty(expected):
        return "needs an answer, not an empty one"
    if type(expected) is str and function in ANY_TEXT:  # most rows, and there may be a million
        return ""
    if function in (*ANY_TEXT, "number") and not _is_text(expected):
        return "needs a text, a number, or a list of these"
    if function == "number" and _number(_text(expected)) is None:
        return "needs a number, of at most 308 digits; `exact` compares others"
    if function == IN_SANDBOX:
        try:
            read_tests(expected)
        except ValueError as error:
            return f"needs tests: {first_line(error)}"
    return ""


def _is_text(answer: Any) -> bool:
    return all(map(_is_text, answer)) if isinstance(answer, list) else isinstance(answer, (str, int, float))


def is_empty(answer: Any) -> bool:
    """Return True for no answer: none, blanks, an empty list, or a list in which one of the answers is empty."""
    if isinstance(answer, str):
        return not answer.strip()
    if isinstance(answer, list):
        return not answer or any(map(is_empty, answer))
    return answer is None


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def call_reward(function: str, kwargs: Mapping[str, Any], given: Mapping[str, Any]) -> float | Awaitable[float]:
    """Call a ready function or one of the user with those of `given` (USERS_PARAMETERS) that it takes."""
    if function in READY:
        return READY[function](given["answer"], given["expected"], **kwargs)
    found = _users_function(function)
    parameters = inspect.signature(found).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    value: float | Awaitable[float] = found(
        **{name: value for name, value in given.items() if takes_all or name in parameters}, **kwargs
    )
    return value


def _users_function(reference: str) -> Callable[..., Any]:
    if ":" not in reference:
        known = ", ".join([*READY, IN_SANDBOX])
        raise ConfigError(f"reward {reference!r} is none of {known}; a function of yours is path/to/file.py:NAME")
    return load_function(reference, "reward")


def _limited(work: Callable[[], Any], *, modules: Sequence[str] = (), seconds: float = 3.0) -> Any:
    """Return the result of `work`; 0 if the model's answer makes it exceed its limits."""
    try:
        return score_in_subprocess(work, modules=modules, seconds=seconds)
    except ScoringEndedError:
        return 0.0


def _verify(answer: str, expected: str) -> float:
    """Without the package's own time-outs, which by the clock make right answers wrong on a busy machine: the process
    has a limit of processor time."""
    package = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of being without time-outs
    wanted, found = (package.parse(f"${text}$", parsing_timeout=None) for text in (expected, answer))
    more = max([0, *(-Decimal(str(size)).adjusted() - FIRST_SMALL for size in _sizes(wanted))])
    return float(
        package.verify(
            wanted, found, float_rounding=DECIMALS + more, numeric_precision=PRECISION + more, timeout_seconds=None
        )
    )


def _sizes(expression: Any) -> Iterator[Any]:
    """Yield the absolute values of the numbers in what math-verify has read, except 0 and what is not finite."""
    if getattr(expression, "is_number", False):
        size = abs(expression).evalf(SIZE_DIGITS)
        if size.is_Float and size > 0:
            yield size
    else:
        parts = getattr(expression, "args", ())
        if isinstance(expression, list) or hasattr(expression, "flat"):  # a matrix
            parts = list(expression)
        for part in parts:
            yield from _sizes(part)


def _search(pattern: str, answer: str) -> float | str:
    """Return 1 or 0, or why the pattern is none."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return first_line(error)
    return float(not is_empty(answer) and compiled.search(answer) is not None)


def _fault_of_slow_pattern(pattern: str) -> float | str:
    """Return 0 if it was the answer that took too long, else why the pattern is none."""
    try:
        found: float | str = score_in_subprocess(partial(_search, pattern, ""))
        return found
    except ScoringEndedError as error:
        return str(error)


def _fits(answer: str, schema: Mapping[str, Any]) -> float | str:
    """Return 1 or 0, or why the schema is none."""
    package = importlib.import_module("jsonschema")
    try:
        package.Draft202012Validator.check_schema(schema)
    except package.SchemaError as error:
        return first_line(error)
    text = answer.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    references = importlib.import_module("referencing.exceptions")
    known = importlib.import_module("jsonschema_specifications").REGISTRY  # without it, files and URLs would be read
    validator = package.Draft202012Validator(schema, registry=known)
    try:
        return float(validator.is_valid(value))
    except references.Unresolvable as error:
        return f"a reference in it leads nowhere: {first_line(error)}"
    except RecursionError:
        is_deep = isinstance(value, dict | list) and is_deeper(value, MAX_PLAIN_DEPTH)
        return 0.0 if is_deep else "a reference in it leads to itself"
    except OverflowError:  # a whole number beyond the range of float
        return 0.0
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        return f"a reference in it leads to no schema ({first_line(error)})" if _always_raises(validator) else 0.0


def _always_raises(validator: Any) -> bool:
    """Return True if a schema cannot be applied to any kind of value, whatever a model wrote."""
    for value in (None, True, 1, "a", [1], {"a": 1}):
        try:
            validator.is_valid(value)
        except (TypeError, AttributeError, ValueError, KeyError):
            continue
        return False
    return True


MAX_PLAIN_DEPTH = 8
"""Nesting of an answer from which on it, and not the schema, may be why Python's stack is used up."""


def _refuse(constant: str) -> None:
    """JSON has no NaN and no infinity, and a NaN is within any bounds."""
    raise ValueError(constant)


def _plain(text: str, ignore_case: bool) -> str:
    joined = " ".join(text.split())
    return joined.casefold() if ignore_case else joined


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else str(value)


def _number(text: str) -> float | None:
    """Read a number without its unit and the end of its sentence; a point before it is a part of it. None also for one
    that is too large for a float: any other would lie within its tolerance."""
    value = decimal_number(_GROUPED.sub("", text.strip().lstrip("$€£ ").rstrip("$€£% .")))
    return value if value is not None and abs(value) <= sys.float_info.max else None
