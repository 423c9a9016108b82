"""OpenEnv-v0: an environment behind an OpenEnv server that runs separately (openenv-core 0.3).

By the server's schema, the model writes the action's one field, a JSON object, or tool calls if the environment is a
set of MCP tools. If the server rejects an action, or its environment raises, the model sees the error.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from roll_flash.envs.adapters.openenv.actions import JsonActions, TextActions, actions_of, as_text, takes_tools
from roll_flash.envs.adapters.openenv.connection import NAME, OpenEnvConnection, SessionEnded, WrongAction
from roll_flash.envs.base import Env, StepResult
from roll_flash.envs.hosting.environments import MAX_CHARACTERS
from roll_flash.envs.tools.calls import BadCall, ToolCall, parse_tool_calls
from roll_flash.envs.tools.functions import ToolDescription
from roll_flash.envs.tools.prompt import (
    ToolFormat,
    describe_tools,
    known_format,
    show_results,
    tool_info,
    with_system_text,
)
from roll_flash.envs.tools.tool_env import MAX_TOOLS_SHARE_OF_STEP
from roll_flash.errors import ConfigError, EnvError
from roll_flash.types import MAX_REWARD, Message, bounded


class OpenEnv(Env):
    """Arguments: `url` of the server (http, https, ws or wss), `reset_kwargs` (in addition to the seed), `action_field`
    and `observation_field` (if the schema leaves a choice), `max_turns`, `timeout_s` (for each answer, and for the wait
    for a free session), `success_reward` (the sum of rewards that counts as solved), `tool_format`.

    Rewards come from the server, step by step.
    """

    def __init__(
        self,
        url: str,
        reset_kwargs: Mapping[str, Any] | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        max_turns: int = 30,
        timeout_s: float = 60.0,
        success_reward: float = 1.0,
        tool_format: ToolFormat = "native",
    ) -> None:
        if max_turns < 1 or timeout_s <= 0:
            raise ConfigError(f"{NAME}: max_turns must be at least 1 and timeout_s positive")
        self._connection = OpenEnvConnection(url, timeout_s)
        self._reset_kwargs = dict(reset_kwargs or {})
        self._action_field = action_field
        self._observation_field = observation_field
        self._max_turns = max_turns
        self._success_reward = success_reward
        self._tool_format: ToolFormat = known_format(tool_format, NAME)
        self._actions: TextActions | JsonActions | None = None
        self._tools: dict[str, ToolDescription] = {}
        self._turns = 0
        self._earned = 0.0
        self._wrong = 0
        self._calls_s = 0.0
        self._began_s = 0.0
        self._ends_at = math.inf

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        self._turns, self._earned, self._wrong, self._calls_s = 0, 0.0, 0, 0.0
        self._began_s = time.monotonic()
        try:
            return await self._begin(seed)
        except BaseException:
            await self.close()
            raise

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        step_ends_at = time.monotonic() + MAX_TOOLS_SHARE_OF_STEP * self.step_timeout_s
        self._ends_at = min(step_ends_at, self._began_s + MAX_TOOLS_SHARE_OF_STEP * self.episode_timeout_s)
        new_messages, earned, done = await (self._call_tools(action) if self._tools else self._act(action))
        earned = bounded(bounded(self._earned + earned) - self._earned)  # all turns together, too
        self._earned += earned
        truncated = not done and self._turns >= self._max_turns
        info = (await self.conclude())[1] if done or truncated else {}
        return new_messages, earned, done, truncated, info

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return no reward, because the steps have given all of it."""
        return 0.0, {"success": self._earned >= self._success_reward, "wrong_actions": self._wrong}

    async def close(self) -> None:
        await self._connection.close()

    async def _begin(self, seed: int | None) -> tuple[list[Message], dict[str, Any]]:
        schema = await self._connection.action_schema()
        settings = {**({} if seed is None else {"seed": seed}), **self._reset_kwargs}
        first = await self._connection.reset(settings)
        if takes_tools(schema):
            self._tools = await self._list_tools()
            about = describe_tools(list(self._tools.values()), self._tool_format)
        else:
            self._actions = actions_of(schema, self._action_field)
            about = self._actions.instructions
        said = as_text(first["observation"], self._observation_field)
        tools = list(self._tools.values())
        return with_system_text([{"role": "user", "content": said}], about), tool_info(tools, self._tool_format)

    async def _act(self, text: str) -> tuple[list[Message], float, bool]:
        assert self._actions is not None, "reset() comes first"
        try:
            answer = await self._take_action(self._actions.action(text))
        except WrongAction as error:
            self._wrong += 1
            told = f"Error: {error}. {self._actions.instructions}"
            return [{"role": "user", "content": told}], 0.0, isinstance(error, SessionEnded)
        observation = answer["observation"]
        # The result of an action may lack the field, such as that of one which the environment refuses.
        field = self._observation_field if self._observation_field in observation else None
        return [{"role": "user", "content": as_text(observation, field)}], _reward(answer), bool(answer.get("done"))

    async def _take_action(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one action, and end it before the step or the episode times out, because a timeout gives no sample."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise SessionEnded("not run: the episode has no time left")
        return await self._connection.step(action, left_s)

    async def _list_tools(self) -> dict[str, ToolDescription]:
        try:
            listed = (await self._connection.step({"type": "list_tools"}))["observation"]["tools"]
            return {
                tool["name"]: ToolDescription(tool["name"], tool.get("description") or "", tool["input_schema"])
                for tool in listed
            }
        except (WrongAction, KeyError, TypeError) as error:
            raise EnvError(f"{NAME}: the server does not list its tools: {error!r}") from None

    async def _call_tools(self, text: str) -> tuple[list[Message], float, bool]:
        """Run the calls; text without a call ends the episode. Skip calls that would exceed the time of the step or of
        the episode."""
        began = time.monotonic()
        calls_end_at = began + self.calls_timeout_s(self._calls_s)
        calls = parse_tool_calls(text, self._tools)
        shown: list[str] = []
        earned, done = 0.0, not calls
        for call in calls:
            if done:
                break
            if sum(map(len, shown)) > MAX_CHARACTERS:
                shown.append("Error: not run: the results of this turn are too long already")
                break
            if time.monotonic() > calls_end_at:
                shown.append("Error: not run: the calls of this turn have taken all of its time")
                break
            said, reward, done = await self._call_tool(call)
            shown.append(said)
            earned += reward
        self._calls_s += time.monotonic() - began
        return show_results(shown, self._tool_format) if shown else [], earned, done

    async def _call_tool(self, call: ToolCall | BadCall) -> tuple[str, float, bool]:
        if isinstance(call, BadCall):
            self._wrong += 1
            return f"Error: {call.message}", 0.0, False
        wanted = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        try:
            answer = await self._take_action(wanted)
        except WrongAction as error:
            self._wrong += 1
            return f"Error: {error}", 0.0, isinstance(error, SessionEnded)
        observation = answer["observation"]
        fault = observation.get("error")
        self._wrong += bool(fault)
        said = f"Error: {_plain(fault)}" if fault else _plain(observation.get("result"))
        return said, _reward(answer), bool(answer.get("done"))


def _reward(answer: Mapping[str, Any]) -> float:
    """Return the reward of an answer: 0 for none, and for one that is no finite number, which an action may cause; no
    more than MAX_REWARD, because a larger one is no sample. Raises TypeError for anything else."""
    reward = answer.get("reward") or 0.0
    if not isinstance(reward, int | float):
        raise TypeError(f"the reward is a {type(reward).__name__}, not a number")
    return float(max(-MAX_REWARD, min(MAX_REWARD, reward))) if abs(reward) < math.inf else 0.0


def _plain(value: Any) -> str:
    """Return the plain form of an MCP result, which contains the same data several times."""
    if isinstance(value, dict):
        for name in ("data", "message"):
            if value.get(name) is not None:
                return _plain(value[name])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
