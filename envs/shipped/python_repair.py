"""PythonRepair-v0: find and fix the bug in a small Python program, until hidden tests pass in the sandbox.

The expected results never enter the sandbox, and the test inputs only after the model has finished, so no command
of the model can read them. Reward 1 if all pass, else half the share of the failing tests that were repaired.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import Any

from roll_flash.envs.held_out import draw_problem
from roll_flash.envs.rewards.functions import reward
from roll_flash.envs.shipped.repair_bugs import Repair, draw_bug, make_repair
from roll_flash.envs.tools.functions import tool
from roll_flash.envs.tools.tool_env import SandboxToolEnv

PROGRAM = "program.py"
PARTIAL = 0.5

_GRADER = """
import sys
sys.setrecursionlimit(2000)
namespace = {{"__name__": "program"}}
exec(compile(open({program!r}).read(), {program!r}, "exec"), namespace)
for arguments in {arguments!r}:
    try:
        said = repr(namespace[{name!r}](*arguments))
    except Exception as error:
        said = "raises " + type(error).__name__
    print({mark!r} + said[:10000], flush=True)
"""


class PythonRepair(SandboxToolEnv):
    """Arguments: `max_turns`, `command_timeout_s`."""

    tool_format = "tags"
    instructions = "You repair Python programs. When the program is right, reply <answer>done</answer>."

    def __init__(self, max_turns: int = 6, command_timeout_s: float = 10.0) -> None:
        super().__init__(max_turns=max_turns)
        self._command_timeout_s = command_timeout_s
        self._repair: Repair | None = None
        self._has_program = False

    async def begin(self, seed: int) -> str:
        bug = draw_problem(seed, draw_bug, str)
        self._repair = repair = make_repair(bug, random.Random(seed))
        self._has_program = False
        return (
            f"The file {PROGRAM}:\n```python\n{repair.broken}```\n"
            f"It has one bug: {repair.example}\nFix {PROGRAM}. Hidden tests will call {repair.name}."
        )

    async def agent_task(self) -> str:
        """Write program.py and return the task as text, for an agent with its own tools (`AgentEnv`)."""
        await self._put_program()
        repair = self._task
        return (
            f"The file {PROGRAM} in the current folder has one bug: {repair.example}\n"
            f"Fix {PROGRAM}. Hidden tests will call {repair.name}."
        )

    @tool()
    async def write(self, content: str) -> str:
        """Replace the whole of program.py."""
        await self._put_program()
        await self.sandbox.write(PROGRAM, content.rstrip() + "\n")
        return f"{PROGRAM} has {len(content.splitlines())} lines now"

    @tool()
    async def sh(self, command: str) -> Any:
        """Run a shell command, such as python3 -c 'from program import *; print(...)'."""
        await self._put_program()
        return await self.sandbox.exec(command, timeout=self._command_timeout_s, max_output=8192)

    @reward()
    async def hidden_tests(self) -> float:
        if not self._has_program:  # nothing was done
            return 0.0
        repair = self._task
        await self.sandbox.kill_all()
        said = await self._call_program(repair)
        passed = sum(found == wanted for found, wanted in zip(said, repair.expected, strict=False))
        if passed == len(repair.expected):
            return 1.0
        return PARTIAL * max(0, passed - repair.passing) / (len(repair.expected) - repair.passing)

    async def oracle(self) -> str:
        """Return the right next action, for checks and demonstrations."""
        return f"<write>\n{self._task.right}</write>" if self.turn == 0 else "<answer>done</answer>"

    @property
    def _task(self) -> Repair:
        assert self._repair is not None, "reset() comes first"
        return self._repair

    async def _put_program(self) -> None:
        """Write the program at the first command, so that an episode without one needs no sandbox."""
        if not self._has_program:
            await self.sandbox.write(PROGRAM, self._task.broken)
            self._has_program = True

    async def _call_program(self, repair: Repair) -> Sequence[str]:
        """Return the program's result for each input, in order. A random mark separates results from its own prints."""
        mark = f"{secrets.token_hex(8)} "
        source = _GRADER.format(program=PROGRAM, arguments=repair.arguments, name=repair.name, mark=mark)
        command = ("python3", "-I", "-c", source)
        result = await self.sandbox.exec(command, timeout=self._command_timeout_s, max_output=1 << 19)
        return [line.removeprefix(mark) for line in result.stdout_text.splitlines() if line.startswith(mark)]
