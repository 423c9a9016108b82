"""Resume a run, or only its learner: the newest checkpoint, then what the journal says was decided after it.

Steps that were trained after the checkpoint are repeated with their recorded micro-batches, so the weights are those of
before (bit by bit on a CPU) and no episode is played again for them. Groups that were not trained keep the trajectories
that they had; only episodes that were running are played again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_flash.checked_files import decode, read_checked
from roll_flash.config.tree import Config
from roll_flash.engines.learner import LearnerEngine, StepResult
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import CheckpointError, ConfigError, LearnerError, LearnerLostError
from roll_flash.learner.warm_start import FIRST_STEP_S
from roll_flash.monitor.episodes import find_trajectories, next_group_number
from roll_flash.rollout.recovery import RecordedStep, Recovery
from roll_flash.run.journal import Damage, cut_at, read_journal, set_aside
from roll_flash.run.run_dir import Checkpoint, RunDir, list_checkpoints
from roll_flash.stream import finished_episode
from roll_flash.types import FinishedEpisode, FinishedGroup, Task
from roll_flash.watchdog.activity import doing

Note = Callable[[str], None]
COMPARED = {"loss": 1e-6, "grad_norm": 1e-6, "learning_rate": 0.0}
"""Metrics of the learner by which a repeated step is compared with the recorded one, and differences that are none."""
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on. `trajectories`: those that were found, by episode id."""

    checkpoint: Checkpoint
    recovery: Recovery
    trajectories: Mapping[str, FinishedEpisode]


def read_state(checkpoint: Checkpoint) -> Recovery:
    """Return the rollout's state in a checkpoint. Raises CheckpointError."""
    try:
        return Recovery.of(decode(read_checked(checkpoint.trainer)))
    except (OSError, ValueError) as error:
        raise unreadable(checkpoint, error) from None


def check_tasks(config: Config) -> None:
    """Raises ConfigError if a run that goes on would not have the rows of its newest checkpoint.

    A task source of the user, which may take minutes to make, is asked only when the run has started; a checkpoint that
    cannot be read is named when the run's folder is opened.
    """
    found = list_checkpoints(config.run_folder)
    has_rows = any(env.data is not None for env in config.envs)
    if not found or not has_rows or any(env.task_source is not None for env in config.envs):
        return
    try:
        state = read_state(found[-1]).tasks
    except CheckpointError:
        return
    try:
        open_tasks(config).restore(state)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{found[-1].folder}: {error}; put back what it was, or start another run with name=OTHER"
        ) from None


def unreadable(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    return CheckpointError(f"{checkpoint.trainer}: not readable as a trainer state: {error!r}")


async def resume(
    config: Config, run_dir: RunDir, checkpoint: Checkpoint, learner: LearnerEngine, note: Note
) -> Resumed:
    """Load the checkpoint into the learner and repeat the journal. What cannot be repeated is said, and trained again
    from new episodes."""

    async def load() -> None:
        with doing("the learner", "it loads the checkpoint", announced_s=config.usual_start_s):
            await learner.load(checkpoint.state)

    note(f"the learner loads the checkpoint of step {checkpoint.step}")
    await load()
    recovery, trajectories = await asyncio.to_thread(_read, config, run_dir, checkpoint, note)
    try:
        await _repeat_all(config, learner, recovery.steps, trajectories, note)
    except LearnerLostError:
        raise
    except LearnerError as error:
        note(f"steps after {checkpoint.step} cannot be repeated ({error}): they are trained from new episodes")
        await learner.abandon_step()
        await load()
        await asyncio.to_thread(set_aside, run_dir.journal, checkpoint.step)
        recovery = read_state(checkpoint)
    await asyncio.to_thread(run_dir.set_aside_after, recovery.version)
    written = await asyncio.to_thread(next_group_number, run_dir.episodes, recovery.version)
    recovery.next_group = max(written, recovery.next_group)
    open_ids = {name for group in recovery.groups.values() for name in group.episodes}
    return Resumed(checkpoint, recovery, {name: trajectories[name] for name in open_ids & trajectories.keys()})


async def restore_learner(
    config: Config,
    run_folder: Path,
    checkpoint: Checkpoint | None,
    learner: LearnerEngine,
    note: Note,
    *,
    until: int | None = None,
) -> None:
    """Bring a learner that has started again to the newest step of a run that goes on, or to the step `until`: load the
    checkpoint and repeat the steps after it; without one, all steps. Raises LearnerError if they cannot be repeated."""
    if checkpoint is not None:
        await learner.load(checkpoint.state)
    recovery, damage = await asyncio.to_thread(_read_journal, config, run_folder, checkpoint)
    if damage is not None:
        raise LearnerError(damage.message)
    steps = [step for step in recovery.steps if until is None or step.version <= until]
    trajectories = await asyncio.to_thread(_find, run_folder, _trained_tasks(steps), note)
    await _repeat_all(config, learner, steps, trajectories, note)


def _read(
    config: Config, run_dir: RunDir, checkpoint: Checkpoint, note: Note
) -> tuple[Recovery, dict[str, FinishedEpisode]]:
    recovery, damage = _read_journal(config, run_dir.folder, checkpoint)
    if damage is not None:
        note(f"{damage.message}: the journal is used up to there")
        cut_at(run_dir.journal, damage)
    unfinished = {name: group.task for group in recovery.groups.values() for name in group.episodes}
    return recovery, _find(run_dir.folder, unfinished | _trained_tasks(recovery.steps), note)


def _read_journal(config: Config, run_folder: Path, checkpoint: Checkpoint | None) -> tuple[Recovery, Damage | None]:
    recovery = Recovery.beginning() if checkpoint is None else read_state(checkpoint)
    step, scheduler = 0 if checkpoint is None else checkpoint.step, config.scheduler
    try:
        events, damage = read_journal(run_folder / "journal", step)
        recovery.repeat(events, max_requeues=scheduler.max_requeues if scheduler.on_stale == "requeue" else None)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{run_folder / 'journal'}: not readable as the journal of this run ({error!r}); move it away to resume "
            f"from the checkpoint of step {step} alone"
        ) from None
    return recovery, damage


