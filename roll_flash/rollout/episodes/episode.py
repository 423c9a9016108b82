"""Runs one episode, from reset to reward. Every error becomes an `EpisodeFailure` with a cause.

Every wait has a deadline: each model call, each environment step, and the episode as a whole.
Cancelling the coroutine cancels the request in flight and closes the environment and its sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from roll_flash.config.user_code import described
from roll_flash.envs.hosting.environments import AsyncEnvironment, BadRewardError
from roll_flash.envs.tools.tool_chat import declared_tools
from roll_flash.errors import InferenceError, ModelError
from roll_flash.processes.background import ends_this_task
from roll_flash.processes.deadlines import SteadyClock
from roll_flash.rollout.episodes.conversation import Action, ContextFullError, Policy
from roll_flash.rollout.episodes.prefix import Prefix, PrefixError
from roll_flash.rollout.turns import DivergedError, EpisodeTurns
from roll_flash.sandboxes import SandboxError
from roll_flash.types import (
    ENDS_OF_THE_RUN,
    EpisodeEnd,
    EpisodeFailure,
    EpisodeSpec,
    FailureCause,
    Message,
    Trajectory,
    Turn,
)

logger = logging.getLogger(__name__)

LARGE_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts in seconds for the parts of an episode."""

    generate_s: float
    step_s: float
    episode_s: float


