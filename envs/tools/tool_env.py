"""`ToolEnv`: an environment defined by its tools and its rewards.

The model's text is searched for tool calls. Each call is checked, run with a deadline, and answered; text without a
call is the final answer. A call that is wrong, raises, hangs or returns too much is counted and reported to the model;
it never ends the episode. Only failures that are not the model's fault do (a sandbox that died, an `EnvError`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from roll_flash.chat.model_text import cut_middle, last_answer
from roll_flash.config.fields import require_lists
from roll_flash.envs.base import Env, Observation, SandboxEnv, StepResult, TextSpace
from roll_flash.envs.rewards.functions import TOLERANCE, Rubric
from roll_flash.envs.tools.calls import BadCall, ToolCall, parse_tool_calls
from roll_flash.envs.tools.definitions import refuse_functions_of_an_instance, rubric_of, tools_of
from roll_flash.envs.tools.functions import Tool, ToolError, WrongArguments
from roll_flash.envs.tools.mcp.servers import McpServers
from roll_flash.envs.tools.prompt import (
    ToolFormat,
    describe_tools,
    known_format,
    show_results,
    tool_info,
    with_system_text,
)
from roll_flash.envs.tools.results import limit_prints, render_result
from roll_flash.errors import ConfigError, EnvError
from roll_flash.processes.background import call_in_thread, call_sync_or_async, ends_this_task
from roll_flash.sandboxes.errors import SandboxBusy, SandboxDied, SandboxError, SandboxFileError
from roll_flash.types import Message

logger = logging.getLogger("roll_flash.envs")

ERROR_CHARACTERS = 600
MAX_TOOLS_SHARE_OF_STEP = 0.9
"""Maximum share of the step timeout for the tool calls of one turn, if a tool has a long timeout."""

_PROMPTS = TextSpace()

OUT_OF_MEMORY = "oom"
"""The only reason for a sandbox's death that is caused by the code running in it."""


