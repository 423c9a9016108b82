"""Starts a learner again that has died or hangs, while servers, workers, sandboxes and episodes go on.

The new learner loads the newest checkpoint and repeats the steps after it from the journal, as `--resume` does
(`resume.py`), then the micro-batches of the running step, which the driver still has. It is then at the version of the
lost one, with its weights: bit by bit on a CPU, up to the rounding of sums in another order on a GPU or with fewer
ranks. So no version goes back, tokens that servers sample meanwhile are of the version that they name, and the
staleness rule needs no exception. The version is published again, because servers may have got half of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from roll_flash.errors import LearnerError, LearnerLostError
from roll_flash.monitor.step_record import StepRecord
from roll_flash.processes.deadlines import HungError
from roll_flash.run.run_dir import Checkpoint
from roll_flash.system.resume import restore_learner
from roll_flash.system.system import System
from roll_flash.watchdog.activity import doing

MAX_WITHOUT_STEP = 3
"""Restarts in a row without a new step, after which the run ends."""
FIRST_PAUSE_S = 5.0
"""Pause in seconds before the second restart without a new step; the first has none, each further one twice as long."""

T = TypeVar("T")


class LearnerRestart:
    """Through which all calls of a training run's learner go: `run`. Use it from one event loop."""

    def __init__(self, system: System, note: Callable[[str], None]) -> None:
        self._system = system
        self._note = note
        self._lock = asyncio.Lock()
        self._without_step = 0
        self.running_step: StepRecord | None = None
        """The micro-batches that a new learner has to accumulate again."""
        self.lost_checkpoint = False
        """True if a checkpoint was not written because of a restart."""

    def step_ended(self) -> None:
        """Note that the learner has made a step: earlier restarts no longer count."""
        self._without_step = 0

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()`. If the learner is lost or hangs, start it again and repeat the call.

        Raises LearnerError if a learner cannot be brought back to where the run is.
        """
        while True:
            async with self._lock:
                try:
                    return await call()
                except (LearnerLostError, HungError) as error:
                    await self._start_again(error)

    async def watch(self) -> None:
        """Start the learner again also while nothing is asked of it. Never ends."""
        learner = self._system.learner
        while True:
            await learner.lost.wait()
            await self.run(self._look)

    async def _look(self) -> None:
        self._system.learner.raise_if_lost()

    async def _start_again(self, why: Exception) -> None:
        version = self._system.rollout.scheduler.learner_version
        while True:
            began_s = time.monotonic()
            await self._forget_lost_learner()
            if self._system.config.inference.weight_transfer == "nccl":
                raise LearnerLostError(f"{why}; servers that receive weights by NCCL cannot go on without it")
            if self._without_step == MAX_WITHOUT_STEP:
                raise LearnerLostError(f"{why}; it was started again {MAX_WITHOUT_STEP} times without a new step")
            pause_s = FIRST_PAUSE_S * 2 ** (self._without_step - 1) if self._without_step else 0.0
            self._without_step += 1
            checkpoint = self._system.run_dir.latest_checkpoint()
            begin = "its beginning" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
            pause = f" in {pause_s:g} s" if pause_s else ""
            self._note(f"{why}; starting the learner again{pause}, from {begin}; episodes go on")
            await asyncio.sleep(pause_s)
            try:
                with doing("the learner", "it starts again", announced_s=self._system.config.usual_start_s):
                    await self._restore(checkpoint, version)
            except LearnerLostError as error:
                why = error
            else:
                self._note(f"the learner is back at step {version}, after {time.monotonic() - began_s:.0f} s")
                return

    async def _forget_lost_learner(self) -> None:
        """End what still waits for the lost learner, so that nothing of it reaches the new one."""
        system = self._system
        await system.learner.close()
        self.lost_checkpoint |= not await system.checkpoints.ended()
        await system.publisher.forget()

    async def _restore(self, checkpoint: Checkpoint | None, version: int) -> None:
        system, learner = self._system, self._system.learner
        try:
            await learner.start()
            if checkpoint is None:
                await system.before_first_step()
            await system.rollout.written()
            await restore_learner(system.config, system.run_dir.folder, checkpoint, learner, self._note)
            if learner.version != version:
                raise LearnerError(f"the journal leads to step {learner.version}, and the run is at step {version}")
            step = self.running_step
            if step is not None and not step.is_counted:
                for groups in step.micro_batches:
                    await learner.accumulate(groups)
            if system.publisher.newest == version:
                await system.publisher.begin()
        except BaseException:
            await learner.close()  # it is not where the run is: nothing may be written of it
            raise
