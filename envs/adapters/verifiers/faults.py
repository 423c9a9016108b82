"""Records exceptions from the code of an environment of verifiers, and decides if the model's text caused them.

In the package, a reward function that raises counts as 0, and a tool that raises may end the rollout. The adapter does
the same if the model's text caused the error. For any other cause, such as a judge that is down, the episode fails and
gives no sample.
"""

from __future__ import annotations

import asyncio
import csv
import functools
import importlib
import inspect
import logging
import math
import re
import sqlite3
import subprocess
import time
import tokenize
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from roll_flash.chat.openai_client import says_too_long
from roll_flash.types import bounded

logger = logging.getLogger("roll_flash.envs")


class CallOutOfTimeError(Exception):
    """The tool calls of a turn have used all of its time."""


_TEXT_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError),
    *(StopIteration, StopAsyncIteration, NotImplementedError, EOFError),
    *(re.error, tokenize.TokenError, csv.Error, CallOutOfTimeError),
    *(subprocess.SubprocessError, sqlite3.ProgrammingError, SystemExit),
)
"""Exceptions of code that reads text in an unexpected form, or runs it as a program or a query."""


@dataclass(slots=True)
class Faults:
    """Errors of reward functions while an episode is scored, by cause: the model's text, or anything else."""

    of_text: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def add(self, what: str, *, of_text: bool) -> None:
        (self.of_text if of_text else self.other).append(what)


faults_of_rewards: ContextVar[Faults | None] = ContextVar("faults_of_rewards", default=None)
"""Faults of the episode that is being scored."""

calls_end_at: ContextVar[float] = ContextVar("calls_end_at", default=math.inf)
"""Deadline of this turn's tool calls, on the clock `time.monotonic()`."""


def record_faults(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function so that its errors and non-finite values are added to `faults_of_rewards`."""
    name = getattr(function, "__name__", "a reward")

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        faults = faults_of_rewards.get() or Faults()
        try:
            value = function(*args, **kwargs)
            number = float(await value if inspect.isawaitable(value) else value)
        except (Exception, SystemExit) as error:
            faults.add(f"{name} raised {type(error).__name__}: {error}", of_text=is_caused_by_text(error))
            if isinstance(error, SystemExit):  # of what the model wrote; the package lets it pass
                return 0.0
            raise
        if not math.isfinite(number):  # such as `float("nan")`, read from the text
            faults.add(f"{name} returned {number}", of_text=True)
            return 0.0
        return bounded(number)

    return call


def is_caused_by_text(error: BaseException | None) -> bool:
    """Return True if the model's text caused the error, and nothing else in its chain did, such as a connection. An
    answer that exceeds the context of a judge is one that the judge cannot read."""
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if any(says_too_long(getattr(each, "status_code", None), str(each)) for each in chain):
        return True
    tool_error = getattr(importlib.import_module("verifiers"), "ToolError", AssertionError)  # 0.4 has none
    # Python makes another error of a StopIteration that leaves a coroutine, such as that of `next`.
    found = [each for each in chain if not isinstance(each.__cause__, StopIteration | StopAsyncIteration)]
    kinds = (*_TEXT_ERRORS, tool_error)
    return all(_is_wrong_query(each) or (isinstance(each, kinds) and not isinstance(each, OSError)) for each in found)


def _is_wrong_query(error: BaseException) -> bool:
    """Return True for an OperationalError of the SQL itself: a database that is locked or missing is one, too."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.OperationalError) and code == sqlite3.SQLITE_ERROR


_warned: set[str] = set()


def warn_once(trouble: str) -> None:
    """Log once per function and kind of error: if it is always the same one, the environment itself may be wrong."""
    kind = " ".join(trouble.split()[:3])
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("Verifiers-v0: an answer is scored with an error (said once for each kind): %r", trouble)


def with_deadline(call_tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call_tool` with the deadline `calls_end_at`. The model sees the error, like an error of a tool."""

    @functools.wraps(call_tool)
    async def call(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)  # tools that never wait would block the event loop
        left_s = calls_end_at.get() - time.monotonic()
        if left_s <= 0:
            raise CallOutOfTimeError("not run: the calls of this turn have taken all of its time")
        scope = asyncio.timeout(left_s if left_s < math.inf else None)
        try:
            async with scope:
                return await call_tool(*args, **kwargs)
        except TimeoutError:
            if not scope.expired():
                raise
            raise CallOutOfTimeError("given up: the calls of this turn have taken all of its time") from None

    return call
