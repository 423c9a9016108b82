"""Write checkpoints of a run while its steps continue.

The state is copied between two steps: weights and optimizer by the learner, the state of the rollout here. Steps
continue after the copy. Trajectories are not saved: they are in the log of episodes, and what happens after the copy is
in the journal. One checkpoint is written at a time, and it is valid (`step_N`) only when all of it is on disk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from roll_flash.config.tree import CheckpointConfig
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import CheckpointError, LearnerLostError
from roll_flash.processes.background import cancel_and_wait, error_of, in_thread, start_background
from roll_flash.run.checkpoints.store import CheckpointCopies
from roll_flash.run.run_dir import RunDir


class CheckpointSchedule:
    """Decide after which steps a checkpoint is due. `has_one`: one exists, so the first step needs none."""

    def __init__(self, config: CheckpointConfig, *, has_one: bool, now_s: float) -> None:
        self._config = config
        self._has_one = has_one
        self._last_s = now_s

    def is_due(self, version: int, now_s: float) -> bool:
        """Return True, and count it as started, if one is due after the step that made `version`."""
        config = self._config
        by_steps = config.every > 0 and version % config.every == 0
        by_time = config.every_minutes > 0 and now_s - self._last_s >= config.every_minutes * 60
        is_first = not self._has_one and (config.every > 0 or config.every_minutes > 0)
        if not (by_steps or by_time or is_first):
            return False
        self._has_one, self._last_s = True, now_s
        return True


class CheckpointWriter:
    """`begin` between steps, `settled` before the run ends. A checkpoint that cannot be written ends the run, unless
    that is because the learner is lost (LearnerLostError)."""

    def __init__(
        self,
        run_dir: RunDir,
        learner: LearnerEngine,
        *,
        rollout_state: Callable[[], Mapping[str, Any]],
        episodes_written: Callable[[], Awaitable[None]],
        config: CheckpointConfig,
        checkpoint_bytes: int,
        timeout_s: float,
        copies: CheckpointCopies | None = None,
    ) -> None:
        """`config` says which checkpoints to keep. `episodes_written` waits for those that the state names. `copies`
        gets each checkpoint that is complete."""
        self._run_dir = run_dir
        self._learner = learner
        self._rollout_state = rollout_state
        self._episodes_written = episodes_written
        self._config = config
        self._checkpoint_bytes = checkpoint_bytes
        self._timeout_s = timeout_s
        self._copies = copies
        self._task: asyncio.Task[None] | None = None
        self._written_s: float | None = None

    async def begin(self) -> float | None:
        """Begin a checkpoint of the newest version; return the seconds that steps had to wait.

        Waits for the previous checkpoint; returns None if that is of the same version. Raises CheckpointError, RunError
        if the disk is nearly full, and the learner's errors.
        """
        started = time.monotonic()
        await self.settled()
        version = self._learner.version
        newest = self._run_dir.latest_checkpoint()
        if newest is not None and newest.step == version:
            return None
        self._run_dir.require_space(self._checkpoint_bytes)
        copied = asyncio.Event()
        self._task = start_background(
            self._write(version, copied), f"the checkpoint of step {version}", awaited=(LearnerLostError,)
        )
        self._task.add_done_callback(lambda _: copied.set())
        # Not cancelled with its caller: Ctrl-C would begin the same checkpoint again.
        await copied.wait()
        if self._task.done():
            await self.settled()
        return time.monotonic() - started

    async def settled(self) -> None:
        """Wait for the running checkpoint, if any. Raises CheckpointError or LearnerError if its write failed."""
        if self._task is None:
            return
        done, _ = await asyncio.wait([self._task], timeout=self._timeout_s)
        if not done:
            self.give_up()
            raise CheckpointError(
                f"{self._run_dir.checkpoints_folder}: the checkpoint was not written within {self._timeout_s:g} s "
                "(learner.step_timeout_s); the one before it is the newest"
            )
        task, self._task = self._task, None
        task.result()

    async def ended(self) -> bool:
        """Wait for the running checkpoint, if any, and ignore its error, which was already reported or is known. Return
        false if it failed."""
        if (task := self._task) is None:
            return True
        if (await asyncio.wait([task], timeout=self._timeout_s))[0]:
            self._task = None
        return self._task is None and error_of(task) is None

    def metrics(self) -> dict[str, float]:
        """Seconds to write the newest complete checkpoint, and how far it is copied."""
        written = {} if self._written_s is None else {"checkpoint/written_s": self._written_s}
        return written | (self._copies.metrics() if self._copies is not None else {})

    async def copied(self) -> None:
        """Wait until the newest checkpoint is copied, or could not be once more."""
        if self._copies is not None:
            await self._copies.settled(self._timeout_s)

    def give_up(self) -> None:
        """Cancel the running checkpoint; its partial files are removed."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Wait for the running checkpoint when the run has ended, and ignore its error."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=self._timeout_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _write(self, version: int, copied: asyncio.Event) -> None:
        started = time.monotonic()
        writing: list[asyncio.Task[None]] = []
        async with in_thread(self._run_dir.writing_checkpoint(version)) as folder:
            try:
                writing.append(await self._learner.begin_save(folder / "state"))
                writing.append(await self._learner.begin_export(folder / "hf"))
                state = json.dumps({"version": version, **self._rollout_state()})
                copied.set()
                await asyncio.to_thread((folder / "trainer.json").write_text, state)
                await asyncio.gather(self._episodes_written(), *writing)
            finally:
                await cancel_and_wait(writing)
        if self._copies is not None and (newest := self._run_dir.latest_checkpoint()) is not None:
            await self._copies.add(newest)
        await asyncio.to_thread(self._run_dir.prune_checkpoints, self._config.keep, self._config.keep_every)
        self._written_s = time.monotonic() - started
