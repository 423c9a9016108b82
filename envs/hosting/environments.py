"""One async interface for all kinds of environments.

`EnvironmentMaker` makes the gymnasium environment of a task and returns it as `AsyncEnvironment`: coroutines are
awaited, blocking environments run in a thread pool, and both answer with chat messages.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import gymnasium

from roll_flash.chat.model_text import cut_middle, encodable
from roll_flash.config.tree import EnvConfig, RolloutConfig
from roll_flash.config.user_code import described
from roll_flash.envs.agents.session_access import AgentGateway
from roll_flash.envs.base import Env, SandboxEnv
from roll_flash.envs.registration import make_env
from roll_flash.errors import ConfigError, EnvError, TaskError
from roll_flash.sandboxes import SandboxSpec
from roll_flash.terminal import say
from roll_flash.types import Message, Task, as_reward

QUICK_MAKE_S = 1e-3
"""Seconds. An asynchronous environment whose constructor is faster needs no thread for it."""

MAX_TURNS: int = EnvConfig.model_fields["max_turns"].default
MAX_CHARACTERS = 1 << 22
"""Maximum characters of an answer, about a million tokens, which its messages share. An action can make an answer far
longer, which fits into no context and would be written with its episode several times: no reader of a run's files takes
a line of gigabytes, so the run could not be resumed."""


@dataclass(frozen=True, slots=True)
class Step:
    messages: list[Message]
    """The answer of the environment, as messages to append; may be empty."""
    text: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class BadRewardError(EnvError):
    """A reward that is not a finite number."""


def check_environments(
    tasks: Iterable[Task], rollout: RolloutConfig, no_roles: str = "", policies: Collection[str] = ()
) -> list[SandboxEnv]:
    """Make the environment of each task once; return those that need a sandbox. `no_roles`: why an environment may not
    have several; `policies`: the fixed ones that it may ask. Says which would be cut short without anybody's wish.
    Raises ConfigError with the reason."""
    tasks = list(tasks)
    made = [_checked(task, rollout, no_roles, policies) for task in tasks]
    for line in dict.fromkeys(filter(None, map(_cut_short, tasks, made))):
        say(line, error=True)
    return [env for env in made if isinstance(env, SandboxEnv)]


def _checked(task: Task, rollout: RolloutConfig, no_roles: str, policies: Collection[str]) -> Any:
    try:
        env = _env_of(task).unwrapped
        _check_place(task.env_id, env)
        if isinstance(env, SandboxEnv):
            _check_sandbox_spec(task.env_id, env)
        if isinstance(env, Env):
            _check_timeouts(task.env_id, env, rollout)
        _check_own_loop(task.env_id, env)
        if unknown := sorted({*getattr(env, "policies", ())} - {*policies}):
            raise ConfigError(
                f"{task.env_id} asks the policy {unknown[0]!r}, which the config does not name: set policies."
                f"{unknown[0]}.base_url and model"
            )
        if getattr(env, "roles", ()) and no_roles:
            raise ConfigError(f"{task.env_id}: {no_roles}")
        if task.prefix and (reason := why_not_repeatable(env)):
            raise ConfigError(f"{task.env_id}: {reason}")
        return env
    except ConfigError as error:
        raise TaskError(f"envs: {error}") from None
    except (Exception, SystemExit) as error:  # user code may raise anything
        with_kwargs = f"{task.env_id!r} with kwargs {dict(task.kwargs)}"
        raise TaskError(f"envs: {with_kwargs}: {described(error)}") from None


def _cut_short(task: Task, env: Any) -> str | None:
    """Return a line if the environment has more turns than the run, whose default they are."""
    spec = gymnasium.registry.get(task.env_id.rpartition(":")[2])
    own = task.kwargs.get("max_turns") or getattr(env, "max_turns", None) or getattr(spec, "max_episode_steps", None)
    if not isinstance(own, int) or task.max_turns != MAX_TURNS or own <= MAX_TURNS:
        return None
    return (
        f"{task.env_id} has up to {own} turns, but the run ends its episodes after {MAX_TURNS}, the default of "
        f"max_turns of its entry of envs: set that to {own}"
    )


def _check_place(env_id: str, env: Any) -> None:
    """Raise ConfigError for an environment that only this process knows: workers have another `__main__`."""
    name = type(env).__name__
    entry_point = getattr(getattr(env, "spec", None), "entry_point", None)
    if "__main__" in (type(env).__module__, getattr(entry_point, "__module__", "")):
        raise ConfigError(
            f"{env_id}: {name} is defined in the script or notebook that runs, which workers, in processes of their "
            f"own, do not have: write it into a file, and take an id such as my_envs.py:{name}"
        )


def _check_sandbox_spec(env_id: str, env: SandboxEnv) -> None:
    spec: Any = env.sandbox_spec
    if not isinstance(spec, SandboxSpec | None):
        raise ConfigError(f"{env_id}: sandbox_spec must be a roll_flash.SandboxSpec, not {spec!r:.60}")


def _check_own_loop(env_id: str, env: Any) -> None:
    """Raise ConfigError for an environment with a loop of its own that no episode could play."""
    for several in ("roles", "policies"):
        names = getattr(env, several, ())
        if isinstance(names, str):  # each of its letters would be a name
            raise ConfigError(f"{env_id}: {several} is a tuple of names; write {several} = ({names!r},)")
        if names and not _runs_own_loop(env):
            raise ConfigError(f"{env_id}: {several} need runs_own_loop=True: each plays through the gateway")
    missing = [name for name in ("play", "score") if _runs_own_loop(env) and not callable(getattr(env, name, None))]
    if missing:
        raise ConfigError(f"{env_id}: with runs_own_loop = True it must define `async def {missing[0]}`")


def _check_timeouts(env_id: str, env: Env, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a timeout below the environment's own limits: a model could then cause lost samples."""
    minimum = {"step_timeout_s": env.min_step_timeout_s(), "episode_timeout_s": env.min_episode_timeout_s()}
    for name, min_s in minimum.items():
        if (allowed_s := getattr(rollout, name)) < min_s:
            raise ConfigError(
                f"{env_id}: rollout.{name}={allowed_s:g} is less than the {min_s:g} s that its own limits add up to, "
                f"checks included; what is given up is no sample: set rollout.{name} to {min_s:g} or more"
            )


