"""Episodes for checks, played as by a rollout worker, with every message, reward and time recorded."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_flash.config.user_code import described
from roll_flash.envs.base import SandboxEnv
from roll_flash.envs.hosting.environments import AsyncEnvironment
from roll_flash.envs.hosting.sandbox_lease import LazySandbox
from roll_flash.envs.registration import make_env
from roll_flash.processes.background import DaemonThreads, call_in_thread
from roll_flash.sandboxes import SandboxError, SandboxPool, SandboxSpec
from roll_flash.sandboxes.errors import SandboxDied
from roll_flash.types import Message

MAX_TURNS = 64

Agent = Callable[[Any, Sequence[Message], int], Awaitable[str]]
"""Takes the environment, the messages so far and the turn (from 0); returns the text of the agent."""


@dataclass(slots=True)
class PlayedEpisode:
    """One episode. It stops at the first error; `error` gives the message and the part."""

    seed: int
    prompt: list[Message] = field(default_factory=list)
    steps: list[tuple[str, tuple[Message, ...], float]] = field(default_factory=list)
    """Action, answer of the environment, reward."""
    ended: bool = False
    success: bool | None = None
    full_reward: float | None = None
    """Set only on request, because some environments must search for it."""
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    part: str = "reset"
    """Current part of the episode, for `error`."""
    error: str = ""

    @property
    def reward(self) -> float:
        return sum(reward for _, _, reward in self.steps)


class Player:
    """Plays episodes of one environment. Use it with `async with`, which closes its sandboxes at the end."""

    def __init__(
        self,
        env_id: str,
        kwargs: Mapping[str, Any],
        *,
        provider: str,
        timeout_s: float,
        run: str,
        spec: SandboxSpec | None = None,
    ) -> None:
        """`spec`: of the sandbox of an environment that has none of its own."""
        self._env_id = env_id
        self._spec = spec or SandboxSpec()
        self._kwargs = dict(kwargs)
        self._timeout_s = timeout_s
        self._pool = SandboxPool(provider=provider, size=0, run=run)

    async def __aenter__(self) -> Player:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def open(self) -> tuple[Any, Any]:
        """Return an environment and its sandbox (None if it needs none). Exceptions of its constructor pass through."""
        env = await call_in_thread(lambda: make_env(self._env_id, **copy.deepcopy(self._kwargs)))
        inner = env.unwrapped
        if not isinstance(inner, SandboxEnv):
            return env, None
        lease = LazySandbox(self._pool, lambda: inner.sandbox_spec or self._spec)
        inner.sandbox = lease
        return env, lease

    async def play(self, agent: Agent, seed: int, *, with_full_reward: bool = False) -> PlayedEpisode:
        """Play an episode and record its errors. Raises SandboxError if no sandbox can be started."""
        env, lease = await self.open()
        played = PlayedEpisode(seed)
        wrapped = AsyncEnvironment(env, DaemonThreads())
        try:
            await self._play(wrapped, agent, played, with_full_reward)
        except SandboxDied as error:
            played.error = f"{played.part}: {error}"
        except SandboxError:
            raise
        except TimeoutError as error:
            played.error = f"{played.part}: {error or f'took longer than {self._timeout_s:g} s'}"
        except (Exception, SystemExit) as error:  # user code may raise anything
            played.error = f"{played.part} raised {' '.join(described(error).split())[:300]}"
        finally:
            played.error = played.error or await self._close(wrapped)
            if lease is not None:
                await lease.close()
        return played

    async def _play(self, env: Any, agent: Agent, played: PlayedEpisode, with_full_reward: bool) -> None:
        async with asyncio.timeout(self._timeout_s):
            began = time.monotonic()
            played.prompt, _ = await env.reset(played.seed)
            played.reset_s = time.monotonic() - began
        if with_full_reward:
            played.full_reward = float(getattr(env.unwrapped, "full_reward", 1.0))
        for turn in range(MAX_TURNS):
            played.part = f"step {turn + 1}"
            async with asyncio.timeout(self._timeout_s):
                action = await agent(env.unwrapped, messages_of(played), turn)
                began = time.monotonic()
                step = await env.step(action)
                played.step_s.append(time.monotonic() - began)
            played.steps.append((action, tuple(step.messages), step.reward))
            if step.terminated or step.truncated:
                played.ended = True
                success = step.info.get("success")
                played.success = None if success is None else bool(success)
                return

    async def _close(self, env: Any) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                await env.close()
        except TimeoutError:
            return f"close: took longer than {self._timeout_s:g} s"
        except (Exception, SystemExit) as error:  # user code may raise anything
            return f"close raised {described(error)}"
        return ""


def messages_of(played: PlayedEpisode) -> list[Message]:
    """Return the whole conversation."""
    messages = list(played.prompt)
    for action, answer, _ in played.steps:
        messages += [{"role": "assistant", "content": action}, *answer]
    return messages