class EpisodeFailed(Exception):
    """Ends an episode as a failure with the given cause."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause: FailureCause = cause


@dataclass(slots=True)
class Progress:
    """Current state of an episode, for the watchdog."""

    turn: int = 0
    waits_for: str = "reset"
    since: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ends_at: float = math.inf
    """Deadline of the episode, as `time.monotonic()`."""
    is_cancelled: bool = False

    def require_running(self) -> None:
        """Raise CancelledError or TimeoutError if the episode was cancelled or is past its deadline: user code may have
        caught the cancellation (a bare `except` does), and the episode would continue."""
        if self.is_cancelled:
            raise asyncio.CancelledError
        if time.monotonic() >= self.ends_at:
            raise TimeoutError

    def now(self, waits_for: str) -> None:
        self.waits_for = waits_for
        self.since = time.monotonic()


PlayAgent = Callable[[EpisodeSpec, AsyncEnvironment, Deadlines, Progress], Awaitable[Trajectory]]
"""Runs an environment that brings its own agent loop, from `play` to `score`."""


async def run_episode(
    spec: EpisodeSpec,
    open_env: Callable[[], Awaitable[AsyncEnvironment]],
    policy: Policy,
    deadlines: Deadlines,
    progress: Progress,
    play_agent: PlayAgent | None = None,
    turns: EpisodeTurns | None = None,
) -> Trajectory | EpisodeFailure:
    """Play `spec` and return its trajectory or failure. Raises only on cancellation, and DivergedError if its recorded
    turns cannot be played again. `turns`: those that `policy` has too."""
    episode = _Episode(spec, policy, deadlines, progress, turns)
    progress.ends_at = time.monotonic() + deadlines.episode_s
    cause: FailureCause
    try:
        async with asyncio.timeout(deadlines.episode_s):
            return await episode.play(open_env, play_agent)
    except DivergedError:
        raise
    except EpisodeFailed as failure:
        cause, message = failure.cause, str(failure)
    except PrefixError as error:
        cause, message = "env_error", str(error)
    except TimeoutError:
        cause = "episode_timeout"
        message = f"not finished after {deadlines.episode_s:g} s; it was waiting for {progress.waits_for}"
    except Exception as error:  # a bug in ROLL Flash: the group must not wait for this episode forever
        logger.exception("episode %s", spec.episode_id)
        cause, message = "internal_error", f"{type(error).__name__}: {error}"
    return replace(
        spec.failed(cause, message, progress.turn),
        prompt_tokens=progress.prompt_tokens,
        completion_tokens=progress.completion_tokens,
        started_s=episode.started_s,
        finished_s=episode.clock.now_s(),
    )


class _Episode:
    """An episode while it is played."""

    def __init__(
        self, spec: EpisodeSpec, policy: Policy, deadlines: Deadlines, progress: Progress, turns: EpisodeTurns | None
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._deadlines = deadlines
        self._progress = progress
        self._recorded = turns
        self._prefix = Prefix()
        self._turns: list[Turn] = []
        self.clock = SteadyClock()
        self.started_s = self.clock.now_s()

    async def play(
        self, open_env: Callable[[], Awaitable[AsyncEnvironment]], play_agent: PlayAgent | None
    ) -> Trajectory:
        self._prefix = Prefix.of(self._spec.task)
        deadlines, progress = self._deadlines, self._progress
        progress.now("make")
        async with environment_errors(deadlines.step_s, "make"):
            env = await open_env()
        try:
            env.allow(deadlines.step_s, deadlines.episode_s)
            self._check_recorded_turns(env)
            progress.now("reset")
            async with environment_errors(deadlines.step_s, "reset"):
                messages, about = await env.reset(self._spec.task.seed)
                tools, info = declared_tools(about)
            self._prefix.check_opening(messages)
            if env.runs_own_loop:
                if play_agent is None:
                    reason = "the environment plays itself, and nothing here gives its agent a gateway"
                    raise EpisodeFailed("env_error", reason)
                trajectory = await play_agent(self._spec, env, deadlines, progress)
            elif not messages:
                raise EpisodeFailed("env_error", "reset returned an empty observation; say what the task is")
            else:
                await _tokenise_messages(lambda given: self._policy.begin(given, tools), messages)
                trajectory = await self._play_steps(env)
            progress.now("close")
        finally:
            close_error = await _close(env, deadlines.step_s)
        info = {**info, **trajectory.info, **({"close_error": close_error} if close_error else {})}
        success = info.get("success")
        return replace(trajectory, info=info, success=None if success is None else bool(success))

    def _check_recorded_turns(self, env: AsyncEnvironment) -> None:
        if self._recorded is not None and not env.is_deterministic:
            self._recorded.stop()
        self._prefix.require_repeatable(env)
        if self._prefix.turns and len(self._prefix.turns) >= self._spec.max_turns:
            reason = f"recorded turns are all of the {self._spec.max_turns} that max_turns allows"
            raise EpisodeFailed("env_error", reason)

    async def _play_steps(self, env: AsyncEnvironment) -> Trajectory:
        end, info = await self._play_turns(env)
        turns, policy = self._turns, self._policy
        if self._recorded is not None and self._recorded.continued:
            info["continued_turns"] = self._recorded.continued
        if end in ENDS_OF_THE_RUN:
            info |= await self._final_score(env)
        if policy.tools_shown:
            info["tools_shown"] = policy.tools_shown
        own, *branches = policy.samples()
        return Trajectory(
            episode_id=self._spec.episode_id,
            group_id=self._spec.group_id,
            task=self._spec.task,
            token_ids=own.token_ids,
            policy_mask=own.policy_mask,
            logprobs=own.logprobs,
            versions=own.versions,
            turns=tuple(turns),
            messages=policy.messages(),
            reward=sum(turn.reward for turn in turns),
            success=None,
            end=end,
            prompt_length=own.prompt_length,
            started_s=self.started_s,
            finished_s=self.clock.now_s(),
            info=info,
            branches=tuple(branches),
            routed_experts=own.routed_experts,
        )

    async def _play_turns(self, env: AsyncEnvironment) -> tuple[EpisodeEnd, dict[str, Any]]:
        """Play until the episode ends; return how, and the last `info` of the environment."""
        spec, turns, progress, step_s = self._spec, self._turns, self._progress, self._deadlines.step_s
        info: dict[str, Any] = {}
        while len(turns) < spec.max_turns:
            progress.require_running()
            progress.turn = len(turns)
            in_prefix = len(turns) < len(self._prefix.turns)
            progress.now("the model")
            started_s = self.clock.now_s()
            action = await self._next_action(in_prefix=in_prefix)
            if action is None:
                return "context_limit", info
            progress.prompt_tokens += action.prompt_tokens or 0
            progress.completion_tokens += action.completion_tokens or 0
            progress.now("the environment's step")
            started = time.monotonic()
            async with environment_errors(step_s, "step"):
                step = await env.step(action.text)
                info = dict(step.info)
            turns.append(
                Turn(
                    start=action.start,
                    end=action.end,
                    action=action.text,
                    observation=step.text,
                    reward=step.reward,
                    finish_reason=action.finish_reason,
                    generate_s=action.elapsed_s,
                    step_s=time.monotonic() - started,
                    prompt_tokens=action.prompt_tokens,
                    completion_tokens=action.completion_tokens,
                    started_s=started_s,
                    server=action.server,
                    in_prefix=in_prefix,
                )
            )
            is_over = step.terminated or step.truncated
            if in_prefix:
                self._prefix.check_answer(len(turns) - 1, step)
            elif self._recorded is not None:
                self._recorded.answered(step, is_last=is_over or len(turns) == spec.max_turns)
            if is_over:
                return "terminated" if step.terminated else "truncated", info
            await _tokenise_messages(self._policy.observe, step.messages, *self._policy.messages())
        return "max_turns", info

    async def _next_action(self, *, in_prefix: bool) -> Action | None:
        """Return the model's answer, or the recorded one; None if the context is full."""
        generate_s, number = self._deadlines.generate_s, len(self._turns)
        try:
            if in_prefix:
                return self._policy.repeat(self._prefix.turns[number])
            return await self._policy.act(generate_s)
        except ContextFullError as error:
            if number == len(self._prefix.turns):
                raise EpisodeFailed("prompt_too_long", str(error)) from None
            return None
        except TimeoutError:
            raise EpisodeFailed("generate_timeout", f"no answer after {generate_s:g} s") from None
        except InferenceError as error:
            raise EpisodeFailed("generate_error", str(error)) from None

    async def _final_score(self, env: AsyncEnvironment) -> Mapping[str, Any]:
        """Ask for the final score of an episode that the environment did not end itself."""
        self._progress.now("the environment's score")
        async with environment_errors(self._deadlines.step_s, "conclude"):
            reward, info = await env.conclude()
        last = self._turns[-1]
        self._turns[-1] = replace(last, reward=last.reward + reward)
        return info


