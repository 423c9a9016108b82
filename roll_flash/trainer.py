"""The training loop: build, loop, close.

Complete groups come through the trajectory stream to the learner. While it accumulates the gradient of a step, workers
already play episodes of the next step, servers receive the weights of the last step, and its checkpoint is written. The
staleness rule in `rollout/` limits this overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roll_flash.config.tree import Config, load_config
from roll_flash.config.user_code import forget_changed_files
from roll_flash.diagnosis import LiveDiagnosis
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import RunError
from roll_flash.evaluation.result import EvalResult
from roll_flash.learner.open import open_learner
from roll_flash.monitor.machine import machine_metrics
from roll_flash.monitor.metrics import as_numbers
from roll_flash.monitor.progress import Progress
from roll_flash.monitor.step_record import StepRecord
from roll_flash.processes.background import background_task, call_in_thread, first_failure
from roll_flash.processes.deadlines import LearnedDeadline
from roll_flash.processes.garbage import long_lived_process
from roll_flash.processes.interrupt import Interrupts, run_to_end
from roll_flash.processes.terminal_logs import make_logs_printable
from roll_flash.run.checkpoints.writer import CheckpointSchedule
from roll_flash.run.learner_logprobs import write_logprobs
from roll_flash.run.run_dir import RunDir, check_run_folder
from roll_flash.stream import LearnerLoader
from roll_flash.summary import summarize
from roll_flash.system.learner_restart import LearnerRestart
from roll_flash.system.resume import check_tasks
from roll_flash.system.start_checks import check_parts, check_sandboxes
from roll_flash.system.system import Start, System, open_system
from roll_flash.types import MIN_GROUP_SIZE, FinishedEpisode, FinishedGroup
from roll_flash.watchdog.activity import doing
from roll_flash.watchdog.watchdog import CLOSES_WITHIN_S, open_watchdog
from roll_flash.weight_sync.publication import Publication

LEARNER_FLOOR_S = 300.0
"""Minimum timeout in seconds of the learner's work; otherwise ten times the slowest recent time for as many tokens."""
T = TypeVar("T")

OnStep = Callable[[int, Mapping[str, float]], object]
"""Called with a step (from 1) and its metrics, by the names of `metrics.jsonl`."""


def train(config: Config | str | Path, *, resume: bool = False, on_step: OnStep | None = None) -> dict[str, Any]:
    """Run a training job to its end and return its summary, as `roll-flash train --json` prints it.

    `config` is a loaded config or a YAML file. `resume` continues the run of this name from its newest checkpoint.
    `on_step` is called after the report of each step, in a thread, while episodes go on; the next step waits for it. An
    error in it ends the run. Works also where an event loop runs already, as in a notebook.

    Raises RollFlashError, or KeyboardInterrupt after Ctrl-C, SIGTERM or SIGHUP, when a checkpoint has been written.
    """
    make_logs_printable()
    forget_changed_files()
    config = config if isinstance(config, Config) else load_config(config)
    # Report problems before a run folder of this name exists, those that are found at once first.
    check_run_folder(config, resume=resume)
    checked = check_parts(config, resume=resume)
    if resume:
        check_tasks(config)
    if config.ray.address is None:  # else workers may be on other nodes, which are checked when their places are known
        run_to_end(check_sandboxes(config, checked.sandboxes))
    with (
        RunDir.create(config, resume=resume) as run_dir,
        Progress(config.steps, run_folder=run_dir.folder) as progress,
    ):
        start = Start.of(config, run_dir, checked, resume=resume)
        start.announce(progress)
        # Not on the event loop: the imports of a plug-in may take seconds, during which Ctrl-C must be answered.
        learner = open_learner(config, model_folder=start.model_folder)
        return run_to_end(_train(start, learner, progress, on_step))


async def _train(
    start: Start, learner: LearnerEngine, progress: Progress, on_step: OnStep | None = None
) -> dict[str, Any]:
    with first_failure() as failure:
        config = start.config
        async with (
            Interrupts(progress.note) as interrupts,
            open_watchdog(
                config.name,
                start.run_dir.logs,
                progress.note,
                held_at_most_s=config.stall_timeout_s,
                closes_within_s=config.learner.step_timeout_s + CLOSES_WITHIN_S,  # after a checkpoint under way
            ) as watchdog,
            open_system(start, learner, progress, failure, watchdog) as system,
        ):
            trainer = Trainer(system, progress, on_step)
            with long_lived_process():
                return await interrupts.run_until_stopped(trainer.run(), failure=failure, save=trainer.stop_early)


