"""Decorators for losses, advantages and stages that a config names by their import path.

They check while the module is imported that it can be called as a run will call it, so that the error names the line.
A loss, an advantage or a class of a stage works without them, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from roll_flash.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


def loss(function: Function) -> Function:
    """For `learner.loss.name`: `function(tokens, *, ...)` returns one loss per token; see `check_loss` of
    `roll_flash.testing`. Raises ConfigError if it does not take the tokens."""
    return _takes(function, "a loss", "tokens")


def advantage(function: Function) -> Function:
    """For `learner.advantage`: `function(rewards)` returns one advantage for each replica of a group, an array of shape
    [replicas] as `rewards` is. Raises ConfigError if it does not take the rewards."""
    return _takes(function, "an advantage", "rewards")


def stage(scorer: Callable[..., Any]) -> type[Any]:
    """For `stages.N.entry_point`: a class with a method `score(trajectories)`, or a function of trajectories, async or
    not, that returns one finite number for each; `kwargs` of the config are further arguments of a function. Raises
    ConfigError if it is neither."""
    if inspect.isclass(scorer):
        if not callable(getattr(scorer, "score", None)):
            raise ConfigError(f"{scorer.__qualname__}: a stage has a method `score`")
        return scorer
    _takes(scorer, "a stage", "trajectories")
    others = list(inspect.signature(scorer).parameters.values())[1:]
    named = [each for each in others if each.kind not in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)]
    by_name = [each if each.kind is each.VAR_KEYWORD else each.replace(kind=each.KEYWORD_ONLY) for each in named]

    def make(self: Any, **kwargs: Any) -> None:
        self.score = partial(scorer, **kwargs)

    found = type(scorer.__name__, (), {"__init__": make, "score": staticmethod(scorer), "__doc__": scorer.__doc__})
    found.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    found.__module__ = scorer.__module__
    return found


def _takes(function: Function, what: str, argument: str) -> Function:
    """Raise ConfigError if a function cannot be called with one positional argument."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"{function!r}: {what} is a function of the {argument}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in (*kinds, inspect.Parameter.VAR_POSITIONAL):
        raise ConfigError(f"{function.__qualname__}: {what} takes the {argument} as its first argument")
    return function