def _trained_tasks(steps: Sequence[RecordedStep]) -> dict[str, Task]:
    """Return the tasks of the episodes of these steps, by episode id."""
    batches = [batch for step in steps for batch in step.batches]
    return {name: task for batch in batches for _, task, members in batch for name, _ in members}


def _find(run_folder: Path, tasks: Mapping[str, Task], note: Note) -> dict[str, FinishedEpisode]:
    episodes = run_folder / "episodes"
    found = {name: finished_episode(each) for name, each in find_trajectories(episodes, tasks).items()}
    if missing := len(tasks.keys() - found.keys()):
        note(f"{missing} of {len(tasks)} trajectories in the journal are not in {episodes}, or damaged")
    return found


async def _repeat_all(
    config: Config,
    learner: LearnerEngine,
    steps: Sequence[RecordedStep],
    trajectories: Mapping[str, FinishedEpisode],
    note: Note,
) -> None:
    """Repeat steps from the journal. Raises LearnerError."""
    if steps:
        first, last = steps[0].version, steps[-1].version
        note(f"repeating steps {first} to {last} from the journal: they came after the newest checkpoint")
    limit_s = config.learner.step_timeout_s
    for step in steps:
        then = f"it is given up after {limit_s:g} s (learner.step_timeout_s)"
        try:
            with doing("the learner", "it repeats a step", may_take_s=FIRST_STEP_S, then=then):
                async with asyncio.timeout(limit_s):
                    await _repeat(learner, step, trajectories, note)
        except TimeoutError:
            raise LearnerError(f"step {step.version} took longer than {limit_s:g} s (learner.step_timeout_s)") from None


async def _repeat(
    learner: LearnerEngine, step: RecordedStep, trajectories: Mapping[str, FinishedEpisode], note: Note
) -> None:
    for batch in step.batches:
        groups = []
        for group_id, task, members in batch:
            if lost := [name for name, _ in members if name not in trajectories]:
                raise LearnerError(f"trajectory {lost[0]} is lost")
            rows = tuple(
                replace(trajectories[name], reward=reward, teacher_log_ratios=step.teacher.get(name))
                for name, reward in members
            )
            groups.append(FinishedGroup(group_id, task, rows))
        await learner.accumulate(groups)
    result = await learner.finish_step()
    if result.version != step.version:
        raise LearnerError(f"the learner is at step {result.version} instead of {step.version}")
    if difference := _difference(step, result):
        note(f"step {step.version} is repeated with another result: {difference}")


def _difference(step: RecordedStep, result: StepResult) -> str:
    """Describe the first compared metric that is not as recorded."""
    for name, ignored in COMPARED.items():
        before: Any = step.metrics.get(name)
        now = result.metrics.get(name)
        if before is not None and now is not None and not math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=ignored):
            return f"{name} {now:.4g} instead of {before:.4g}"
    return ""
