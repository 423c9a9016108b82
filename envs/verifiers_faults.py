"""What the code of an environment of verifiers raises, and whose doing it is.

A reward function that raises counts as 0 there, and an error of a tool may end the rollout. Here it is 0, or the end,
where it came of what the model wrote. Where it did not, as of a judge that is away, the episode fails and is no sample.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import math
import re
import time
import tokenize
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("roll_flash.envs")


class CallOutOfTimeError(Exception):
    """The calls of tools of a turn have taken all of its time."""


_OF_TEXT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError),
    *(re.error, tokenize.TokenError, CallOutOfTimeError),
)
"""What code raises that reads a text which is not as it expects."""


@dataclass(slots=True)
class Faults:
    """Why reward functions gave no number while an episode was scored."""

    of_text: list[str] = field(default_factory=list)
    of_others: list[str] = field(default_factory=list)

    def add(self, what: str, *, of_text: bool) -> None:
        (self.of_text if of_text else self.of_others).append(what)


faults_of_rewards: ContextVar[Faults | None] = ContextVar("faults_of_rewards", default=None)
"""Where they are noted."""

calls_end_at: ContextVar[float] = ContextVar("calls_end_at", default=math.inf)
"""`time.monotonic()` at which the calls of tools of this turn must have ended."""


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", "a reward")

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        noted = faults_of_rewards.get() or Faults()
        try:
            value = function(*args, **kwargs)
            number = float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            noted.add(f"{name} raised {type(error).__name__}: {error}", of_text=is_of_text(error))
            raise
        if not math.isfinite(number):  # as `float(text)` of "nan" gives it
            noted.add(f"{name} returned {number}", of_text=True)
            return 0.0
        return number

    return call


def is_of_text(error: BaseException | None) -> bool:
    """Whether it comes of what a model wrote, and nothing else, such as a connection, is behind it."""
    tool_error: type[Exception] = importlib.import_module("verifiers").ToolError
    while error is not None:
        if isinstance(error, OSError) or not isinstance(error, (*_OF_TEXT, tool_error)):
            return False
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return True


_said: set[str] = set()


def say_once(trouble: str) -> None:
    """Of each function and kind of error: where it is always the same one, the environment itself may be wrong."""
    kind = " ".join(trouble.split()[:3])
    if kind not in _said:
        _said.add(kind)
        logger.warning("Verifiers-v0: an answer is scored with an error (said once for each kind): %r", trouble)


def in_time(call_tool: Callable[..., Any]) -> Callable[..., Any]:
    """What it raises is told to the model, as what a tool raises."""

    @functools.wraps(call_tool)
    async def call(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)  # many tools that never wait would keep the loop from all others
        left_s = calls_end_at.get() - time.monotonic()
        if left_s <= 0:
            raise CallOutOfTimeError("not run: the calls of this turn have taken all of its time")
        try:
            async with asyncio.timeout(left_s if left_s < math.inf else None) as scope:
                return await call_tool(*args, **kwargs)
        except TimeoutError:
            if not scope.expired():
                raise
            raise CallOutOfTimeError("given up: the calls of this turn have taken all of its time") from None

    return call
