"""Loads environments of the package verifiers once per process; its episodes share them, as the package intends.

Loading one would install a signal handler for Ctrl-C, which also fails in a thread, so this is disabled. In the package
a reward function that raises counts as 0; here the error is recorded, so that the episode can fail instead.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.check.source_files import load_file
from roll_flash.errors import ConfigError, RollFlashError

NAME = "Verifiers-v0"

raised_by_rewards: ContextVar[list[str] | None] = ContextVar("raised_by_rewards", default=None)
"""Errors of reward functions while an episode is scored."""

_loaded: dict[str, Any] = {}
_loading = threading.Lock()


def load(env: str, args: Mapping[str, Any]) -> Any:
    """Return the environment made by `load_environment(**args)` of a package or a file. Raises ConfigError."""
    key = json.dumps([env, dict(args)], sort_keys=True, default=str)
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load(env, args)
        return _loaded[key]


def _load(env: str, args: Mapping[str, Any]) -> Any:
    package = import_optional("verifiers", package="verifiers", needed_by=NAME)
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    try:
        with _without_signal_handlers():
            made = _maker(package, env)(**args)
    except RollFlashError:
        raise
    except Exception as error:  # third-party code may raise anything
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"{NAME}: env {env!r} with {dict(args)}: {type(error).__name__}: {said}") from None
    if not isinstance(made, package.MultiTurnEnv):
        raise ConfigError(
            f"{NAME}: env {env!r} is a {type(made).__name__}; SingleTurnEnv, MultiTurnEnv, ToolEnv and what is made "
            "of them can be played (of a group, each of its environments)"
        )
    if made.requires_group_rollouts:
        raise ConfigError(f"{NAME}: env {env!r}: its rubric scores groups of rollouts, here each is scored on its own")
    _note_what_raises(made.rubric)
    return made


def _maker(package: Any, env: str) -> Callable[..., Any]:
    if not env.endswith(".py"):
        return functools.partial(package.load_environment, env)
    function = getattr(load_file(env), "load_environment", None)
    if not callable(function):
        raise ConfigError(f"{NAME}: {env} has no function load_environment")
    return function  # type: ignore[no-any-return]


@contextmanager
def _without_signal_handlers() -> Iterator[None]:
    module: Any = importlib.import_module("verifiers.envs.environment")
    real = module.signal
    module.signal = SimpleNamespace(**{**vars(real), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = real


def _note_what_raises(rubric: Any) -> None:
    for part in getattr(rubric, "rubrics", ()):
        _note_what_raises(part)
    rubric.funcs = [_noting(function) for function in rubric.funcs]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            noted = raised_by_rewards.get()
            if noted is not None:
                noted.append(f"{getattr(function, '__name__', 'a reward')} raised {type(error).__name__}: {error}")
            raise

    return call
