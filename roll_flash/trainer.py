"""A training run on one page: build, loop, close.

Groups go through the trajectory stream to the learner as they become complete. While it accumulates the gradient of a
step, episodes of the next one are already being played, servers take the weights of the last one, and its checkpoint is
written. What may overlap with what is decided by the staleness rule in `rollout/`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from roll_flash.config import Config
from roll_flash.evaluate.result import EvalResult
from roll_flash.interrupt import run_until_interrupted
from roll_flash.learner.engine import StepResult
from roll_flash.models import resolve_model
from roll_flash.monitor.progress import Progress
from roll_flash.monitor.summary import summarize
from roll_flash.publication import Publication
from roll_flash.rollout.environments import check_environments
from roll_flash.run_dir import RunDir
from roll_flash.stages.reward_stage import check_stages
from roll_flash.step_metrics import StepRecord
from roll_flash.stream import LearnerLoader
from roll_flash.system import System, open_system


def train(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Run a training job to its end and return its summary.

    Raises RollFlashError, or KeyboardInterrupt after Ctrl-C or SIGTERM, when a checkpoint has been written.
    """
    # What is wrong with these must be said before there is a run folder of this name.
    resolve_model(config.model.path)
    check_environments(config.envs)
    check_stages(config)
    with RunDir.create(config, resume=resume) as run_dir, Progress(config.steps) as progress:
        return asyncio.run(_train(config, run_dir, progress, resume))


async def _train(config: Config, run_dir: RunDir, progress: Progress, resume: bool) -> dict[str, Any]:
    async with open_system(config, run_dir, resume=resume, progress=progress) as system:
        trainer = Trainer(system, progress)
        return await run_until_interrupted(trainer.run(), on_interrupt=trainer.stop_early)


class Trainer:
    """The loop over steps. What it drives is in `system`."""

    def __init__(self, system: System, progress: Progress) -> None:
        self._system = system
        self._config = system.config
        self._progress = progress
        timeout_s, column = system.config.monitor.stall_timeout_s, system.stages.reward_column
        self._loader = LearnerLoader(system.stream, timeout_s=timeout_s, reward_column=column)

    async def run(self) -> dict[str, Any]:
        system = self._system
        before = await self._evaluate()
        async with system.evaluations(self._progress.note) as evaluations, system.rollout:
            while system.learner.version < self._config.steps and await self._step():
                evaluations.after_step(system.learner.version)
        await self._settle()
        await self._begin_checkpoint()
        after = await self._evaluate()
        await self.checkpoint()
        await system.export_model()
        return summarize(system.run_dir.folder, before=before, after=after, books=system.rollout.books())

    async def checkpoint(self) -> None:
        """Until there is a complete one of the newest version."""
        self._progress.status("writing a checkpoint")
        await self._begin_checkpoint()
        await self._system.checkpoints.settled()

    async def stop_early(self) -> None:
        """Leave the step under way and save what the finished ones made."""
        try:
            await self._system.learner.abandon_step()
            await self.checkpoint()
        except asyncio.CancelledError:
            self._system.checkpoints.give_up()
            raise

    async def _step(self) -> bool:
        """One step. False when the task source has ended and there was nothing left to train."""
        learner, rollout = self._system.learner, self._system.rollout
        self._system.checkpoints.check()
        record = StepRecord(learner.version, rollout.idle_s())
        has_groups = False
        source = self._loader.stream_step(rollout.groups_for_step(self._progress.status))
        async with aclosing(source) as micro_batches:
            async for micro_batch in micro_batches:
                has_groups = True
                with record.learner_works(micro_batch.groups):
                    await learner.accumulate(micro_batch.groups)
        if not has_groups:
            self._note_rollout()
            return False
        with record.learner_works():
            result = await learner.finish_step()
        await rollout.version_advanced(result.version)
        self._note_rollout()
        publication = await self._settle()
        with record.learner_works():
            await self._system.publisher.begin()
        self._report(record, result, publication, await self._system.usage_metrics())
        every = self._config.checkpoint.every
        if every and result.version % every == 0:
            await self._begin_checkpoint()
        return True

    def _note_rollout(self) -> None:
        for notice in self._system.rollout.take_notices():
            self._progress.note(notice)

    async def _begin_checkpoint(self) -> None:
        """Wait for what must be copied (and for the checkpoint before); steps go on while it is written."""
        waited_s = await self._system.checkpoints.begin()
        if waited_s is not None:
            self._system.metrics.log(self._system.learner.version, {"checkpoint/waited_s": waited_s})

    async def _settle(self) -> Publication | None:
        """Until every server has the weights of the step before."""
        return await self._system.publisher.settled()

    async def _evaluate(self) -> EvalResult | None:
        if not self._config.eval.before_and_after:
            return None
        version = self._system.learner.version
        self._progress.note(f"evaluating {self._config.eval.tasks} held-out tasks with the weights of step {version}")
        result = await self._system.evaluate()
        self._progress.note(f"held-out success {result.success}, reward {result.reward}, {result.seconds:.0f} s")
        return result

    def _report(
        self, record: StepRecord, result: StepResult, publication: Publication | None, usage: dict[str, float]
    ) -> None:
        rollout = self._system.rollout
        metrics = {
            **record.metrics(rollout.idle_s()),
            **result.metrics,
            **(publication.metrics() if publication else {}),
            **{f"books/{name}": count for name, count in rollout.books().items()},
            **{f"stream/{name}": value for name, value in self._system.stream.metrics().items()},
            **usage,
            **self._system.checkpoints.metrics(),
        }
        self._system.metrics.log(result.version, metrics | rollout.metrics())
        self._progress.step(result.version, metrics)
        if (decision := rollout.adapt(metrics)) is not None:
            self._system.run_dir.log_decision({"step": result.version, **asdict(decision)})
            if decision.changed:
                self._progress.note(f"async_ratio is {decision.async_ratio} from now on: {decision.reason}")