def with_success(outcome: Trajectory | EpisodeFailure, above: float | None) -> Trajectory | EpisodeFailure:
    """Return the outcome as a success or not by its reward, if the environment did not say and `above` is given."""
    if above is None or isinstance(outcome, EpisodeFailure) or outcome.success is not None:
        return outcome
    return replace(outcome, success=outcome.reward > above)


async def _tokenise_messages(take: Callable[..., None], messages: Sequence[Message], *earlier: Message) -> None:
    """Tokenise in a thread if all, with the `earlier` ones that may be rendered anew, are long: 1 MB takes a second."""
    try:
        if sum(len(str(message.get("content", ""))) for message in (*earlier, *messages)) > LARGE_CHARACTERS:
            await asyncio.to_thread(take, messages)
        else:
            take(messages)
    except ModelError as error:  # the template cannot show the environment's messages, and a retry would not help
        raise EpisodeFailed("env_error", str(error)) from error


@asynccontextmanager
async def environment_errors(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Turn every exception of an environment, which is user code, into EpisodeFailed, also one that is no Exception:
    SystemExit would stop the worker and all its episodes."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise EpisodeFailed("env_error", f"{what} raised TimeoutError: {error}") from error
        raise EpisodeFailed("env_timeout", f"{what} took longer than {timeout_s:g} s") from None
    except SandboxError as error:
        raise EpisodeFailed("sandbox_error", str(error)) from error
    except BadRewardError as error:
        raise EpisodeFailed("bad_reward", str(error)) from error
    except BaseException as error:
        if ends_this_task(error):
            raise
        raise EpisodeFailed("env_error", f"{what} raised {described(error)}") from error


async def _close(env: AsyncEnvironment, timeout_s: float) -> str | None:
    """Close `env` and return the error message, if any: the episode still counts if closing fails."""
    try:
        async with environment_errors(timeout_s, "close"):
            await env.close()
    except EpisodeFailed as failure:
        return str(failure)
    return None
