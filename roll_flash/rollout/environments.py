"""One async face for every kind of environment.

`open_environment` makes a gymnasium environment of a task and returns it as `AsyncEnvironment`: coroutines are awaited,
blocking environments run in a thread pool, and both answer with chat messages.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, cast

import gymnasium

from roll_flash.config import EnvConfig, RolloutConfig
from roll_flash.envs.base import Env, SandboxEnv
from roll_flash.envs.model_text import encodable
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError, EnvError
from roll_flash.gateway.session_access import AgentGateway
from roll_flash.reward_range import as_reward
from roll_flash.types import Message, Task

QUICK_MAKE_S = 1e-3
"""An asynchronous environment that is made faster than this needs no thread for it."""


@dataclass(frozen=True, slots=True)
class Step:
    messages: list[Message]
    """What the environment says, as messages to append; empty if it says nothing."""
    text: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class BadRewardError(EnvError):
    """A reward that is not a finite number."""


def check_environment(
    env_id: str, kwargs: Mapping[str, Any], rollout: RolloutConfig | None = None
) -> SandboxEnv | None:
    """Make the environment once; returned is one that needs a sandbox. Raises ConfigError saying what is wrong."""
    try:
        env = make_env(env_id, **kwargs)
        if rollout is not None and isinstance(env.unwrapped, Env):
            _check_timeouts(env_id, env.unwrapped, rollout)
    except ConfigError as error:
        raise ConfigError(f"env.id {error}") from None
    except Exception as error:  # users' code may raise anything
        raise ConfigError(
            f"env.id {env_id!r} with env.kwargs {dict(kwargs)}: {type(error).__name__}: {error}"
        ) from None
    return env.unwrapped if isinstance(env.unwrapped, SandboxEnv) else None


def _check_timeouts(env_id: str, env: Env, rollout: RolloutConfig) -> None:
    """What is given up is no sample, so a model must not be able to make it slow. Raises ConfigError."""
    least = {"step_timeout_s": env.least_step_timeout_s(), "episode_timeout_s": env.least_episode_timeout_s()}
    for name, least_s in least.items():
        if (allowed_s := getattr(rollout, name)) < least_s:
            raise ConfigError(
                f"{env_id}: rollout.{name}={allowed_s:g} is less than the {least_s:g} s that its own limits add up to, "
                f"checks included; what is given up is no sample: set rollout.{name} to {least_s:g} or more"
            )


def check_environments(envs: Iterable[EnvConfig], rollout: RolloutConfig | None = None) -> list[SandboxEnv]:
    """Make each environment, in each of its levels, once; returned are those that need a sandbox. Raises
    ConfigError."""
    made = [check_environment(env.id, kwargs, rollout) for env in envs for kwargs in env.variants]
    return [env for env in made if env is not None]


class AsyncEnvironment:
    """`reset`, `step` and `close` as coroutines, over an async or a blocking environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], executor: Executor) -> None:
        self._env = env
        self._executor = executor
        self._is_async = isinstance(env.unwrapped, Env)

    @property
    def sandbox_env(self) -> SandboxEnv | None:
        unwrapped = self._env.unwrapped
        return unwrapped if isinstance(unwrapped, SandboxEnv) else None

    @property
    def unwrapped(self) -> gymnasium.Env[Any, Any]:
        return self._env.unwrapped

    @property
    def plays_itself(self) -> bool:
        """Whether its agent brings its own loop (`roll_flash.gateway.session_access.PlaysItself`)."""
        return getattr(self._env.unwrapped, "plays_itself", False) is True

    async def play(self, gateway: AgentGateway) -> None:
        await self._call(self._own("play"), gateway)

    async def score(self) -> tuple[float, Mapping[str, Any]]:
        """What the agent's work is worth. Raises BadRewardError for what is no finite number."""
        reward, info = await self._call(self._own("score"))
        return _as_reward(reward), _as_info(info)

    def allow(self, step_s: float, episode_s: float) -> None:
        """Tell the environment how long a step and the whole episode may take."""
        if isinstance(self._env.unwrapped, Env):
            self._env.unwrapped.step_timeout_s = step_s
            self._env.unwrapped.episode_timeout_s = episode_s

    async def reset(self, seed: int) -> tuple[list[Message], Mapping[str, Any]]:
        observation, info = await self._call(self._env.reset, seed=seed)
        return _as_messages(observation), _as_info(info)

    async def step(self, action: str) -> Step:
        observation, reward, terminated, truncated, info = await self._call(self._env.step, action)
        messages = _as_messages(observation)
        text = "\n".join(str(message.get("content", "")) for message in messages)
        return Step(messages, text, _as_reward(reward), bool(terminated), bool(truncated), _as_info(info))

    async def conclude(self) -> tuple[float, Mapping[str, Any]]:
        """What the episode is worth as it stands, where the environment can say; for one that is ended from outside."""
        method = getattr(self._env.unwrapped, "conclude", None)
        if method is None:
            return 0.0, {}
        reward, info = await self._call(method)
        return _as_reward(reward), _as_info(info)

    def _own(self, name: str) -> Callable[..., Any]:
        method = getattr(self._env.unwrapped, name, None)
        if method is None:
            raise EnvError(f"{type(self._env.unwrapped).__name__} plays itself and has no method {name!r}")
        return cast(Callable[..., Any], method)

    async def close(self) -> None:
        if self._is_async or _has_own_close(self._env):
            await self._call(self._env.close)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_async:
            result = method(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._executor, lambda: method(*args, **kwargs))
        return await result if inspect.isawaitable(result) else result


class EnvironmentMaker:
    """Makes the environments of one worker.

    Making one may import and compute, so it happens in a thread. Only an asynchronous environment whose last one was
    made within `QUICK_MAKE_S` is made where it is needed: the way through a thread would cost more than the rest of its
    episode's bookkeeping.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._is_quick: dict[str, bool] = {}

    async def open(self, task: Task) -> AsyncEnvironment:
        """Raises whatever making it raises."""
        if self._is_quick.get(task.env_id, False):
            env, took_s = _make(task)
        else:
            env, took_s = await asyncio.get_running_loop().run_in_executor(self._executor, _make, task)
        self._is_quick[task.env_id] = took_s < QUICK_MAKE_S and isinstance(env.unwrapped, Env)
        return AsyncEnvironment(env, self._executor)


async def open_environment(task: Task, executor: Executor) -> AsyncEnvironment:
    """Make the environment of one task in a thread of `executor`."""
    return await EnvironmentMaker(executor).open(task)


def _make(task: Task) -> tuple[gymnasium.Env[Any, Any], float]:
    began = time.perf_counter()
    env = make_env(task.env_id, **task.kwargs)
    return env, time.perf_counter() - began


def _has_own_close(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether closing does anything: most plain environments inherit a `close` that does not."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env).close is not gymnasium.Wrapper.close:
            return True
        env = env.env
    return type(env).close is not gymnasium.Env.close


def _as_messages(observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": encodable(observation)}] if observation else []
    if isinstance(observation, list) and all(isinstance(m, dict) and "role" in m for m in observation):
        return [
            {**message, "content": encodable(content)}
            if isinstance(content := message.get("content"), str)
            else message
            for message in observation
        ]
    raise EnvError(
        f"an observation must be a str or a list of messages with roles, not {type(observation).__name__}; "
        "render it as text in the environment or in a wrapper"
    )


def _as_info(info: Any) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise EnvError(f"info must be a dict, not {type(info).__name__}")
    bool(info.get("success"))  # of an array, say, it raises here, where it is the environment's
    return info


def _as_reward(reward: Any) -> float:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise BadRewardError(str(error)) from None
