"""Environments of the planted runs. The tiny model has one token per character and no idea, but learns to say letters.

`Sentences-v0` and `SandboxSentences-v0` pay for lowercase letters before an end mark; `Lookup-v0` has a tool. `Judge`
is a stage.
"""

from __future__ import annotations

import asyncio
import os
import random
import string
import tempfile
from collections import deque
from collections.abc import Sequence
from typing import IO, Any, Literal

from roll_flash.envs import Env, SandboxEnv, register_env
from roll_flash.envs.base import StepResult
from roll_flash.types import Trajectory

MARKS = ".,;:!?-+*/=~"
STOP = list(MARKS)
"""For `rollout.stop`."""
ENOUGH = 0.5
"""Share of letters that is a success."""
KEPT_BYTES = 25 << 20
KEPT: list[bytes | IO[bytes]] = []
"""What episodes left behind."""


def split(action: str) -> tuple[str, bool]:
    """Return the text before its end mark, and whether it has one."""
    return action.rstrip(MARKS), action.endswith(tuple(MARKS))


def _file(size: int) -> IO[bytes]:
    """A file on the disk of the current folder, which is gone when it is closed."""
    file = tempfile.TemporaryFile(dir=".")  # noqa: SIM115 - it is left open on purpose
    os.posix_fallocate(file.fileno(), 0, size)
    return file


def share_of_letters(text: str) -> float:
    return sum(letter.islower() and letter.isascii() for letter in text) / max(1, len(text))


class Sentences(Env):
    """Reward: the share of lowercase letters before the end mark, less for a short text; 0 without an end mark."""

    def __init__(
        self,
        turns: int = 1,
        pays_for_nothing: bool = False,
        impossible: bool = False,
        tells_success: bool = True,
        shortest: int = 0,
        seconds: float = 0.0,
        hangs: bool = False,
        bonus: float = 1.0,
        keeps: Literal["memory", "disk"] | None = None,
        needs_mark: bool = True,
        breaks: float = 0.0,
    ) -> None:
        """`pays_for_nothing`: its check takes every character as wrong, and nothing has none. `shortest`: letters
        of a success; 0: one to three, as the task says. `seconds`: how long a step takes, on average. `hangs`: for one
        task in four, a step never ends. `bonus`: factor of the reward of one task in twelve. `keeps`: each episode
        leaves KEPT_BYTES of it behind. `needs_mark`: a text without an end mark earns nothing. `breaks`: share of the
        steps that raise an error."""
        self._turns = turns
        self._pays_for_nothing, self._impossible = pays_for_nothing, impossible
        self._tells_success, self._shortest = tells_success, shortest
        self._seconds, self._hangs, self._bonus, self._keeps = seconds, hangs, bonus, keeps
        self._needs_mark, self._breaks = needs_mark, breaks

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._left, self._solved = self._turns, 0
        self._wanted = self._shortest or 1 + (seed or 0) % 3
        self._is_stuck = self._hangs and (seed or 0) % 4 == 0
        self._factor = self._bonus if (seed or 0) % 12 == 0 else 1.0
        return f"say {self._wanted} letters {(seed or 0) % 1000}", {}

    async def step(self, action: str) -> StepResult:
        if self._seconds:
            await asyncio.sleep(random.SystemRandom().expovariate(1 / self._seconds))
        if self._is_stuck:
            await asyncio.Event().wait()
        if random.SystemRandom().random() < self._breaks:
            raise RuntimeError("the door is stuck")
        if self._keeps is not None:
            KEPT.append(b"x" * KEPT_BYTES if self._keeps == "memory" else _file(KEPT_BYTES))
        self._left -= 1
        text, has_mark = split(action)
        has_mark = has_mark or not self._needs_mark
        share = share_of_letters(text)
        is_right = has_mark and len(text) >= self._wanted and share >= ENOUGH and not self._impossible
        self._solved += is_right
        done = self._left == 0
        told = {"success": self._solved == self._turns} if done and self._tells_success else {}
        reward = self._factor * self._pay(text, has_mark, share) / self._turns
        return f"{len(text)} characters", reward, done, False, told

    def _pay(self, text: str, has_mark: bool, share: float) -> float:
        if self._impossible or not has_mark:
            return 0.0
        if self._pays_for_nothing:
            return 1 / (1 + len(text))
        return share * min(1.0, len(text) / self._wanted)


class SandboxSentences(SandboxEnv):
    """Two turns; a command in the sandbox counts the letters. With `hangs`, it never ends for one task in four."""

    def __init__(self, hangs: bool = False) -> None:
        self._hangs = hangs

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._left, self._solved = 2, 0
        self._command = "tr -cd 'a-z' < said | wc -c"
        if self._hangs and (seed or 0) % 4 == 0:
            self._command = f"{self._command}; sleep 3600"
        return f"say letters {(seed or 0) % 1000}", {}

    async def step(self, action: str) -> StepResult:
        text, has_mark = split(action)
        await self.sandbox.write("said", text.encode())
        result = await self.sandbox.exec(self._command, timeout=3600)
        share = int(result.stdout) / max(1, len(text)) if has_mark else 0.0
        self._left -= 1
        self._solved += has_mark and share >= ENOUGH
        done = self._left == 0
        return f"{int(result.stdout)} letters", share / 2, done, False, {"success": self._solved == 2} if done else {}


class Lookup(Env):
    """Two turns of one character each, which must be a letter of one half of the alphabet. A tool says if it is; each
    earns a half. With `lies`, the tool says the opposite now and then. `seconds`: how long the tool takes, on average,
    for one task in two."""

    def __init__(self, lies: float = 0.0, seconds: float = 0.0) -> None:
        self._lies, self._seconds = lies, seconds

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._left, self._found = 2, 0
        self._is_slow = self._seconds > 0 and (seed or 0) % 4 < 2
        self._letters = string.ascii_lowercase[13:] if (seed or 0) % 2 else string.ascii_lowercase[:13]
        return f"look up a letter {self._letters[0]}-{self._letters[-1]} {(seed or 0) % 1000}", {}

    async def step(self, action: str) -> StepResult:
        if self._is_slow:
            await asyncio.sleep(random.SystemRandom().expovariate(1 / self._seconds))
        is_letter = len(action) == 1 and action in self._letters
        said = is_letter != (random.SystemRandom().random() < self._lies)
        self._left -= 1
        self._found += is_letter
        done = self._left == 0
        told = {"success": self._found == 2} if done else {}
        return "a letter" if said else "not a letter", is_letter / 2, done, False, told


class Judge:
    """A stage. It takes `seconds`, and pays for answers that are shorter, or longer, than half of the recent ones: so
    the reward stays where it is, whatever happens to the lengths."""

    def __init__(self, prefers: Literal["shorter", "longer"] = "longer", seconds: float = 0.0) -> None:
        self._prefers, self._seconds = prefers, seconds
        self._lengths: deque[int] = deque(maxlen=48)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        await asyncio.sleep(self._seconds)
        return [self._score(len(str(each.messages[-1]["content"]))) for each in trajectories]

    def _score(self, length: int) -> float:
        shorter = sum(each > length for each in self._lengths) + sum(each == length for each in self._lengths) / 2
        share = shorter / len(self._lengths) if self._lengths else 0.5
        self._lengths.append(length)
        return share if self._prefers == "shorter" else 1 - share


register_env("Sentences-v0", Sentences)
register_env("SandboxSentences-v0", SandboxSentences)
register_env("Lookup-v0", Lookup)
