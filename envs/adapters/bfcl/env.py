"""BFCL-v4: the multi-turn categories of the Berkeley Function Calling Leaderboard, v4.

A user makes several requests; for each the model calls functions, sees their results, and calls more, until it
answers without a call. Reward 1 if bfcl-eval's own checker finds the right state of the tool classes, and all needed
results, after every turn, else 0. Protocol, prompts and score are those of bfcl-eval 2026.3.23
(`BaseHandler.inference_multi_turn_*`); the tool classes run in the sandbox.
"""

from __future__ import annotations

import ast
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from roll_flash.envs.adapters.bfcl.backend import CHECK_TIMEOUT_S, BfclBackend, ServerEndedError, Verdict, backend_spec
from roll_flash.envs.adapters.bfcl.calls import FAILING_CALL, FunctionCall, parse_calls
from roll_flash.envs.adapters.bfcl.items import describe_function, load_items
from roll_flash.envs.adapters.bfcl.prompt import added_functions, python_results, system_prompt
from roll_flash.envs.base import SandboxEnv, StepResult
from roll_flash.envs.tools.calls import UNKNOWN, BadCall
from roll_flash.envs.tools.prompt import TOOL_SCHEMAS, tool_messages
from roll_flash.envs.tools.tool_env import ToolUse
from roll_flash.errors import ConfigError
from roll_flash.types import Message

CallFormat = Literal["python", "native"]
MAX_CALLS_PER_STEP = 64
MARGIN_S = 15.0
"""Seconds added to the checker's timeouts for starting the tool classes."""
FORCED_STOP_VERDICT = Verdict(False, "multi_turn:force_terminated", "the model was stopped before the last turn ended")