class Trainer:
    """The loop over steps; it drives the components of `System`."""

    def __init__(self, system: System, progress: Progress, on_step: OnStep | None = None) -> None:
        self._system = system
        self._on_step = on_step
        self._config = system.config
        self._progress = progress
        self._evaluated: set[str] = set()
        most_s = system.config.learner.step_timeout_s
        self._micro_batch_s = LearnedDeadline(floor_s=min(LEARNER_FLOOR_S, most_s), max_s=most_s)
        self._update_s = LearnedDeadline(floor_s=min(LEARNER_FLOOR_S, most_s), max_s=most_s)
        self._staging_s = LearnedDeadline(floor_s=min(LEARNER_FLOOR_S, most_s), max_s=most_s)
        self._last_tokens = 0
        """Tokens of the last micro-batch, counted by `_computed_tokens`."""
        learner = system.config.learner
        self._diagnosis = LiveDiagnosis(system.config.model_dump(mode="json"))
        has_one = system.run_dir.latest_checkpoint() is not None
        self._schedule = CheckpointSchedule(system.config.checkpoint, has_one=has_one, now_s=time.monotonic())
        self._loader = LearnerLoader(
            system.stream,
            micro_batch_tokens=learner.micro_batch_tokens * learner.ranks,  # one packed row for each rank
            in_order=system.config.scheduler.in_order,
            timeout_s=system.config.stall_timeout_s,
            least_group_size=min(MIN_GROUP_SIZE, system.config.scheduler.group_size),
        )
        self._record: StepRecord | None = None
        self._restart = LearnerRestart(system, progress.note)

    @property
    def _version(self) -> int:
        """Newest version of the run: also while a learner that started again repeats steps."""
        return self._system.rollout.scheduler.learner_version

    async def run(self) -> dict[str, Any]:
        system = self._system
        self._progress.show(step=self._version)
        self._diagnosis.go_on(system.run_dir.folder)
        evaluated_at, before = await self._evaluation_before()
        watching = background_task(self._restart.watch(), "the watch over the learner")
        async with system.evaluations(self._progress.note) as evaluations, system.rollout, watching:
            while self._version < self._config.steps and await self._step():
                evaluations.after_step(self._version)
        self._progress.note("training is done; writing the last checkpoint")
        await self._settle()
        await self._begin_checkpoint()
        after = await self._evaluate() if self._version > evaluated_at else before
        await self.checkpoint()
        await system.export_model()
        with doing("the copy of the last checkpoint", "it is not written"):
            await system.checkpoints.copied()
        self._progress.note("closing servers, workers and Ray (usually 5-30 s)")
        with doing("the summary", "it is not written"):  # draws a plot and reads many episodes
            books = system.rollout.books()
            summary = await asyncio.to_thread(summarize, system.run_dir.folder, before=before, after=after, books=books)
        system.metrics.exports.finish(summary)
        return summary

    async def checkpoint(self) -> None:
        """Wait for a complete checkpoint of the newest version."""
        self._progress.status("writing a checkpoint")
        await self._restart.run(self._write_checkpoint)

    async def _write_checkpoint(self) -> None:
        await self._begin_writing()
        with self._writing():
            await self._system.checkpoints.settled()

    async def stop_early(self, reason: BaseException) -> None:
        """Abandon the running step and save the finished ones; after an error, as far as possible."""
        learner, was_asked = self._system.learner, isinstance(reason, KeyboardInterrupt)
        if not was_asked:
            self._progress.note(f"the run ends: {reason}")
        if learner.lost.is_set():
            self._progress.note("the learner cannot write a checkpoint; `--resume` goes on from the journal")
            return
        if learner.version == 0 and not was_asked:
            return
        self._progress.note(f"writing a checkpoint of step {learner.version}, then closing (usually 10-40 s)")
        try:
            tokens = max(1, self._last_tokens)
            await self._within("micro-batch", learner.abandon_step(), self._micro_batch_s, tokens)
            cut_short = await self._count_what_was_cut_short()
            await self._system.checkpoints.ended()  # its failure may be the reason why the run ends
            self._progress.status("writing a checkpoint")
            await self._write_checkpoint()
            if cut_short is not None:
                self._report(cut_short, None, {})
        except asyncio.CancelledError:
            self._system.checkpoints.give_up()
            raise
        except Exception as error:  # no error here may hide why the run ends
            if was_asked:
                raise
            self._progress.note(f"no checkpoint of step {learner.version} could be written: {error}")

    async def _step(self) -> bool:
        """Run one step. Return False if the task source has ended and nothing was left to train."""
        learner, rollout = self._system.learner, self._system.rollout
        record = StepRecord(self._version, rollout.idle_s())
        self._record = self._restart.running_step = record
        has_groups = False
        source = self._loader.stream_step(rollout.groups_for_step(self._progress.status))
        async with aclosing(source) as micro_batches:
            async for groups in micro_batches:
                has_groups = True
                self._last_tokens = self._computed_tokens(groups)
                await self._learner_does(
                    "micro-batch",
                    partial(learner.accumulate, groups),
                    self._micro_batch_s,
                    self._last_tokens,
                    during=partial(record.learner_works, "accumulate", groups, self._tokens_to_compute(groups)),
                )
        if not has_groups:
            self._note_rollout()
            return False
        result = await self._learner_does(
            "step",
            learner.finish_step,
            self._update_s,
            self._computed_tokens(record.groups),
            during=partial(record.learner_works, "update"),
        )
        record.learner_metrics = result.metrics
        written = await self._count(record)
        if result.logprobs:
            await call_in_thread(partial(write_logprobs, self._system.run_dir.logs, result.version, result.logprobs))
        publication = await self._settle()
        await self._learner_does(
            "copy of the weights",
            self._system.publisher.begin,
            self._staging_s,
            during=partial(record.learner_works, "stage"),
        )
        with doing("the report", "workers, servers or the disk have not answered"):
            usage = await self._system.usage_metrics()
            await self._in_journal(written)
        metrics = self._report(record, publication, usage)
        await self._call_on_step(result.version, metrics)
        if self._schedule.is_due(result.version, time.monotonic()) or self._restart.lost_checkpoint:
            self._restart.lost_checkpoint = False
            await self._begin_checkpoint()
        return True

    async def _in_journal(self, written: asyncio.Future[None]) -> None:
        """Wait until the journal has a step: it has each one of which the metrics tell. Raises RunError."""
        limit_s = self._config.learner.step_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await written
        except TimeoutError:
            folder = self._system.run_dir.folder
            raise RunError(
                f"{folder}: the disk has not taken the journal within {limit_s:g} s (learner.step_timeout_s)"
            ) from None

    async def _learner_does(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        limit: LearnedDeadline,
        size: float = 1.0,
        *,
        during: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> T:
        """Await a call of the learner; one that is lost, or takes far longer than ever before, is started again."""

        async def timed() -> T:
            with during():
                return await self._within(what, call(), limit, size)

        return await self._restart.run(timed)

    async def _within(self, what: str, work: Awaitable[T], limit: LearnedDeadline, size: float) -> T:
        then = f"it is started again after {limit.limit_s(size):.0f} s"
        with doing("the learner", what, size=size, then=then):
            return await limit.run(work, f"the learner's {what}", size)

    def _tokens_to_compute(self, groups: Iterable[FinishedGroup]) -> int:
        """Tokens of the groups that the learner computes, the prompt of a group once."""
        computes_all = self._config.learner.computes_silent_groups
        return sum(group.packed_tokens for group in groups if computes_all or group.has_signal)

    def _computed_tokens(self, groups: Iterable[FinishedGroup]) -> int:
        """Tokens of groups with a signal, by which times are compared: most others are not computed. With a critic, of
        all groups."""
        counts_all = self._config.learner.has_critic
        chosen = (group for group in groups if counts_all or group.has_signal)
        return sum(trajectory.tokens for group in chosen for trajectory in group.trajectories)

    async def _call_on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if (on_step := self._on_step) is None:
            return
        try:
            with doing("on_step", "it has not returned", then="the run waits for it"):
                await call_in_thread(lambda: on_step(step, as_numbers(metrics)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # code of the user may raise anything, also SystemExit
            raise RunError(f"on_step failed after step {step}: {type(error).__name__}: {error}") from error

    async def _count_what_was_cut_short(self) -> StepRecord | None:
        """Count a step that ended between the learner's update and its report: its weights exist."""
        record = self._record
        if record is None or record.is_reported:
            return None
        if not record.is_counted and self._system.learner.version > record.version:
            await self._count(record)
        return record if record.is_counted else None

    async def _count(self, record: StepRecord) -> asyncio.Future[None]:
        """Count the groups of a step as trained, once the learner has finished it. Return what is set when the journal
        has it."""
        record.is_counted = True
        self._restart.step_ended()
        version = self._system.learner.version
        learned = (record.micro_batches, record.learner_metrics)
        written = await self._system.rollout.version_advanced(version, *learned)
        self._note_rollout()
        self._note_trained(version, record.trajectories)
        return written

    def _note_rollout(self) -> None:
        for notice in self._system.rollout.take_notices():
            self._progress.note(notice)

    async def _begin_checkpoint(self) -> None:
        """Wait until the state is copied (and the previous checkpoint written); steps continue during the writing."""
        await self._restart.run(self._begin_writing)

    async def _begin_writing(self) -> None:
        with self._writing():
            waited_s = await self._system.checkpoints.begin()
        if waited_s is not None:
            self._system.metrics.log(self._system.learner.version, {"checkpoint/waited_s": waited_s})

    def _writing(self) -> AbstractContextManager[object]:
        limit_s = self._config.learner.step_timeout_s
        return doing("the checkpoint", "it is not written", then=f"the run ends after {limit_s:g} s")

    async def _settle(self) -> Publication | None:
        """Wait until every server has the weights of the previous step."""
        return await self._restart.run(self._system.publisher.wait_published)

    async def _evaluation_before(self) -> tuple[int, EvalResult | None]:
        """Return an evaluation before training, and its version. A run that goes on has it from its first start; else
        the newest weights are evaluated."""
        if self._version and self._config.eval.before_and_after:
            before = await self._system.evaluation_before_training()
            if before is not None:
                self._evaluated |= before.task_hashes
                self._progress.note(f"evaluated at the first start, with the weights of step 0: {before.scores}")
                return 0, before
        return self._version, await self._evaluate()

    async def _evaluate(self) -> EvalResult | None:
        if not self._config.eval.before_and_after:
            return None
        version = self._version
        most = self._config.eval.tasks
        self._progress.note(f"evaluating up to {most} tasks of each environment with the weights of step {version}")
        result = await self._system.evaluate()
        self._evaluated |= result.task_hashes
        self._progress.note(f"{result.kind}: {result.scores}, {result.seconds:.0f} s")
        return result

    def _note_trained(self, step: int, trajectories: Iterable[FinishedEpisode]) -> None:
        """Warn once, as soon as it is known, that evaluated tasks are also trained on."""
        trained = self._system.trained_tasks
        trained.add(step, trajectories)
        if common := self._evaluated & trained.hashes:
            self._evaluated.clear()
            self._progress.note(
                f"warning: {len(common)} of the tasks that are evaluated are trained on, so these evaluations are not "
                "held out; the environment gives the same tasks for other seeds"
            )

    def _report(
        self, record: StepRecord, publication: Publication | None, usage: dict[str, float]
    ) -> Mapping[str, Any]:
        """Log a step and print its line; return its metrics."""
        record.is_reported = True
        rollout, version = self._system.rollout, self._version
        metrics = {
            **record.metrics(rollout.idle_s()),
            **record.learner_metrics,
            **(publication.metrics() if publication else {}),
            **{f"books/{name}": count for name, count in rollout.books().items()},
            **{f"stream/{name}": value for name, value in self._system.stream.metrics().items()},
            **usage,
            **self._system.checkpoints.metrics(),
            **rollout.metrics(),
            **machine_metrics(self._system.run_dir.folder),
            **self._system.episode_space.metrics(),
        }
        self._system.metrics.log(version, metrics)
        self._system.episode_space.step_ended(version)
        span = publication.span() if publication else None
        stages = self._system.stages.take_timeline()
        self._system.run_dir.log_timeline({**record.timeline(), "publication": span, "stages": stages})
        self._progress.step(version, metrics, record.staleness())
        for finding in self._diagnosis.step(version, metrics, record.groups):
            self._progress.note(finding.line)
        if (decision := rollout.adapt(metrics)) is not None:
            self._system.run_dir.log_decision({"step": version, **asdict(decision)})
            if decision.changed:
                self._progress.note(f"async_ratio is {decision.async_ratio} from now on: {decision.reason}")
        return metrics