def is_deterministic(env: Any) -> bool:
    """True unless the environment is registered with gymnasium's `nondeterministic=True`, or has this attribute."""
    return not getattr(env, "nondeterministic", getattr(env.spec, "nondeterministic", False))


def why_not_repeatable(env: Any) -> str | None:
    """Return why recorded turns of an environment cannot be played again; None if they can."""
    if _runs_own_loop(env):
        return "its agent has a loop of its own, so recorded turns cannot be played again"
    if not is_deterministic(env):
        return "it is registered as nondeterministic, so recorded turns cannot be played again"
    return None


def _runs_own_loop(env: Any) -> bool:
    return getattr(env, "runs_own_loop", False) is True


class AsyncEnvironment:
    """`reset`, `step` and `close` as coroutines, over an async or a blocking environment."""

    def __init__(self, env: gymnasium.Env[Any, Any], executor: Executor) -> None:
        self._env = env
        self._executor = executor
        self._is_async = isinstance(env.unwrapped, Env)

    @property
    def sandbox_env(self) -> SandboxEnv | None:
        return self.unwrapped if isinstance(self.unwrapped, SandboxEnv) else None

    @property
    def unwrapped(self) -> Any:
        return self._env.unwrapped

    @property
    def runs_own_loop(self) -> bool:
        """True if its agent brings its own loop (`roll_flash.envs.agents.session_access`)."""
        return _runs_own_loop(self.unwrapped)

    @property
    def is_deterministic(self) -> bool:
        return is_deterministic(self.unwrapped)

    async def play(self, gateway: AgentGateway) -> None:
        await self._call(self.unwrapped.play, gateway)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the fixed policies that it asks beside the one in training."""
        return tuple(getattr(self.unwrapped, "policies", ()))

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that the policy plays, each in a session of its own; one without a name if it has none."""
        return tuple(getattr(self.unwrapped, "roles", ())) or ("",)

    async def score(self) -> tuple[dict[str, float], Mapping[str, Any]]:
        """Return the reward of each role and info. Raises BadRewardError for a value that is not finite, or missing."""
        reward, info = _as_tuple(await self._call(self.unwrapped.score), "score", "(reward, info)", 2)
        rewards = reward if isinstance(reward, Mapping) else {"": reward}
        if set(rewards) != set(self.roles):
            raise BadRewardError(f"score returned {reward!r}, not a reward for each of the roles {list(self.roles)}")
        return {role: _as_reward(rewards[role]) for role in self.roles}, _as_info(info)

    def allow(self, step_s: float, episode_s: float) -> None:
        """Set the environment's time limits of one step and of the whole episode."""
        if self._is_async:
            self.unwrapped.step_timeout_s = step_s
            self.unwrapped.episode_timeout_s = episode_s

    async def reset(self, seed: int) -> tuple[list[Message], Mapping[str, Any]]:
        returned = await self._call(self._env.reset, seed=seed)
        observation, info = _as_tuple(returned, "reset", "(observation, info)", 2)
        messages = _as_messages(observation)
        if any(map(_is_long, messages)):
            raise EnvError(
                f"reset returned a message of more than {MAX_CHARACTERS:,} characters: too long for any model"
            )
        return messages, _as_info(info)

    async def step(self, action: str) -> Step:
        returned = await self._call(self._env.step, action)
        shape = "(observation, reward, terminated, truncated, info)"
        observation, reward, terminated, truncated, info = _as_tuple(returned, "step", shape, 5)
        messages = _shortened(_as_messages(observation))
        text = "\n".join(str(message.get("content", "")) for message in messages)
        return Step(messages, text, _as_reward(reward), bool(terminated), bool(truncated), _as_info(info))

    async def conclude(self) -> tuple[float, Mapping[str, Any]]:
        """Return the reward of the episode so far if the environment defines it; called if a run ends the episode."""
        method = getattr(self.unwrapped, "conclude", None)
        if method is None:
            return 0.0, {}
        reward, info = _as_tuple(await self._call(method), "conclude", "(reward, info)", 2)
        return _as_reward(reward), _as_info(info)

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

    A constructor may import and compute, so it runs in a thread. The exception is an asynchronous environment whose
    previous constructor call took less than `QUICK_MAKE_S`: it runs in the event loop, because the thread switch would
    cost more than the rest of the episode's bookkeeping.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._is_quick: dict[str, bool] = {}

    async def open(self, task: Task) -> AsyncEnvironment:
        """Make one task's environment. Its exceptions pass through."""
        if self._is_quick.get(task.env_id, False):
            env, took_s = _make(task)
        else:
            env, took_s = await asyncio.get_running_loop().run_in_executor(self._executor, _make, task)
        self._is_quick[task.env_id] = took_s < QUICK_MAKE_S and isinstance(env.unwrapped, Env)
        return AsyncEnvironment(env, self._executor)


