"""The environment API: a gymnasium environment whose observations are messages and whose actions are text.

There are three ways to write one. All are registered the same way and run by the same workers:

- a plain `gymnasium.Env` with `str` observations and actions; it may block, because it runs in a thread;
- `Env`: the same five-tuple with `async def reset/step/close`, for environments that wait for I/O;
- `SandboxEnv`: an `Env` with `self.sandbox`, a private container that is leased at the first use.
"""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium

from roll_flash.types import Message

if TYPE_CHECKING:
    from roll_flash.sandboxes import Sandbox, SandboxSpec

Observation = str | list[Message]
"""A `str` is one user message."""

StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""`(observation, reward, terminated, truncated, info)`; `info["success"]` is True if the task was solved."""

MAX_SAMPLE_CHARACTERS = 200


class TextSpace(gymnasium.Space[Any]):
    """Space of any `str`, of any length and script, and any list of chat messages.

    `gymnasium.spaces.Text` accepts only a given set of characters, by default letters and digits.
    """

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return up to MAX_SAMPLE_CHARACTERS printable characters."""
        length = int(self.np_random.integers(MAX_SAMPLE_CHARACTERS + 1))
        return "".join(self.np_random.choice(list(string.printable), size=length))

    def contains(self, x: Any) -> bool:
        if isinstance(x, str):
            return True
        return isinstance(x, list) and all(isinstance(message, dict) and "role" in message for message in x)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"


if TYPE_CHECKING:

    class _GymnasiumEnv:
        """Empty base class for type checkers, which reject coroutines as overrides of gymnasium's functions."""

        observation_space: gymnasium.Space[Any]
        action_space: gymnasium.Space[Any]

        @property
        def unwrapped(self) -> Any: ...
else:
    _GymnasiumEnv = gymnasium.Env


class Env(_GymnasiumEnv):
    """A gymnasium environment whose methods are coroutines. One instance plays one episode at a time.

    An exception from `reset` or `step` fails the episode with the cause `env_error`; it never ends the run.
    """

    observation_space = TextSpace()
    action_space = TextSpace()

    step_timeout_s: float = math.inf
    """Time limit in seconds of a `step` or `conclude`, set by the worker from `rollout.step_timeout_s`. A timeout fails
    the episode and gives no sample, so the environment must stop earlier any work that a model can make slow."""
    episode_timeout_s: float = math.inf
    """Time limit in seconds of a whole episode, set by the worker from `rollout.episode_timeout_s`."""

    def min_step_timeout_s(self) -> float:
        """Smallest allowed step timeout in seconds; a run with a smaller one is refused at its start."""
        return 0.0

    def min_episode_timeout_s(self) -> float:
        """Smallest allowed episode timeout in seconds, without the time in which the model generates."""
        return self.min_step_timeout_s()

    def calls_timeout_s(self, spent_s: float) -> float:
        """Return the time limit in seconds for all tool calls of one turn, after `spent_s` in earlier turns: half of a
        step, and half of an episode together. The rest is for the model and the scores."""
        return min(self.step_timeout_s / 2, self.episode_timeout_s / 2 - spent_s)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode. The same seed gives the same task."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def reset`")

    async def step(self, action: str) -> StepResult:
        """Apply the text of the model and return the result."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def step`")

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the reward of the episode so far and info, when the run's limit of turns or tokens ends it.

        Called only if `step` has not ended the episode.
        """
        return 0.0, {}

    async def close(self) -> None:
        """Release the resources of the episode."""


class SandboxEnv(Env):
    """An `Env` with a sandbox. Set `sandbox_spec` on the class or the instance; the worker sets `sandbox`.

    The sandbox is leased at its first use and closed with the episode. If it cannot be started or dies, a
    `SandboxError` passes through the environment and the sample is masked, not scored.
    """

    sandbox_spec: ClassVar[SandboxSpec | None] = None
    sandbox: Sandbox

    async def agent_task(self) -> str:
        """Write the task's files to the sandbox and return an instruction that names no tool of the environment, for an
        agent with its own tools (`AgentEnv`). Optional; then `conclude` scores the final state."""
        raise NotImplementedError(f"{type(self).__name__} gives agents no task: it has no `agent_task`")
