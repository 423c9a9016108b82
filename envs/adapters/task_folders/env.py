"""TaskFolder-v0: plays task folders of Harbor and terminal-bench in sandboxes.

The model has a shell. The tests enter the sandbox only after it has finished; first its processes are killed and its
files in the tests' place are removed. The tests write the reward. A broken task, an image that cannot be built, or
tests without a verdict in an untouched sandbox fail the episode with a reason and are never scored 0. Damage done by
the model is always scored 0.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import permutations
from pathlib import Path
from posixpath import normpath
from typing import Any
from weakref import WeakKeyDictionary

from roll_flash.config.fields import require_lists
from roll_flash.envs.adapters.task_folders.format import (
    FolderOptions,
    FolderTask,
    find_tasks,
    load_task,
    longest_limits,
)
from roll_flash.envs.adapters.task_folders.tests import (
    NoVerdictError,
    Verdict,
    copy_out,
    make_folders,
    put_files,
    run_tests,
)
from roll_flash.envs.rewards.functions import reward
from roll_flash.envs.tools.functions import tool
from roll_flash.envs.tools.prompt import ToolFormat
from roll_flash.envs.tools.tool_env import OUT_OF_MEMORY, SandboxToolEnv
from roll_flash.errors import ConfigError, EnvError
from roll_flash.processes.background import call_in_thread
from roll_flash.sandboxes import SandboxSpec
from roll_flash.sandboxes.errors import SandboxDied, SandboxImageError

TOOL_TIMEOUT_BOUND_S = 24 * 3600.0
"""Upper bound for tool and reward timeouts; the task's own limits apply."""
MARGIN_S = 20.0
"""Seconds added to the tests' timeout for starting a sandbox and for removing and writing files."""
OUTPUT_MARGIN_S = 1.0
"""Seconds between a command's timeout and the end of the turn's time, for reading its output."""

COPIES_AT_ONCE = 4
"""Episodes of a process whose `artifacts` are on this machine's disk at the same time, up to 512 MiB for each."""

_tests_that_work: set[tuple[Path, SandboxSpec]] = set()
"""Tasks of this process whose tests gave a verdict in a sandbox that no model command had touched."""


