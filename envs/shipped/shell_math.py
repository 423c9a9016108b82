"""ShellMath-v0: a two-turn tool-use task. Compute with the shell, then repeat its result.

The user asks for an integer computation. The model answers with one shell command in `<sh></sh>`, which runs in the
sandbox; it sees the real output, and answers `<answer>N</answer>`. The reward is shaped and 1.0 in total:
0.1 for a well-formed command, 0.3 if its output is the result, 0.6 for the right answer supported by that output.
"""

from __future__ import annotations

import random
import re
from typing import Any

from roll_flash.envs.base import SandboxEnv, StepResult
from roll_flash.envs.held_out import HELD_OUT_SEEDS, draw_problem
from roll_flash.envs.tools.tool_env import OUT_OF_MEMORY
from roll_flash.sandboxes import SandboxDied
from roll_flash.types import Message

COMMAND_REWARD, RESULT_REWARD, ANSWER_REWARD = 0.1, 0.3, 0.6

_COMMAND = re.compile(r"\s*<sh>([^<>\n\0]{1,200})</sh>\s*")
_ANSWER = re.compile(r"\s*<answer>\s*(-?\d{1,30})\s*</answer>\s*")
_WORDS = {"+": "plus", "-": "minus", "*": "times"}

_SYSTEM = (
    "Use the shell to compute. First reply only with <sh>COMMAND</sh>. "
    "When you see the output, reply only with <answer>NUMBER</answer>.\n"
    "For 7 times 12: <sh>echo $((7*12))</sh>, Output: 84, <answer>84</answer>."
)
_EXAMPLE: list[Message] = [
    {"role": "user", "content": "What is 23 plus 45?"},
    {"role": "assistant", "content": "<sh>echo $((23+45))</sh>"},
    {"role": "user", "content": "Output: 68"},
    {"role": "assistant", "content": "<answer>68</answer>"},
]


class ShellMath(SandboxEnv):
    """Arguments: `operands` (2 or more), `largest` (operands are 2..largest), `operators` (a subset of "+-*"),
    `command_timeout_s`."""

    def __init__(
        self, operands: int = 2, largest: int = 99, operators: str = "+-*", command_timeout_s: float = 5.0
    ) -> None:
        if operands < 2 or largest < 3 or not set(operators) <= set(_WORDS) or not operators:
            raise ValueError("ShellMath: operands >= 2, largest >= 3, operators a non-empty subset of '+-*'")
        self._operands = operands
        self._largest = largest
        self._operators = operators
        self._command_timeout_s = command_timeout_s
        self._expression = ""
        self._result = 0
        self._tool_output: str | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        terms = draw_problem(random.randrange(HELD_OUT_SEEDS) if seed is None else seed, self._draw, _formula)
        self._expression = _formula(terms)
        self._result = _evaluate(terms)
        self._tool_output = None
        return _prompt(terms), {"expression": self._expression, "result": self._result}

    async def step(self, action: str) -> StepResult:
        if self._tool_output is None:
            return await self._run_command(action)
        return self._check_answer(action)

    async def oracle(self) -> str:
        """Return the right next action, for checks and demonstrations."""
        if self._tool_output is None:
            return f"<sh>echo $(({self._expression}))</sh>"
        return f"<answer>{self._result}</answer>"

    async def _run_command(self, action: str) -> StepResult:
        match = _COMMAND.fullmatch(action)
        if match is None:
            return "", 0.0, True, False, {"success": False, "ended": "no well-formed command"}
        try:
            result = await self.sandbox.exec(match[1], timeout=self._command_timeout_s, max_output=256)
        except SandboxDied as error:
            if error.reason != OUT_OF_MEMORY:
                raise
            return "", 0.0, True, False, {"success": False, "ended": "the sandbox ran out of memory"}
        output = result.stdout.decode(errors="replace").strip()
        self._tool_output = output
        reward = COMMAND_REWARD + (RESULT_REWARD if output == str(self._result) else 0.0)
        shown = output or result.stderr.decode(errors="replace").strip() or "(no output)"
        return f"Output: {shown[:80]}", reward, False, False, {"command": match[1], "output": output}

    def _check_answer(self, action: str) -> StepResult:
        match = _ANSWER.fullmatch(action)
        right = match is not None and int(match[1]) == self._result
        success = right and self._tool_output == str(self._result)
        return "", ANSWER_REWARD if success else 0.0, True, False, {"success": success}

    def _draw(self, generator: random.Random) -> list[Any]:
        """Draw operands and operators, alternating."""
        terms: list[Any] = [generator.randint(2, self._largest)]
        for _ in range(self._operands - 1):
            terms += [generator.choice(self._operators), generator.randint(2, self._largest)]
        return terms


def _evaluate(terms: list[Any]) -> int:
    """Compute products first, as the shell does."""
    total, sign, product = 0, 1, int(terms[0])
    for operator, operand in zip(terms[1::2], terms[2::2], strict=True):
        if operator == "*":
            product *= operand
        else:
            total, sign, product = total + sign * product, 1 if operator == "+" else -1, operand
    return total + sign * product


def _formula(terms: list[Any]) -> str:
    return "".join(map(str, terms))


def _in_words(terms: list[Any]) -> str:
    return " ".join(_WORDS.get(term, str(term)) for term in terms)


def _prompt(terms: list[Any]) -> list[Message]:
    question = f"What is {_in_words(terms)}?"
    return [{"role": "system", "content": _SYSTEM}, *_EXAMPLE, {"role": "user", "content": question}]
