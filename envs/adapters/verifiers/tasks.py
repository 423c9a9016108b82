"""Verifiers-v0: environments of the package verifiers (SingleTurnEnv, MultiTurnEnv, ToolEnv and subclasses).

A row of the data set is a task, `env_response` answers the model, and the rubric gives the reward. The model is ours,
so the package's clients are not used. Optional: `pip install verifiers`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from roll_flash.envs.adapters.verifiers.faults import (
    Faults,
    calls_end_at,
    faults_of_rewards,
    is_caused_by_text,
    warn_once,
)
from roll_flash.envs.adapters.verifiers.loading import NAME, load
from roll_flash.envs.adapters.verifiers.messages import (
    MODEL,
    as_messages,
    as_response,
    checked_call,
    explain_bad_calls,
    tools_of,
)
from roll_flash.envs.base import Env, StepResult
from roll_flash.envs.held_out import HELD_OUT_SEEDS
from roll_flash.envs.tools.calls import BadCall, ToolCall, parse_tool_calls
from roll_flash.envs.tools.functions import ToolDescription
from roll_flash.envs.tools.prompt import ToolFormat, describe_tools, known_format, tool_info, with_system_text
from roll_flash.envs.tools.tool_env import ToolUse
from roll_flash.errors import ConfigError, EnvError
from roll_flash.types import Message, bounded

Split = Literal["auto", "train", "eval"]
MAX_ERROR_CHARACTERS = 1000


class Verifiers(Env):
    """Arguments: `env` (an installed environment package, or `path/to/file.py` with `load_environment`), `env_args`
    (its arguments), `split` (`auto`: held-out seeds take the evaluation data set, if the environment has one),
    `tool_format`.

    A reward function that raises because of the model's text (`ValueError`, `IndexError`, ...) gives 0, and
    `info["score_error"]` has the error; any other exception fails the episode. `info["success"]` is True if the reward
    is at least `pass_threshold`.
    """

    def __init__(
        self,
        env: str,
        env_args: Mapping[str, Any] | None = None,
        split: Split = "auto",
        tool_format: ToolFormat = "native",
    ) -> None:
        if split not in ("auto", "train", "eval"):
            raise ConfigError(f"{NAME}: split must be auto, train or eval, not {split!r}")
        self._tool_format: ToolFormat = known_format(tool_format, NAME)
        self._env = load(env, env_args or {})
        self._split = split
        self._package = importlib.import_module("verifiers")
        self._state: Any = None
        self._prompt: list[Any] = []
        self._tools: dict[str, ToolDescription] = {}
        self._use: dict[str, ToolUse] = {}
        self._trouble: list[str] = []
        self._calls_s = 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await self.close()
        self._use, self._trouble, self._calls_s = {}, [], 0.0
        state = await self._env.init_state(self._row(seed or 0), _no_client(), MODEL, None)
        state["timing"].generation.start = time.time()
        self._state = state
        try:
            await self._env.setup_state(state)
        except self._package.Error as error:
            raise EnvError(f"{NAME}: setup_state: {type(error).__name__}: {error}") from error
        self._tools = tools_of(state["tool_defs"])
        prompt = await self._next_prompt()
        if prompt is None:
            raise EnvError(f"{NAME}: the rollout is over before the first turn ({state.get('stop_condition')})")
        self._prompt = prompt
        tools = list(self._tools.values())
        messages = with_system_text(as_messages(prompt, self._tool_format), describe_tools(tools, self._tool_format))
        return messages, {"example_id": state.get("example_id"), **tool_info(tools, self._tool_format)}

    async def step(self, action: str) -> StepResult:
        calls = list(map(checked_call, parse_tool_calls(action, self._tools))) if self._tools else []
        self._count(calls)
        await self._env.add_model_response(self._state, self._prompt, as_response(self._package, action, calls))
        known = len(self._prompt) + 1
        began = time.monotonic()
        calls_end_at.set(began + self.calls_timeout_s(self._calls_s))
        prompt = await self._next_prompt()
        self._calls_s += time.monotonic() - began
        if prompt is None:
            reward, info = await self.conclude()
            return "", reward, True, False, info
        new_messages = prompt[known:]
        explain_bad_calls(new_messages, calls)
        self._prompt = prompt
        return as_messages(new_messages, self._tool_format), 0.0, False, False, {"tools": self._use_info()}

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """Return the rubric's reward for the rollout in its current state."""
        state, self._state = self._state, None
        await self._env.cleanup(state)
        faults = Faults()
        token = faults_of_rewards.set(faults)
        try:
            await self._env.rubric.score_rollout(state)
        finally:
            faults_of_rewards.reset(token)
            await self._env.rubric.cleanup(state)
        if faults.other:
            raise EnvError(f"{NAME}: {faults.other[0]}")
        reward = bounded(float(state["reward"]))
        if trouble := "; ".join(self._trouble + faults.of_text)[:MAX_ERROR_CHARACTERS]:
            warn_once(trouble)
        return reward, {
            "success": reward >= self._env.pass_threshold,
            "rewards": dict(state["metrics"]),
            "stop_condition": state.get("stop_condition"),
            "tools": self._use_info(),
            **({"score_error": trouble} if trouble else {}),
        }

    async def close(self) -> None:
        """Let the environment release a rollout that was not scored."""
        if self._state is not None:
            state, self._state = self._state, None
            await self._env.cleanup(state)

    def _row(self, seed: int) -> dict[str, Any]:
        has_own = self._env.eval_dataset is not None or self._env.eval_dataset_source is not None
        wants_eval = self._split == "eval" or (self._split == "auto" and seed >= HELD_OUT_SEEDS and has_own)
        rows = self._env.get_eval_dataset() if wants_eval else self._env.get_dataset()
        return dict(rows[seed % len(rows)])

    async def _next_prompt(self) -> list[Any] | None:
        """Return the package's whole conversation before the next turn; None when the rollout is over."""
        normalized = importlib.import_module("verifiers.utils.message_utils").maybe_normalize_messages
        while True:
            try:
                if await self._env.is_completed(self._state):
                    return None
                prompt = await self._env.get_prompt_messages(self._state)
            except Exception as error:  # third-party code may raise anything
                self._end_with_error(error)
                continue
            if self._state.get("final_env_response") is None:
                return list(normalized(prompt, field_name="prompt"))

    def _end_with_error(self, error: Exception) -> None:
        """End the rollout if the model's text made the package raise; raise EnvError for any other cause."""
        said = f"env_response: {type(error).__name__}: {error}"
        if not self._state["trajectory"] or self._state.get("error") or not is_caused_by_text(error):
            raise EnvError(f"{NAME}: {said}") from error
        self._trouble.append(said)
        self._state["error"] = error  # the package's first stop condition

    def _count(self, calls: Sequence[ToolCall | BadCall]) -> None:
        for call in calls:
            use = self._use.setdefault(call.name, ToolUse())
            use.calls += 1
            use.errors += isinstance(call, BadCall)

    def _use_info(self) -> dict[str, Any]:
        return {name: asdict(use) for name, use in self._use.items()}


def _no_client() -> Any:
    """Return a client for environments that raises an error at every call."""
    client = importlib.import_module("verifiers.clients").Client

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EnvError(f"{NAME}: the environment asks a model of its own (state['client']), which it is not given here")

    return type("NoClient", (client,), dict.fromkeys(client.__abstractmethods__, refuse))(None)