class BFCL(SandboxEnv):
    """Arguments: `category`; `index` (of one item; else the seed modulo the number of items); `call_format`: `python`
    describes functions and results as BFCL does for models without function calling, `native` uses the tools of the
    chat template; calls are parsed in both formats. The model fails after `max_steps_per_turn` steps with calls in one
    turn; `call_timeout_s` limits one call.
    """

    def __init__(
        self,
        category: str = "multi_turn_base",
        index: int | None = None,
        call_format: CallFormat = "python",
        max_steps_per_turn: int = 20,
        call_timeout_s: float = 10.0,
    ) -> None:
        self._items = load_items(category)
        if index is not None and not 0 <= index < len(self._items):
            raise ConfigError(f"BFCL-v4: index={index}: {category} has the items 0 to {len(self._items) - 1}")
        if call_format not in ("python", "native") or max_steps_per_turn < 1 or call_timeout_s <= 0:
            raise ConfigError(
                "BFCL-v4: call_format must be python or native, max_steps_per_turn at least 1, call_timeout_s above 0"
            )
        self.sandbox_spec = backend_spec()  # type: ignore[misc]
        self._index = index
        self._call_format = call_format
        self._max_steps_per_turn = max_steps_per_turn
        self._call_timeout_s = call_timeout_s
        self._backend: BfclBackend | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        await self.close()
        number = random.randrange(len(self._items)) if seed is None else seed % len(self._items)
        self._item = self._items[number if self._index is None else self._index]
        self._functions = {str(f["name"]): describe_function(f) for f in self._item.all_functions}
        self._turns: list[list[list[str]]] = [[]]
        self._steps = 0
        self._use: dict[str, ToolUse] = {}
        messages = [dict(message) for message in self._item.question[0]]
        info: dict[str, Any] = {"item": self._item.item_id}
        if self._call_format == "native":
            info[TOOL_SCHEMAS] = [describe_function(f).schema() for f in self._item.functions]
            return messages, info
        return [{"role": "system", "content": system_prompt(self._item.functions)}, *messages], info

    async def step(self, action: str) -> StepResult:
        calls = parse_calls(action, self._functions)
        if calls:
            self._steps += 1
            observation = await self._run(calls)
            if self._steps > self._max_steps_per_turn:
                return [], 0.0, True, False, self._info(FORCED_STOP_VERDICT)
            return observation, 0.0, False, False, self._info()
        if len(self._turns) == len(self._item.question):
            verdict = await self._running_backend().check(self._turns)
            return [], float(verdict.valid), True, False, self._info(verdict)
        self._turns.append([])
        self._steps = 0
        return self._user_turn(len(self._turns) - 1), 0.0, False, False, self._info()

    def min_step_timeout_s(self) -> float:
        """Allow for two checks: without a verdict on the model's calls, the checker runs again."""
        return 2 * CHECK_TIMEOUT_S + MARGIN_S

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        return 0.0, self._info(FORCED_STOP_VERDICT)

    async def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    async def oracle(self) -> str:
        """Return the right next action, for checks and demonstrations."""
        turn = len(self._turns) - 1
        calls = self._item.ground_truth[turn] if self._steps == 0 else ()
        if self._call_format == "python" or not calls:
            return f"[{', '.join(calls)}]" if calls else "That is all."
        return "\n".join(f"<tool_call>\n{json.dumps(self._as_json(call))}\n</tool_call>" for call in calls)

    def _as_json(self, source: str) -> Mapping[str, Any]:
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call)
        name = ast.unparse(call.func)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        given |= dict(zip(self._functions[name].argument_names, call.args, strict=False))
        return {"name": name, "arguments": {key: ast.literal_eval(value) for key, value in given.items()}}

    def _user_turn(self, turn: int) -> list[Message]:
        messages = [dict(message) for message in self._item.question[turn]]
        added = self._item.held_out.get(turn, ())
        return [added_functions(added), *messages] if added else messages

    async def _run(self, calls: Sequence[FunctionCall | BadCall]) -> list[Message]:
        """Run the calls of one step and record them for the checker."""
        step: list[str] = []
        shown: list[tuple[str, str]] = []
        for call in calls[:MAX_CALLS_PER_STEP]:
            result, source = await self._run_call(call)
            shown.append((call.name if isinstance(call, BadCall) else call.written, result))
            step += [source] if source else []
        if len(calls) > MAX_CALLS_PER_STEP:
            shown.append(("", f"Error: only the first {MAX_CALLS_PER_STEP} of {len(calls)} calls were run"))
        if step:
            self._turns[-1].append(step)
        if self._call_format == "native":
            return tool_messages([result for _, result in shown])
        return [python_results(shown)]

    async def _run_call(self, call: FunctionCall | BadCall) -> tuple[str, str]:
        """Return the result for the model, and the source for the checker; empty source for an invalid call."""
        name = call.name if call.name in self._functions else UNKNOWN
        use = self._use.setdefault(name, ToolUse())
        use.calls += 1
        if isinstance(call, BadCall):
            use.errors += 1
            return f"Error: {call.message}", ""
        if call.error_text:
            use.errors += 1
            return call.error_text, FAILING_CALL
        backend = self._running_backend()
        started = time.monotonic()
        try:
            await backend.start()
            started = time.monotonic()
            result = await backend.run(call.source)
        except ServerEndedError as error:
            use.errors += 1
            use.timeouts += 1
            return f"Error during execution: {call.name} {error}", FAILING_CALL
        finally:
            use.seconds += time.monotonic() - started
        use.errors += _is_error(result)
        return result, call.source

    def _running_backend(self) -> BfclBackend:
        if self._backend is None:
            self._backend = BfclBackend(self.sandbox, self._item, self._call_timeout_s)
        return self._backend

    def _info(self, verdict: Verdict | None = None) -> dict[str, Any]:
        info: dict[str, Any] = {
            "item": self._item.item_id,
            "user_turns": len(self._turns),
            "tools": {name: asdict(use) for name, use in self._use.items()},
        }
        if verdict is not None:
            info |= {"success": verdict.valid, "bfcl_error": verdict.error_type, "bfcl_message": verdict.error_message}
        return info


def _is_error(result: str) -> bool:
    """Return True for an error: `{"error": ...}` of the tool classes, or bfcl-eval's sentence for exceptions."""
    return result.startswith(("Error during execution:", '{"error":'))
