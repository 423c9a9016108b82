"""Dataset-v0: the rows of a data set as tasks. The model reads the prompt of a row; rewards compare its answer.

An entry of `envs` with `data` and `reward` makes its arguments (`source.py`). With `tools` the model may call functions
before it answers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll_flash.chat.model_text import last_answer, without_thinking
from roll_flash.config.user_code import load_function
from roll_flash.envs.base import Observation, StepResult
from roll_flash.envs.datasets.answers import ANSWER_IN, AnswerIn, find_answer
from roll_flash.envs.datasets.rewards import (
    ALL_TESTS_S,
    IN_SANDBOX,
    QUICK,
    TEST_S,
    call_reward,
    check_reward,
    is_empty,
    read_tests,
)
from roll_flash.envs.rewards.functions import Rubric, reward
from roll_flash.envs.tools.functions import Tool, make_tool
from roll_flash.envs.tools.tool_env import SandboxToolEnv, ToolEnv
from roll_flash.errors import ConfigError, EnvError, first_line
from roll_flash.processes.background import call_sync_or_async
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.types import Message

PROGRAM = "program.py"
SHARE_OF_STEP = 0.8
"""Share of what is left of a step for the tests of a program; the rest is for the sandbox."""
OUTPUT_MARGIN, MAX_OUTPUT = 1 << 17, 1 << 24
"""Bytes that a program may print more than its test wants, for blanks; and bytes of one output that a sandbox keeps."""


class DatasetEnv(ToolEnv):
    """Arguments: `messages`, `answer`, `row`, `rewards` (all from the row); `answer_in`, where the model's text has its
    answer: `tag` (in `<answer>`, else the whole text), `boxed`, `last_number` or `text`; `tools`, functions that the
    model may call (`file.py:NAME`); `max_turns`; `mcp_servers` and `mcp_allow`, as in `ToolEnv`."""

    def __init__(
        self,
        messages: Sequence[Message] = ({"role": "user", "content": "Say hello."},),
        answer: Any = "hello",
        row: Mapping[str, Any] | None = None,
        rewards: Sequence[Mapping[str, Any]] = ({"function": "exact"},),
        answer_in: AnswerIn = "tag",
        tools: Sequence[str] = (),
        max_turns: int = 8,
        mcp_servers: Mapping[str, Mapping[str, Any]] | None = None,
        mcp_allow: Sequence[str] | None = None,
    ) -> None:
        self._functions = {tool.name: tool for tool in (make_tool(load_function(one, "tools")) for one in tools)}
        super().__init__(max_turns=max_turns, mcp_servers=mcp_servers, mcp_allow=mcp_allow)
        if answer_in not in ANSWER_IN:
            raise ConfigError(f"Dataset-v0: answer_in {answer_in!r} is none of {', '.join(ANSWER_IN)}")
        self._messages, self._expected, self._row = [dict(one) for one in messages], answer, dict(row or {})
        self._answer_in: AnswerIn = answer_in
        self._completion = ""
        for one in rewards:
            check_reward(one["function"], one.get("kwargs", {}))
        self._own_rubric = Rubric([self._reward(one) for one in rewards])

    async def begin(self, seed: int) -> Observation:
        self._completion = ""
        return list(self._messages)

    async def step(self, action: str) -> StepResult:
        self._completion = action
        return await super().step(action)

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        """As in `ToolEnv`; `info["expected"]` is the row's answer, for a judge, if it is one text or number."""
        reward, info = await super().conclude()
        return reward, {**info, "expected": self._expected} if isinstance(self._expected, str | int | float) else info

    async def oracle(self) -> str:
        """Return the expected answer, for checks and demonstrations."""
        expected = self._expected[0] if isinstance(self._expected, list) and self._expected else self._expected
        if not isinstance(expected, str | int | float):
            raise EnvError("the row has no answer that could be written")
        return {"tag": f"<answer>{expected}</answer>", "boxed": f"\\boxed{{{expected}}}"}.get(
            self._answer_in, str(expected)
        )

    async def score_answer(self, text: str) -> Mapping[str, float]:
        """Return what each reward, unweighted, gives to a text as if the model had ended with it."""
        self._completion = text
        return (await self._own_rubric.score(self, "final")).values

    def _reward(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        name, kwargs = options["function"], options.get("kwargs", {})

        async def score(env: Any) -> Any:
            if name == IN_SANDBOX:
                return await self._passes_tests(**kwargs)
            return self._ask(name, kwargs) if name in QUICK else await call_sync_or_async(self._ask, name, kwargs)

        score.__name__ = options.get("name") or name.rpartition(":")[2]
        return reward(weight=options.get("weight", 1.0))(score)

    def _ask(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        given = {
            "completion": self._completion,
            "answer": find_answer(self._completion, self._answer_in),
            "expected": self._expected,
            "messages": self._messages,
            "row": self._row,
        }
        return call_reward(name, kwargs, given)

    async def _passes_tests(self, timeout_s: float = TEST_S) -> float:
        raise EnvError(f"{IN_SANDBOX} need a sandbox; `make_dataset_env` chooses the environment that has one")

    @property
    def _own_tools(self) -> Mapping[str, Tool]:
        return self._functions

    @property
    def _rubric(self) -> Rubric:
        return self._own_rubric


class SandboxDatasetEnv(DatasetEnv, SandboxToolEnv):
    """A `DatasetEnv` with a sandbox, for answers that are Python programs and for MCP servers that run in it."""

    _step_began: float | None = None
    """On the clock `time.monotonic()`; None outside of a step."""

    async def step(self, action: str) -> StepResult:
        self._step_began = time.monotonic()
        try:
            return await super().step(action)
        finally:
            self._step_began = None

    async def _passes_tests(self, timeout_s: float = TEST_S) -> float:
        """Return the share of tests that the program in the model's text passes.

        The row's answer is a list of `{input, output}`: what the program reads and must print; or Python code that
        runs after the program and raises if it is wrong. Tests for which no time is left are not passed.
        """
        try:
            tests = read_tests(self._expected)
        except ValueError as error:
            raise EnvError(f"reward {IN_SANDBOX}: the row's {first_line(error)}") from None
        code = python_code(self._completion)
        if is_empty(code):
            return 0.0
        all_s = self._time_for_tests()
        await self.sandbox.kill_all()  # what tools left running could answer in the program's place
        try:
            await self.sandbox.remove(PROGRAM)
            await self.sandbox.write(PROGRAM, code)
        except SandboxFileError:  # the program ran for an earlier reward and blocks its place
            return 0.0
        if isinstance(tests, str):
            return await self._runs_without_error(tests, min(timeout_s, all_s))
        ends_at, passed = time.monotonic() + all_s, 0
        for test in tests:
            left_s = ends_at - time.monotonic()
            passed += left_s > 0 and await self._prints(test["input"], test["output"], min(timeout_s, left_s))
        return passed / len(tests)

    def _time_for_tests(self) -> float:
        """Seconds; calls of tools in the same step may have taken a part of it."""
        spent_s = 0.0 if self._step_began is None else time.monotonic() - self._step_began
        return min(ALL_TESTS_S, SHARE_OF_STEP * (self.step_timeout_s - spent_s))

    async def _prints(self, given: str, wanted: str, timeout_s: float) -> bool:
        most = min(len(wanted.encode()) + OUTPUT_MARGIN, MAX_OUTPUT)  # with less, no program could print a long result
        command = ("python3", "-I", PROGRAM)
        result = await self.sandbox.exec(command, stdin=given.encode(), timeout=timeout_s, max_output=most)
        await self.sandbox.kill_all()
        return bool(result.ok and result.stdout_text.split() == wanted.split())

    async def _runs_without_error(self, tests: str, timeout_s: float) -> float:
        """The random word after the tests tells them from a program that ends the process with status 0; one that looks
        for the word can cheat, since it shares the process with the tests (docs/data.md)."""
        word = secrets.token_hex(16)
        source = _HARNESS.format(program=PROGRAM, tests=tests, word=word)
        result = await self.sandbox.exec(("python3", "-I", "-"), stdin=source, timeout=timeout_s)
        await self.sandbox.kill_all()
        return float(result.ok and result.stdout_text.rstrip().endswith(word))


_HARNESS = """
namespace = {{"__name__": "program"}}
exec(compile(open({program!r}).read(), {program!r}, "exec"), namespace)
exec(compile({tests!r}, "tests", "exec"), namespace)
print({word!r})
"""


def make_dataset_env(**kwargs: Any) -> DatasetEnv:
    """Make the environment of a row, with a sandbox if one of its rewards or MCP servers needs that."""
    servers = (kwargs.get("mcp_servers") or {}).values()
    needs_sandbox = any(one.get("function") == IN_SANDBOX for one in kwargs.get("rewards", ()))
    needs_sandbox = needs_sandbox or any("command" in one for one in servers)
    return SandboxDatasetEnv(**kwargs) if needs_sandbox else DatasetEnv(**kwargs)


def python_code(text: str) -> str:
    """Return the content of the last block of code in backticks; without one the answer, in its tag or the whole text.
    Nothing in `<think>` counts."""
    parts = without_thinking(text).split("```")
    if len(parts) < 3:
        return last_answer(text)
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, _, rest = block.partition("\n")
    return rest if first.strip().isidentifier() else block
