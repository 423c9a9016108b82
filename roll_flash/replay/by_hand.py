"""Goes on with an episode by hand: a shell in its sandbox, or actions line by line."""

from __future__ import annotations

import os
import sys

from roll_flash.envs.hosting.environments import AsyncEnvironment
from roll_flash.processes.background import call_in_thread
from roll_flash.replay.transcript import indented, show_answer
from roll_flash.rollout.episodes.episode import environment_errors
from roll_flash.sandboxes import ExecResult, Sandbox, SandboxDied
from roll_flash.terminal import say


class Lines:
    """Lines of standard input. They are read without Python's buffers: a thread that waits in these when the process
    ends is a fatal error."""

    def __init__(self) -> None:
        self._rest = b""

    async def ask(self, prompt: str) -> str | None:
        """Return the next line without its end; None at the end of the input."""
        say(prompt, end="")
        while b"\n" not in self._rest:
            data = await call_in_thread(lambda: os.read(sys.stdin.fileno(), 1 << 16))
            if not data:
                say()
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")


async def use_shell(sandbox: Sandbox, lines: Lines, timeout_s: float) -> None:
    """Run the user's commands in a shell of the sandbox, each for at most `timeout_s` seconds. Raises SandboxError."""
    say(f"A shell in the sandbox. A command has {timeout_s:g} s and no input; exit or Ctrl-D ends the shell.")
    async with sandbox.shell() as shell:
        while (command := await lines.ask("sandbox$ ")) is not None and command.strip() != "exit":
            try:
                result = await shell.run(command, timeout=timeout_s)
            except ValueError as error:
                say(str(error), error=True)
            except SandboxDied as error:
                say(f"the sandbox has ended: {error}", error=True)
                return
            else:
                _show(result)


def _show(result: ExecResult) -> None:
    for output in (result.stdout, result.stderr):
        if text := output.decode("utf-8", "replace").removesuffix("\n"):
            say("\n".join(indented(text)))
    if result.timed_out:
        say("stopped at its time limit; the next command gets a new shell")
    elif result.exit_code:
        say(f"exit code {result.exit_code}")


async def play_turns(env: AsyncEnvironment, lines: Lines, turn: int, max_turns: int, timeout_s: float) -> bool:
    """Ask the user for each action, from `turn` on. Return True if the environment has ended the episode."""
    say("Write an action per line; Ctrl-D ends the episode.")
    for number in range(turn, max_turns):
        if (action := await lines.ask(f"turn {number}> ")) is None:
            return False
        async with environment_errors(timeout_s, "step"):
            step = await env.step(action)
        show_answer(number, step.text, step.reward)
        if step.terminated or step.truncated:
            say("the environment has ended the episode")
            return True
    say(f"the run allows {max_turns} turns (max_turns)")
    return False
