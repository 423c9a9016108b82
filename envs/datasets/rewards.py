"""Ready reward functions for answers, and the call of the user's own.

Each takes what the model answered and what the row expects, and returns 0 to 1. What a model wrote can make a parser
slow, so those that parse with a library run in a process with limits (`rewards/scoring_process.py`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from roll_flash.chat.model_text import decimal_number
from roll_flash.config.data import RewardConfig
from roll_flash.config.user_code import load_function
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.rewards.scoring_process import ScoringEndedError, score_in_subprocess
from roll_flash.errors import ConfigError, EnvError, first_line

USERS_PARAMETERS = ("completion", "answer", "expected", "messages", "row")
"""What a function of the user may take: the model's last text, the answer in it, the row's answer, the prompt as chat,
and the row's other columns."""
MATH_S = 10.0
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3})")


def exact(answer: str, expected: Any, *, ignore_case: bool = True) -> float:
    """1 if the answer is the expected text, or one of a list of texts; numbers of blanks do not count."""
    wanted = expected if isinstance(expected, list) else [expected]
    return float(_plain(answer, ignore_case) in [_plain(_text(one), ignore_case) for one in wanted])


def number(answer: str, expected: Any, *, tolerance: float = 1e-6) -> float:
    """1 if the answer is the expected number, within `tolerance` of its size. Reads `1,234`, `$5` and `50%`."""
    found, wanted = _number(answer), _number(_text(expected))
    if wanted is None:
        raise EnvError(f"reward number: the row expects {expected!r}, which is no number")
    return float(found is not None and abs(found - wanted) <= tolerance * max(1.0, abs(wanted)))


def math(answer: str, expected: Any) -> float:
    """1 if both are the same expression or number, by the package math-verify: LaTeX, fractions, sets, equations."""
    import_optional("math_verify", package="math-verify[antlr4_13_2]", needed_by="reward math")
    work = partial(_verify, answer[:MAX_MATH_CHARACTERS], _text(expected))
    return _limited(work, modules=("math_verify",), seconds=MATH_S)


MAX_MATH_CHARACTERS = 2000


def regex(answer: str, expected: Any, *, pattern: str | None = None) -> float:
    """1 if a pattern is found in the answer: `pattern`, where `{expected}` is the row's answer, or the row's answer."""
    chosen = _text(expected) if pattern is None else pattern.replace("{expected}", re.escape(_text(expected)))
    try:
        compiled = re.compile(chosen)
    except re.error as error:
        raise EnvError(f"reward regex: {chosen!r} is no pattern: {error}") from None
    return _limited(partial(_search, compiled, answer))


def json_schema(answer: str, expected: Any, *, schema: Mapping[str, Any] | None = None) -> float:
    """1 if the answer is JSON that fits a schema: `schema`, or that in the row. A fence of backticks is left out."""
    chosen = schema if schema is not None else expected
    if isinstance(chosen, str):
        chosen = json.loads(chosen)
    if not isinstance(chosen, Mapping):
        raise EnvError(f"reward json_schema: there is no schema: {chosen!r}")
    return _limited(partial(_fits, answer, dict(chosen)), modules=("jsonschema",))


READY: dict[str, Callable[..., float]] = {
    "exact": exact,
    "number": number,
    "math": math,
    "regex": regex,
    "json_schema": json_schema,
}
IN_SANDBOX = "python_tests"
JUDGE = "judge"


def check_reward(function: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError for a reward that does not exist, or does not take its arguments."""
    if function == JUDGE:
        raise ConfigError(
            "reward judge: a judge is a stage, which scores while other episodes go on; add it to stages "
            "(docs/environments.md), with reward: replace if nothing else counts"
        )
    if function == IN_SANDBOX:
        return
    found = READY.get(function) or _users_function(function)
    parameters = inspect.signature(found).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    unknown = [name for name in kwargs if name not in parameters]
    if unknown and not takes_all:
        raise ConfigError(f"reward {function}: there is no argument {unknown[0]!r}; it takes {', '.join(parameters)}")
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in _VARIADIC]
    missing = [name for name in needed if name not in (*USERS_PARAMETERS, *kwargs)]
    if missing:
        raise ConfigError(
            f"reward {function}: nothing gives its argument {missing[0]!r}; it may take {', '.join(USERS_PARAMETERS)}, "
            "and what kwargs name"
        )


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


def try_rewards(rewards: Sequence[RewardConfig], task: Mapping[str, Any]) -> None:
    """Call the user's own functions as if the model had written the answer of this row: a mistake shows at the start.

    Raises ConfigError if one raises or returns no number. Coroutines are not tried.
    """
    expected = task["answer"]
    text = _text(expected[0] if isinstance(expected, list) and expected else expected)
    given = {"completion": text, "answer": text, "expected": expected, "messages": task["messages"], "row": task["row"]}
    for reward in rewards:
        check_reward(reward.function, reward.kwargs)
        if ":" not in reward.function or inspect.iscoroutinefunction(_users_function(reward.function)):
            continue
        try:
            value = call_reward(reward.function, reward.kwargs, given)
        except Exception as error:  # user code may raise anything
            raise ConfigError(
                f"reward {reward.function} raised {type(error).__name__}: {first_line(error)}, for the right answer of "
                "the first row"
            ) from error
        if not isinstance(value, bool | int | float):
            raise ConfigError(f"reward {reward.function} returned {value!r}; it must return a finite number or a bool")


def _users_function(reference: str) -> Callable[..., Any]:
    if ":" not in reference:
        known = ", ".join([*READY, IN_SANDBOX])
        raise ConfigError(f"reward {reference!r} is none of {known}; a function of yours is path/to/file.py:NAME")
    return load_function(reference, "reward")


def _limited(work: Callable[[], Any], *, modules: Sequence[str] = (), seconds: float = 3.0) -> float:
    """Return the result of `work`; 0 if the model's answer makes it exceed its limits."""
    try:
        return float(score_in_subprocess(work, modules=modules, seconds=seconds))
    except ScoringEndedError:
        return 0.0


def _verify(answer: str, expected: str) -> float:
    package = importlib.import_module("math_verify")
    return float(package.verify(package.parse(f"${expected}$"), package.parse(f"${answer}$")))


def _search(pattern: re.Pattern[str], answer: str) -> float:
    return float(pattern.search(answer) is not None)


def _fits(answer: str, schema: Mapping[str, Any]) -> float:
    text = answer.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return float(importlib.import_module("jsonschema").Draft202012Validator(schema).is_valid(value))


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
    return decimal_number(_GROUPED.sub("", text.strip().strip("$€£% .")))