class TaskFolder(SandboxToolEnv):
    """Arguments: `folder` (a task, or a folder of tasks: the seed chooses), `max_turns`, `command_timeout_s`,
    `tool_format`, `reward_key` (the number to use from a `reward.json` with several), and overrides of the tasks:
    `memory_mb`, `cpus`, `workdir`, `user`, `allow` (hosts that the sandbox may reach, `host:port`), `force_build`.
    `artifacts`: absolute paths of the files and folders that are the model's work; the tests then run in a fresh
    sandbox with only these copied into it, so that nothing else that the model did can affect them.
    """

    tool_format = "tags"

    def __init__(
        self,
        folder: str | Path,
        max_turns: int = 50,
        command_timeout_s: float = 60.0,
        tool_format: ToolFormat | None = None,
        reward_key: str = "reward",
        memory_mb: int | None = None,
        cpus: float | None = None,
        workdir: str | None = None,
        user: str = "0:0",
        allow: Sequence[str] = (),
        force_build: bool = False,
        artifacts: Sequence[str] = (),
    ) -> None:
        super().__init__(max_turns=max_turns, tool_format=tool_format)
        require_lists("TaskFolder-v0", allow=allow, artifacts=artifacts)
        self._folder = Path(folder).expanduser()
        self._tasks = find_tasks(folder)
        self._options = FolderOptions(memory_mb, cpus, workdir, user, tuple(allow), force_build)
        self._command_timeout_s = command_timeout_s
        self._reward_key = reward_key
        self._artifacts = _absolute(artifacts)
        self._task: FolderTask | None = None
        if len(self._tasks) == 1:
            self._choose(load_task(self._tasks[0], self._options))

    async def begin(self, seed: int) -> str:
        chosen = self._tasks[seed % len(self._tasks)]
        self._choose(await call_in_thread(lambda: load_task(chosen, self._options)))
        return self.task.instruction

    @property
    def task(self) -> FolderTask:
        assert self._task is not None, "reset() comes first"
        return self._task

    @tool(timeout_s=TOOL_TIMEOUT_BOUND_S, max_characters=8000)
    async def sh(self, command: str) -> Any:
        """Run a shell command and see its output. Each command is a new shell."""
        await self._make_ready()
        left_s = self.task.agent_timeout_s - self._spent_s
        timeout_s = min(self._command_timeout_s, left_s, max(OUTPUT_MARGIN_S, self.calls_left_s - OUTPUT_MARGIN_S))
        began = time.monotonic()
        try:
            return await self.sandbox.exec(command, timeout=timeout_s, cwd=self.task.workdir, max_output=1 << 16)
        finally:
            self._spent_s += time.monotonic() - began
            if self._spent_s >= self.task.agent_timeout_s:
                self.finish()

    @reward(timeout_s=TOOL_TIMEOUT_BOUND_S)
    async def tests(self) -> float:
        """Return the reward of the task's tests. Without a verdict it is 0 if the tests have one in an untouched
        sandbox, because then the model is the cause; else raises EnvError."""
        try:
            await self._make_ready()
            verdict = await self._verdict()
        except SandboxDied as error:
            if error.reason != OUT_OF_MEMORY or not self.used("sh").calls:
                raise
            self._verifier_error = str(error)
            await self._check_that_tests_work(NoVerdictError(str(error)))
            return 0.0
        except NoVerdictError as why:
            self._verifier_output, self._verifier_error = why.output, str(why)
            await self._check_that_tests_work(why)
            return 0.0
        self._verifier_output = verdict.output
        return verdict.reward

    async def _verdict(self) -> Verdict:
        if not self._artifacts:
            async with self._tests_in_time():
                return await run_tests(self.sandbox, self.task, self._reward_key)
        async with self.sandbox.fresh() as untouched, AsyncExitStack() as place:
            await make_folders(untouched, self.task)
            await place.enter_async_context(_places())  # before the limit: others may be slow
            async with self._tests_in_time():
                await copy_out(self.sandbox, self._artifacts, untouched)
                await place.aclose()
                return await run_tests(untouched, self.task, self._reward_key)

    @asynccontextmanager
    async def _tests_in_time(self) -> AsyncIterator[None]:
        """Limit the tests and their copying, which the model's files may also slow down. Raises NoVerdictError."""
        limit_s = self.task.test_timeout_s + MARGIN_S
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            why = f"putting its tests into the sandbox and running them took longer than {limit_s:g} s"
            raise NoVerdictError(why, timed_out=True) from None

    async def _check_that_tests_work(self, why: NoVerdictError) -> None:
        """Raise EnvError if the tests give no verdict in a sandbox that no model command has touched."""
        known = (self.task.folder, self.task.spec)
        if known in _tests_that_work and not why.timed_out:  # tests may also be slow because the machine is busy
            return
        if not self.used("sh").calls:
            raise self._broken(why)
        async with self.sandbox.fresh() as untouched:
            try:
                await make_folders(untouched, self.task)
                await run_tests(untouched, self.task, self._reward_key)
            except NoVerdictError as same:
                raise self._broken(same) from None
            except SandboxDied as error:  # for any reason: it is not the model's fault
                raise self._broken(NoVerdictError(str(error))) from None
        if not self.task.spec.allow:  # hosts outside may be down the next time
            _tests_that_work.add(known)

    async def conclude(self) -> tuple[float, dict[str, Any]]:
        earned, info = await super().conclude()
        info |= {"task": self.task.name, "verifier_output": self._verifier_output}
        return earned, info | ({"verifier_error": self._verifier_error} if self._verifier_error else {})

    async def oracle(self) -> str:
        """Return the right next action, which runs the task's solution, for checks and demonstrations."""
        if not self.task.solution_command:
            raise EnvError(f"{self.task.folder}: it has no solution to show")
        if self.turn:
            return "<answer>done</answer>"
        await self._make_ready()
        await put_files(self.sandbox, self.task.solution)
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.task.solution_env.items())
        exported = f"export {variables}; " if variables else ""
        return f"<sh>{exported}{self.task.solution_command}</sh>"

    def min_step_timeout_s(self) -> float:
        """Allow for a command, the tests, and, without a verdict, the tests again in an untouched sandbox."""
        agent_s, tests_s = longest_limits(self._folder, self._options)
        return min(self._command_timeout_s, agent_s) + 2 * (tests_s + MARGIN_S)

    def min_episode_timeout_s(self) -> float:
        agent_s, tests_s = longest_limits(self._folder, self._options)
        return agent_s + 2 * (tests_s + MARGIN_S)

    def calls_timeout_s(self, spent_s: float) -> float:
        """Return the time limit in seconds for all calls of one turn: what the tests, run twice, leave."""
        return min(self.step_timeout_s, self.episode_timeout_s - spent_s) - 2 * (self.task.test_timeout_s + MARGIN_S)

    def _choose(self, task: FolderTask) -> None:
        self._task = task
        self._spent_s, self._is_ready = 0.0, False
        self._verifier_output, self._verifier_error = "", ""
        self.sandbox_spec = task.spec  # type: ignore[misc]
        self.instructions = (
            f"You work in a shell on a computer of your own. Commands start in {task.workdir}. "
            "When everything is done, reply <answer>done</answer>."
        )

    async def _make_ready(self) -> None:
        """Make the folders at the first use; an image error is extended by the task's folder."""
        if self._is_ready:
            return
        try:
            await make_folders(self.sandbox, self.task)
        except SandboxImageError as error:
            raise type(error)(f"{self.task.folder}: {error}") from None
        self._is_ready = True

    def _broken(self, why: NoVerdictError) -> EnvError:
        end = f"; they printed: {why.output.strip()[-300:]}" if why.output.strip() else ""
        return EnvError(f"task {self.task.folder}: {why}{end}")


def _places() -> asyncio.Semaphore:
    """Return this event loop's semaphore for COPIES_AT_ONCE."""
    return _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(COPIES_AT_ONCE))


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _absolute(paths: Sequence[str]) -> tuple[str, ...]:
    for path in paths:
        if not path.startswith("/") or path.rstrip("/") == "":
            raise ConfigError(f"TaskFolder-v0: artifacts: {path!r} is not the absolute path of a file or folder")
    for path, other in permutations(paths, 2):
        if f"{normpath(path)}/".startswith(f"{normpath(other)}/"):
            raise ConfigError(f"TaskFolder-v0: artifacts: {path!r} is in {other!r}, name one of them")
    return tuple(paths)
