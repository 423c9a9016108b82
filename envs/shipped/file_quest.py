"""FileQuest-v0: work with files in a shell in several steps; the final state of all files is checked.

Reward 1 if the final files match exactly. Otherwise half the share of correct files among those to change, or 0 if
a file to keep was changed.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from roll_flash.envs.held_out import draw_problem
from roll_flash.envs.rewards.functions import reward
from roll_flash.envs.shipped.file_quest_steps import Files, Quest, draw_quest
from roll_flash.envs.tools.functions import tool
from roll_flash.envs.tools.tool_env import SandboxToolEnv
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.scratch import scratch_folder

PARTIAL = 0.5
MAX_BYTES = 1 << 20
MAX_FILES = 200


class FileQuest(SandboxToolEnv):
    """Arguments: `steps` of a task, `max_turns`, `command_timeout_s`."""

    tool_format = "tags"
    instructions = "You work in a shell. When everything is done, reply <answer>done</answer>."

    def __init__(self, steps: int = 2, max_turns: int = 8, command_timeout_s: float = 10.0) -> None:
        super().__init__(max_turns=max_turns)
        if not 1 <= steps <= 12:
            raise ValueError("FileQuest: steps must lie between 1 and 12")
        self._steps = steps
        self._command_timeout_s = command_timeout_s
        self._quest = Quest({}, (), (), {})
        self._has_files = False

    async def begin(self, seed: int) -> str:
        self._quest = draw_problem(seed, lambda chance: draw_quest(chance, self._steps), str)
        self._has_files = False
        files = ", ".join(sorted(self._quest.before))
        return f"Files here: {files}\nDo this, in order, and leave nothing else behind:\n{self._quest}"

    async def agent_task(self) -> str:
        """Write the files and return the task as text, for an agent with its own tools (`AgentEnv`)."""
        await self._put_files()
        return f"In the current folder, do this, in order, and leave nothing else behind:\n{self._quest}"

    @tool()
    async def sh(self, command: str) -> Any:
        """Run a shell command and see its output."""
        await self._put_files()
        return await self.sandbox.exec(command, timeout=self._command_timeout_s, max_output=8192)

    @reward()
    async def final_state(self) -> float:
        if not self._has_files:  # nothing was done
            return 0.0
        await self.sandbox.kill_all()
        return compare(self._quest.before, self._quest.after, await self._found_files())

    async def oracle(self) -> str:
        """Return the right next action, for checks and demonstrations."""
        if self.turn < len(self._quest.commands):
            return f"<sh>{self._quest.commands[self.turn]}</sh>"
        return "<answer>done</answer>"

    async def _put_files(self) -> None:
        """Write the files at the first command, so that an episode without one needs no sandbox."""
        if not self._has_files:
            for path, content in self._quest.before.items():
                await self.sandbox.write(path, content)
            self._has_files = True

    async def _found_files(self) -> Files:
        """Read the files without the sandbox's shell, which the model may have altered; empty if too large."""
        with scratch_folder("quest") as folder:
            root = folder / "found"
            try:
                report = await self.sandbox.get_tree(".", root, max_bytes=MAX_BYTES, max_entries=MAX_FILES)
                found = {str(path.relative_to(root)): _content(path) for path in root.rglob("*") if not path.is_dir()}
            except SandboxFileError:
                return {}
            except OSError as error:  # a path that is too long only together with the folder's
                if error.errno != errno.ENAMETOOLONG:
                    raise
                return {}
            return found | dict.fromkeys(report.left_out, "")


def _content(path: Path) -> str:
    return "" if path.is_symlink() else path.read_bytes().decode(errors="replace")


def compare(before: Files, after: Files, found: Files) -> float:
    """Return 1 for the wanted state, else up to `PARTIAL`; blanks at the end of a file are ignored."""
    wanted = {path: content.rstrip() for path, content in after.items()}
    given = {path: content.rstrip() for path, content in found.items()}
    if given == wanted:
        return 1.0
    start = {path: content.rstrip() for path, content in before.items()}
    paths = start.keys() | wanted.keys()
    changing = [path for path in paths if start.get(path) != wanted.get(path)]
    if any(given.get(path) != wanted.get(path) for path in paths if path not in changing):
        return 0.0
    right = sum(given.get(path) == wanted.get(path) for path in changing)
    return PARTIAL * right / len(changing)
