"""What an environment is: a gymnasium environment whose observations are messages and whose actions are text.

Three ways to write one, all registered the same way and run by the same workers:

- a plain `gymnasium.Env` with `str` observations and actions; it may block, it runs in a thread;
- `Env`: the same five-tuple with `async def reset/step/close`, for environments that wait for something;
- `SandboxEnv`: an `Env` with `self.sandbox`, a container of its own that is leased at the first use.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
from roll_flash.envs.text_space import TextSpace

from roll_flash.types import Message

if TYPE_CHECKING:
    from roll_flash.sandboxes import Sandbox, SandboxSpec

Observation = str | list[Message]
"""A `str` is one user message."""

StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""`(observation, reward, terminated, truncated, info)`; `info["success"]` says whether the task was solved."""

if TYPE_CHECKING:

    class _GymnasiumEnv:
        """Type checkers see no base class: coroutines in place of functions are no override that they accept."""

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
    """Set by who runs the episode (`rollout.step_timeout_s`): a step, or `conclude`, that takes longer is given up, and
    the episode is a failure and no sample. What a model can make slow must be ended before."""
    episode_timeout_s: float = math.inf
    """The same of a whole episode (`rollout.episode_timeout_s`)."""

    def least_step_timeout_s(self) -> float:
        """A run that allows its steps less is refused at its start."""
        return 0.0

    def least_episode_timeout_s(self) -> float:
        """The same for a whole episode, the time that the model takes to answer apart."""
        return self.least_step_timeout_s()

    def calls_may_take_s(self, spent_s: float) -> float:
        """For all calls of tools of a turn, after those of earlier turns took `spent_s`: half of a step and of an
        episode. The rest is for the model and the scores."""
        return min(self.step_timeout_s / 2, self.episode_timeout_s / 2 - spent_s)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode. Same seed, same task."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def reset`")

    async def step(self, action: str) -> StepResult:
        """Take the model's text and answer it."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def step`")

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """The episode ends here, by the run's limit of turns or of tokens: the reward for the whole so far, and info.

        Asked only if `step` has not ended the episode.
        """
        return 0.0, {}

    async def close(self) -> None:
        """Give back what the episode holds."""


class SandboxEnv(Env):
    """An `Env` with a sandbox. Set `sandbox_spec` on the class or the instance; who runs the episode sets `sandbox`.

    The sandbox is leased when it is first used and closed with the episode. When it cannot be had or dies, a
    `SandboxError` passes through the environment and the sample is masked, not scored.
    """

    sandbox_spec: ClassVar[SandboxSpec | None] = None
    sandbox: Sandbox