def _make(task: Task) -> tuple[gymnasium.Env[Any, Any], float]:
    began = time.perf_counter()
    env = _env_of(task)
    return env, time.perf_counter() - began


def _env_of(task: Task) -> gymnasium.Env[Any, Any]:
    """Make a task's environment with arguments of its own: a worker gets one task for several replicas, and what one of
    them changed in a list of it, the others would see."""
    return make_env(task.env_id, **copy.deepcopy(dict(task.kwargs)))


def _has_own_close(env: gymnasium.Env[Any, Any]) -> bool:
    """Return True if `close` does anything: most plain environments inherit an empty one."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env).close is not gymnasium.Wrapper.close:
            return True
        env = env.env
    return type(env).close is not gymnasium.Env.close


def _as_tuple(returned: Any, method: str, shape: str, length: int) -> tuple[Any, ...]:
    if isinstance(returned, tuple) and len(returned) == length:
        return returned
    found = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
    raise EnvError(f"{method} returned {found}, not {shape}")


def _as_messages(observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": encodable(observation)}] if observation else []
    if isinstance(observation, list) and all(isinstance(m, dict) and "role" in m for m in observation):
        if any(map(_has_other_parts, observation)):
            raise EnvError(
                "an observation has content in parts that are no text, such as images; only text can be played"
            )
        return list(map(_encodable, observation))
    raise EnvError(
        f"an observation must be a str or a list of messages with roles, not {type(observation).__name__}; "
        "render it as text in the environment or in a wrapper (GymText-v0 does it for discrete actions)"
    )


def _encodable(message: Message) -> Message:
    match message.get("content"):
        case str(text):
            return {**message, "content": encodable(text)}
        case list(parts):
            return {**message, "content": [{**part, "text": encodable(str(part.get("text", "")))} for part in parts]}
    return message


def _is_long(message: Message) -> bool:
    return len(_said(message)) > MAX_CHARACTERS


def _said(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else ""


def _shortened(messages: list[Message]) -> list[Message]:
    """Cut what is longer than its share, if all together are longer than MAX_CHARACTERS."""
    texts = list(map(_said, messages))
    if sum(map(len, texts)) <= MAX_CHARACTERS:
        return messages
    share = MAX_CHARACTERS // len(messages)
    return [
        {**message, "content": cut_middle(text, share)} if len(text) > share else message
        for message, text in zip(messages, texts, strict=True)
    ]


def _has_other_parts(message: Message) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def _as_info(info: Any) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise EnvError(f"info must be a dict, not {type(info).__name__}")
    bool(info.get("success"))  # an array raises here, so the error counts as the environment's
    return info


def _as_reward(reward: Any) -> float:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise BadRewardError(str(error)) from None
