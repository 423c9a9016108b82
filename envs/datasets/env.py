"""Dataset-v0: the rows of a data set as tasks. The model reads the prompt of a row; rewards compare its answer.

An entry of `envs` with `data` and `reward` makes its arguments (`source.py`). With `tools` the model may call functions
before it answers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from roll_flash.config.user_code import load_function
from roll_flash.envs.base import Observation, StepResult
from roll_flash.envs.datasets.answers import ANSWER_IN, AnswerIn, find_answer
from roll_flash.envs.datasets.rewards import IN_SANDBOX, call_reward, check_reward
from roll_flash.envs.rewards.functions import Rubric, reward
from roll_flash.envs.tools.functions import Tool, make_tool
from roll_flash.envs.tools.tool_env import SandboxToolEnv, ToolEnv
from roll_flash.errors import ConfigError, EnvError
from roll_flash.types import Message

PROGRAM = "program.py"
TEST_S = 10.0


class DatasetEnv(ToolEnv):
    """Arguments: `messages`, `answer`, `row`, `rewards` (all from the row); `answer_in`, where the model's text has its
    answer: `tag` (in `<answer>`, else the whole text), `boxed`, `last_number` or `text`; `tools`, functions that the
    model may call (`file.py:NAME`); `max_turns`."""

    def __init__(
        self,
        messages: Sequence[Message] = ({"role": "user", "content": "Say hello."},),
        answer: Any = "hello",
        row: Mapping[str, Any] | None = None,
        rewards: Sequence[Mapping[str, Any]] = ({"function": "exact"},),
        answer_in: AnswerIn = "tag",
        tools: Sequence[str] = (),
        max_turns: int = 8,
    ) -> None:
        self._own_tools = {tool.name: tool for tool in (make_tool(load_function(one, "tools")) for one in tools)}
        super().__init__(max_turns=max_turns)
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

    async def oracle(self) -> str:
        """Return the expected answer, for checks and demonstrations."""
        expected = self._expected[0] if isinstance(self._expected, list) else self._expected
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
        function = partial(self._passes_tests, **kwargs) if name == IN_SANDBOX else partial(self._ask, name, kwargs)

        async def score(env: Any) -> Any:
            value = function()
            return await value if hasattr(value, "__await__") else value

        score.__name__ = name.rpartition(":")[2]
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
    def _tools(self) -> Mapping[str, Tool]:
        return self._own_tools

    @property
    def _rubric(self) -> Rubric:
        return self._own_rubric


class SandboxDatasetEnv(DatasetEnv, SandboxToolEnv):
    """A `DatasetEnv` whose answers are Python programs that are tested in the sandbox."""

    async def _passes_tests(self, timeout_s: float = TEST_S) -> float:
        """Return the share of tests that the program in the model's text passes.

        The row's answer is a list of `{input, output}`: what the program reads and must print; or Python code that
        runs after the program and raises if it is wrong.
        """
        expected = json.loads(self._expected) if _is_json_list(self._expected) else self._expected
        await self.sandbox.write(PROGRAM, python_code(self._completion))
        if isinstance(expected, str):
            return await self._runs_without_error(expected, timeout_s)
        if not isinstance(expected, list) or not expected:
            raise EnvError(f"reward {IN_SANDBOX}: the row's answer must be code or a list of input and output")
        passed = [await self._prints(test["input"], test["output"], timeout_s) for test in expected]
        return sum(passed) / len(passed)

    async def _prints(self, given: str, wanted: str, timeout_s: float) -> bool:
        result = await self.sandbox.exec(("python3", "-I", PROGRAM), stdin=given.encode(), timeout=timeout_s)
        await self.sandbox.kill_all()
        return bool(result.ok and result.stdout_text.split() == wanted.split())

    async def _runs_without_error(self, tests: str, timeout_s: float) -> float:
        """The random word after the tests shows that they were reached: a program may end the process with status 0."""
        word = secrets.token_hex(16)
        source = _HARNESS.format(program=PROGRAM, tests=tests, word=word)
        result = await self.sandbox.exec(("python3", "-I", "-c", source), timeout=timeout_s)
        await self.sandbox.kill_all()
        return float(result.ok and result.stdout_text.rstrip().endswith(word))


_HARNESS = """
namespace = {{"__name__": "program"}}
exec(compile(open({program!r}).read(), {program!r}, "exec"), namespace)
exec(compile({tests!r}, "tests", "exec"), namespace)
print({word!r})
"""


def make_dataset_env(**kwargs: Any) -> DatasetEnv:
    """Make the environment of a row, with a sandbox if one of its rewards needs that."""
    rewards = kwargs.get("rewards", ())
    needs_sandbox = any(one.get("function") == IN_SANDBOX for one in rewards)
    return SandboxDatasetEnv(**kwargs) if needs_sandbox else DatasetEnv(**kwargs)


def python_code(text: str) -> str:
    """Return the content of the last block of code in backticks; without one the whole text."""
    parts = text.split("```")
    if len(parts) < 3:
        return text
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, _, rest = block.partition("\n")
    return rest if first.strip().isidentifier() else block


def _is_json_list(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[")
