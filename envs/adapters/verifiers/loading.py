"""Loads environments of the package verifiers once per process; its episodes share them, as the package intends.

Loading one would install a signal handler for Ctrl-C, which also fails in a thread, so this is disabled. The module
`faults` records the errors of its reward functions and limits the time of its tools.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from roll_flash.config.user_code import load_file
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.envs.adapters.verifiers.faults import record_faults, with_deadline
from roll_flash.envs.base import Env
from roll_flash.errors import ConfigError, RollFlashError

NAME = "Verifiers-v0"

_loaded: dict[str, Any] = {}
_loading = threading.Lock()


def make_verifiers(env: str, **kwargs: Any) -> Env:
    """Make `Verifiers-v0` for the installed version: environments (0.1) or tasksets (0.4). Raises ConfigError."""
    if hasattr(import_optional("verifiers", package="verifiers", needed_by=NAME), "MultiTurnEnv"):
        from roll_flash.envs.adapters.verifiers.tasks import Verifiers

        return Verifiers(env, **kwargs)
    from roll_flash.envs.adapters.verifiers.tasksets import Tasksets

    return Tasksets(env, **kwargs)


def load(env: str, args: Mapping[str, Any]) -> Any:
    """Return the environment made by `load_environment(**args)` of a package or a file. Raises ConfigError."""
    return load_once(env, args, _load)


def load_once(env: str, args: Mapping[str, Any], make: Callable[[str, Mapping[str, Any]], Any]) -> Any:
    """Return what `make(env, args)` returns, made once per process. Raises ConfigError for any error in it."""
    key = json.dumps([env, dict(args)], sort_keys=True, default=str)
    with _loading:
        if key not in _loaded:
            try:
                _loaded[key] = make(env, args)
            except RollFlashError:
                raise
            except Exception as error:  # third-party code may raise anything
                said = " ".join(str(error).split())[:300]
                raise ConfigError(f"{NAME}: env {env!r} with {dict(args)}: {type(error).__name__}: {said}") from None
        return _loaded[key]


def _load(env: str, args: Mapping[str, Any]) -> Any:
    package = import_optional("verifiers", package="verifiers", needed_by=NAME)
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    logging.getLogger("verifiers.rubrics").setLevel(logging.CRITICAL)  # it logs every error of a reward function
    with _without_signal_handlers():
        made = _maker(package, env)(**args)
    if not isinstance(made, package.MultiTurnEnv):
        raise ConfigError(
            f"{NAME}: env {env!r} is a {type(made).__name__}; SingleTurnEnv, MultiTurnEnv, ToolEnv and what is made "
            "of them can be played (of a group, each of its environments)"
        )
    if made.requires_group_rollouts:
        raise ConfigError(f"{NAME}: env {env!r}: its rubric scores groups of rollouts, here each is scored on its own")
    _record_reward_faults(made.rubric)
    if hasattr(made, "call_tool"):
        made.call_tool = with_deadline(made.call_tool)
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


def _record_reward_faults(rubric: Any) -> None:
    for part in getattr(rubric, "rubrics", ()):
        _record_reward_faults(part)
    rubric.funcs = [record_faults(function) for function in rubric.funcs]
