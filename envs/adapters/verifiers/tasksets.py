"""Verifiers-v0 with verifiers 0.4 or newer: the tasks of a `Taskset`, played and scored by the package's own `Env`.

The package plays the episode as it does in its own evaluations; only its harness is ours (`chat_harness.py`), and its
model is the gateway. An error that it notes in a trace fails the episode; there is no sample, unless the model's text
caused it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll_flash.config.user_code import load_file
from roll_flash.envs.adapters.verifiers.faults import is_caused_by_text, warn_once
from roll_flash.envs.adapters.verifiers.loading import NAME, load_once
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.base import Env
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.errors import ConfigError, EnvError
from roll_flash.processes.background import call_in_thread
from roll_flash.types import bounded

MAX_TASKS = 10_000
"""Tasks that are taken of a taskset without an end."""
MAX_ERROR_CHARACTERS = 1000
_HARNESS = "roll_flash_chat"
"""Id of our harness: the package imports a module of this name."""


class Tasksets(Env):
    """Arguments: `env` (an installed taskset package, or `path/to/file.py`, which exports a `Taskset` in `__all__`, and
    an `Env` of one agent if it has one), `env_args` (fields of the taskset's config), `eval_args` (those that differ
    for held-out seeds, such as a split), `pass_threshold`.

    The reward is the weighted sum of the task's rewards. `info["success"]` is True if it is at least `pass_threshold`.
    """

    runs_own_loop = True

    def __init__(
        self,
        env: str,
        env_args: Mapping[str, Any] | None = None,
        eval_args: Mapping[str, Any] | None = None,
        pass_threshold: float = 1.0,
    ) -> None:
        self._name, self._args = env, dict(env_args or {})
        self._held_out_args = self._args | dict(eval_args or {})
        self._pass_threshold = pass_threshold
        self._config, _ = load(env, self._args)
        self._task: Any = None
        self._faults: list[str] = []
        self._broken: dict[str, str] = {}
        """Errors that the model's text made the code of the environment raise, and where."""
        self._episode: Any = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        seed = seed or 0
        args = self._held_out_args if seed >= HELD_OUT_SEEDS else self._args
        self._config, tasks = await call_in_thread(lambda: load(self._name, args))
        task, self._episode, self._faults, self._broken = copy.copy(tasks[seed % len(tasks)]), None, [], {}
        hooks = task.hooks
        task.hooks = lambda kind: [self._kept(each, is_number=kind != "stop") for each in hooks(kind)]
        task.finalize = self._watched(task.finalize)
        self._task = task
        return "", {"task": task.data.prompt_text, "task_key": task.key}

    async def play(self, gateway: AgentGateway) -> None:
        package, loaders = _package()
        # The package reads a key from a variable, which it passes on to no program if it has API_KEY in its name.
        variable = f"ROLL_FLASH_API_KEY_{secrets.token_hex(8).upper()}"
        os.environ[variable] = gateway.api_key
        try:
            client = package.EvalClientConfig(base_url=gateway.base_url, api_key_var=variable)
            env = loaders.load_environment(self._config)
            env.run, env.finalize = self._watched(env.run), self._watched(env.finalize)
            async with env.serving():
                self._episode = await env.run_episode(self._task, package.ModelContext(gateway.model, client))
        finally:
            del os.environ[variable]

    async def score(self) -> tuple[float, dict[str, Any]]:
        traces = self._episode.traces
        errors = [*self._episode.errors, *(error for trace in traces for error in trace.errors)]
        # Code may also raise because something else failed before, such as a judge, whose reward it then misses.
        told = [f"{error.type}: {error.message}" for error in errors]
        are_of_text = bool(told) and all(any(broken in each for broken in self._broken) for each in told)
        if are_of_text and any(trace.num_turns for trace in traces):
            return 0.0, {"success": False, "score_error": "; ".join(self._broken.values())[:MAX_ERROR_CHARACTERS]}
        if errors or not self._episode.ok:
            said = "; ".join(told) or "the episode is not complete"
            raise EnvError(f"{NAME}: {said[:MAX_ERROR_CHARACTERS]}")
        (trace,) = traces
        reward = bounded(float(trace.reward))
        values = {name: given.value for name, given in trace.rewards.items() if given is not None}
        return reward, {
            "success": reward >= self._pass_threshold,
            "rewards": values | trace.metrics,
            "stop_condition": trace.stop_condition,
            **({"score_error": "; ".join(self._faults)[:MAX_ERROR_CHARACTERS]} if self._faults else {}),
        }

    def _watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap code that reads answers before they are scored: what it cannot read, such as none, is worth nothing."""

        @functools.wraps(run)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                value = run(*args, **kwargs)
                return await value if inspect.isawaitable(value) else value
            except Exception as error:
                if is_caused_by_text(error):
                    said = f"{type(error).__name__}: {error}"
                    self._broken[said] = f"{run.__name__} raised {said}"
                    warn_once(self._broken[said])
                raise

        return call

    def _kept(self, function: Callable[..., Any], *, is_number: bool) -> Callable[..., Any]:
        """Wrap a reward, metric or stop condition: it gives 0 if the model's text makes it raise or return numbers that
        are not finite. The package would end the episode, and a policy that is never scored learns nothing from it."""

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                value = function(*args, **kwargs)
                value = await value if inspect.isawaitable(value) else value
                numbers = value.values() if isinstance(value, Mapping) else (value,)
                if not is_number or all(map(math.isfinite, numbers)):
                    return value
                fault = f"{function.__name__} returned {value}"
            except (Exception, SystemExit) as error:
                if not is_caused_by_text(error):
                    raise
                fault = f"{function.__name__} raised {type(error).__name__}: {error}"
            warn_once(fault)
            self._faults.append(fault)
            return 0.0

        return call


def load(env: str, args: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    """Return the config of the package's environment, and its tasks, made once per process. Raises ConfigError."""
    made: tuple[Any, Sequence[Any]] = load_once(env, args, _load)
    return made


def _load(env: str, args: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    package, loaders = _package()
    ident = _module_name(env) if env.endswith(".py") else env
    agents = [
        name
        for name, entry in loaders.env_config_type(ident).model_fields.items()
        if isinstance(entry.default, package.AgentConfig)
    ]
    if len(agents) != 1:
        raise ConfigError(
            f"{NAME}: env {env!r} has the agents {', '.join(agents)}; one of a single agent can be played"
        )
    seat = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}}
    config = loaders.resolve_env_config({"taskset": {**args, "id": ident}, agents[0]: seat})
    taskset = loaders.load_environment(config).taskset
    kind = type(taskset).task_type()
    if kind.NEEDS_CONTAINER or kind.toolsets(config.taskset.task) or taskset.toolsets(config.taskset):
        raise ConfigError(
            f"{NAME}: env {env!r} needs a container or servers of tools; only conversations can be played"
        )
    tasks = list(itertools.islice(taskset, MAX_TASKS))
    if not tasks:
        raise ConfigError(f"{NAME}: env {env!r} with {dict(args)} has no tasks")
    return config, tasks


def _package() -> tuple[Any, Any]:
    """Import the package and its loaders; make our harness known to them."""
    harness = importlib.import_module("roll_flash.envs.adapters.verifiers.chat_harness")
    sys.modules.setdefault(_HARNESS, harness)
    return importlib.import_module("verifiers.v1"), importlib.import_module("verifiers.v1.utils.loaders")


def _module_name(path: str) -> str:
    """Load a file; return a name under which the package can import it."""
    module = load_file(path)
    name = module.__name__.replace("-", "_").lower()
    sys.modules.setdefault(name, module)
    return name