@dataclass(slots=True)
class ToolUse:
    """Usage of one tool in an episode. `errors` counts wrong calls, exceptions and `timeouts`."""

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0

    @property
    def successes(self) -> int:
        return self.calls - self.errors


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Result of one call in the current turn."""

    name: str
    arguments: Mapping[str, Any]
    output: str
    ok: bool


@dataclass(slots=True)
class _Episode:
    """State of one episode, replaced at each reset."""

    use: dict[str, ToolUse] = field(default_factory=dict)
    calls_s: float = 0.0
    """Seconds that the calls of all turns so far took."""
    calls_end_at: float = math.inf
    """Deadline of this turn's calls, on the clock `time.monotonic()`."""
    of_turns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sum of what each reward of turns gave so far."""
    turn: int = 0
    finished: bool = False


class ToolEnv(Env):
    """Base class for tool environments: define `begin`, mark methods with `@tool()` and `@reward()`.

    During an episode: `turn` (from 1), `last_calls` (outcomes of this turn), `final_answer` (None until the model
    gives one: its text without a call, or the content of `<answer>`), `used(tool)`; `finish()` ends the episode.
    At the end the final rewards are computed. `info["success"]` is `self.success` if that is set, else True if every
    final reward is full (None if none counts). `info["tools"]` has calls, errors, timeouts and seconds of each tool.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Plain functions that are also tools."""
    rewards: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions of the environment that are also rewards."""
    mcp_servers: Mapping[str, Mapping[str, Any]] = {}
    """MCP servers whose tools are tools too, by name; `McpServer` has the keys of one. They start after `begin`."""
    mcp_allow: Sequence[str] = ()
    """Hosts that `mcp_servers` may be at: `host:port`, as in `SandboxSpec.allow`."""
    instructions: str = ""
    """Start of the system message; the description of the tools follows."""
    tool_format: ToolFormat = "native"
    """Format of tool descriptions and results: `native` uses the model's chat template (or `hermes`, if the template
    does not support tools). Calls are parsed in every format."""
    max_turns: int = 8
    """Number of turns after which the episode is scored and `truncated`, like a run's `max_turns`."""
    max_calls_per_turn: int = 16

    success: bool | None = None
    final_answer: str | None = None
    last_calls: Sequence[CallOutcome] = ()

    def __init__(
        self,
        *,
        tool_format: ToolFormat | None = None,
        max_turns: int | None = None,
        mcp_servers: Mapping[str, Mapping[str, Any]] | None = None,
        mcp_allow: Sequence[str] | None = None,
    ) -> None:
        self.tool_format = known_format(tool_format or self.tool_format, type(self).__name__)
        if max_turns is not None:
            self.max_turns = max_turns
        if self.max_turns < 1:
            raise ConfigError(f"{type(self).__name__}: max_turns must be at least 1")
        if mcp_servers is not None:
            self.mcp_servers = mcp_servers
        if mcp_allow is not None:
            self.mcp_allow = mcp_allow
        require_lists(type(self).__name__, mcp_allow=self.mcp_allow)
        if self._servers.are_outside:
            self.nondeterministic = True  # a repeated call could have its effect twice
        _ = self._tools, rubric_of(type(self))  # type: ignore[arg-type]  # raise for wrong definitions

    async def begin(self, seed: int) -> Observation:
        """Set up the task of this seed and return the prompt. The same seed gives the same task."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def begin(self, seed)`")

    async def answered(self, text: str) -> Observation | None:
        """Handle text without a call. None ends the episode; a message continues it."""
        return None

    def finish(self) -> None:
        """End the episode after this turn; for tools such as `submit`."""
        self._episode.finished = True

    @property
    def turn(self) -> int:
        return self._episode.turn

    def calls_timeout_s(self, spent_s: float) -> float:
        """As in `Env`, but more of the step if a tool has a long timeout. A model with slow calls gets an error message
        instead of a failed episode."""
        longest_s = max((tool.options.timeout_s for tool in self._tools.values()), default=0.0)
        of_step_s = min(MAX_TOOLS_SHARE_OF_STEP * self.step_timeout_s, max(self.step_timeout_s / 2, longest_s))
        return min(of_step_s, self.episode_timeout_s / 2 - spent_s)

    @property
    def calls_left_s(self) -> float:
        """Seconds that remain for the calls of this turn."""
        return max(0.0, self._episode.calls_end_at - time.monotonic())

    def used(self, tool: str) -> ToolUse:
        """Return the usage of the tool with this name so far in the episode."""
        return self._episode.use.get(tool, ToolUse())

    @property
    def full_reward(self) -> float:
        """Largest possible reward of an episode, without rewards of single turns."""
        return self._rubric.full_reward

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        refuse_functions_of_an_instance(self)
        await self._servers.close()
        self._episode = _Episode()
        self.success, self.final_answer, self.last_calls = None, None, ()
        task = await call_sync_or_async(self.begin, random.randrange(1 << 30) if seed is None else seed)
        if not _PROMPTS.contains(task):
            raise EnvError(f"begin returned {type(task).__name__}, not the prompt: a str or a list of chat messages")
        limit_s = MAX_TOOLS_SHARE_OF_STEP * self.step_timeout_s
        await self._servers.open(getattr(self, "sandbox", None), self._own_tools, limit_s)
        messages: list[Message] = [{"role": "user", "content": task}] if isinstance(task, str) else list(task)
        return self._with_system(messages), tool_info(list(self._tools.values()), self.tool_format)

    async def step(self, action: str) -> StepResult:
        self._episode.turn += 1
        calls = parse_tool_calls(action, self._tools) if self._tools else []
        observation = await (self._run_calls(calls) if calls else self._take_answer(action))
        terminated = observation is None or self._episode.finished
        truncated = not terminated and self._episode.turn >= self.max_turns
        of_turn = await self._rubric.score(self, "turn")
        for name, value in of_turn.values.items():
            self._episode.of_turns[name] += value
        final, info = await self.conclude() if terminated or truncated else (0.0, self._info({}))
        return observation or "", of_turn.total + final, terminated, truncated, info

    async def close(self) -> None:
        await self._servers.close()

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the final rewards of the episode in its current state."""
        final = await self._rubric.score(self, "final")
        success = self.success
        if success is None and self._rubric.defines_success:
            success = final.is_full and final.total >= self.full_reward - TOLERANCE
        return final.total, {**self._info(final.values), "success": success}

    def _info(self, final: Mapping[str, float]) -> dict[str, Any]:
        """Return the usage of the tools, and the values of the rewards: `final`, and those of the turns so far."""
        ignored = {"mcp_ignored": self._servers.ignored} if self._servers.ignored else {}
        tools = {name: asdict(use) for name, use in self._episode.use.items()}
        return {"tools": tools, **ignored, "rewards": {**self._episode.of_turns, **final}}

    async def _run_calls(self, calls: Sequence[ToolCall | BadCall]) -> Observation:
        began = time.monotonic()
        self._episode.calls_end_at = began + self.calls_timeout_s(self._episode.calls_s)
        outcomes = [await self._run_call(call) for call in calls[: self.max_calls_per_turn]]
        self._episode.calls_s += time.monotonic() - began
        self.last_calls = tuple(outcomes)
        shown = [outcome.output if outcome.ok else f"Error: {outcome.output}" for outcome in outcomes]
        if len(calls) > len(outcomes):
            shown.append(f"Error: only the first {len(outcomes)} of {len(calls)} calls were run")
        return show_results(shown, self.tool_format)

    async def _take_answer(self, action: str) -> Observation | None:
        self.last_calls = ()
        self.final_answer = last_answer(action)
        answer: Observation | None = await call_sync_or_async(self.answered, self.final_answer)
        return answer

    async def _run_call(self, call: ToolCall | BadCall) -> CallOutcome:
        use = self._episode.use.setdefault(call.name, ToolUse())
        use.calls += 1
        started = time.monotonic()
        arguments: Mapping[str, Any] = {}
        try:
            if isinstance(call, BadCall):
                raise WrongArguments(call.message)
            tool = self._tools[call.name]
            arguments = tool.check(call.arguments)
            with limit_prints() as printed:
                output, ok = await self._run_tool(tool, arguments), True
            if printed.left_out:
                logger.warning("tool %s printed too much: %d characters left out", tool.name, printed.left_out)
        except WrongArguments as error:
            output, ok = str(error), False
        except _ToolFailed as error:
            use.timeouts += error.timed_out
            output, ok = str(error), False
        use.seconds += time.monotonic() - started
        use.errors += not ok
        return CallOutcome(call.name, arguments, output if ok else cut_middle(output, ERROR_CHARACTERS), ok)

    async def _run_tool(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        function = functools.partial(tool.function, *((self,) if tool.takes_env else ()), **arguments)
        limit = min(tool.options.timeout_s, self.calls_left_s)
        if limit <= 0:
            raise _ToolFailed(self._not_run_message(), timed_out=True)
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                if inspect.iscoroutinefunction(tool.function):
                    return render_result(await function(), tool.options.max_characters)
                shown = await call_in_thread(lambda: _rendered(function(), tool.options.max_characters))
                # A decorator around an async tool makes it a plain function that returns what is to be awaited.
                return shown if isinstance(shown, str) else render_result(await shown, tool.options.max_characters)
        except TimeoutError as error:
            if scope.expired():
                raise _ToolFailed(
                    f"{tool.name} took longer than {limit:.3g} s and was given up", timed_out=True
                ) from None
            raise _ToolFailed(f"{tool.name} raised TimeoutError: {error}") from None
        except ToolError as error:
            raise _ToolFailed(str(error)) from None
        except BaseException as error:  # a tool may raise anything, also the panic of a Rust library
            is_of_sandbox = isinstance(error, SandboxError) and not isinstance(error, SandboxFileError)
            if ends_this_task(error) or isinstance(error, EnvError) or is_of_sandbox:
                raise
            raise _ToolFailed(f"{tool.name} raised {type(error).__name__}: {error}") from None

    def _not_run_message(self) -> str:
        of = "episode" if self.calls_timeout_s(self._episode.calls_s) <= 0 else "turn"
        return f"not run: the calls of this {of} have taken all of its time"

    @property
    def _tools(self) -> Mapping[str, Tool]:
        """All tools by name; those of MCP servers only during an episode."""
        return {**self._own_tools, **self._servers.tools} if self._servers.tools else self._own_tools

    @property
    def _own_tools(self) -> Mapping[str, Tool]:
        return tools_of(type(self))  # type: ignore[arg-type]  # mypy takes a class for unhashable

    @functools.cached_property
    def _servers(self) -> McpServers:
        has_sandbox = isinstance(self, SandboxEnv)
        return McpServers(self.mcp_servers, self.mcp_allow, type(self).__name__, has_sandbox=has_sandbox)

    @property
    def _rubric(self) -> Rubric:
        return rubric_of(type(self))  # type: ignore[arg-type]  # the same

    def _with_system(self, messages: list[Message]) -> list[Message]:
        own = messages[:1] if messages and messages[0]["role"] == "system" else []
        about = describe_tools(list(self._tools.values()), self.tool_format)
        text = "\n\n".join(part for part in (self.instructions, *(str(m["content"]) for m in own), about) if part)
        return with_system_text(messages[len(own) :], text)


def is_caused_by_code(error: SandboxError) -> bool:
    """True for errors that only code in the sandbox can cause, so that the episode is scored."""
    return isinstance(error, SandboxBusy) or (isinstance(error, SandboxDied) and error.reason == OUT_OF_MEMORY)


class SandboxToolEnv(ToolEnv, SandboxEnv):
    """A `ToolEnv` whose tools and rewards have `self.sandbox`. If the model fills its memory, or what it left running
    does not end, the reward is 0."""

    async def step(self, action: str) -> StepResult:
        try:
            return await super().step(action)
        except (SandboxBusy, SandboxDied) as error:
            if not is_caused_by_code(error):
                raise
            died = {"sandbox_died": error.reason} if isinstance(error, SandboxDied) else {}
        final, info = await self.conclude()
        if died:  # also if a reward needs no sandbox
            final, info = min(0.0, final), {**info, "success": False, **died}
        return "", final, True, False, info

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        try:
            return await super().conclude()
        except (SandboxBusy, SandboxDied) as error:
            if not is_caused_by_code(error):
                raise
            why = {"sandbox_died": error.reason} if isinstance(error, SandboxDied) else {"sandbox_busy": True}
            return 0.0, {**self._info({}), "success": False, **why}


def _rendered(found: Any, max_characters: int) -> str | Awaitable[Any]:
    return found if inspect.isawaitable(found) else render_result(found, max_characters)


class _ToolFailed(Exception):
    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
