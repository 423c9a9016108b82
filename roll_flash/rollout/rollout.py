"""Connects the pure scheduler to the worker fleet: reports outcomes to it and carries out its decisions.

A trajectory goes into the stream when its episode ends, and leaves it when the scheduler drops its group. Episodes keep
running while the learner trains. The learner reads the groups of its step in batches (`groups_for_step`) and reports
each new version (`version_advanced`, `published`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

from roll_flash.config.tree import Config
from roll_flash.errors import RunError
from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.monitor.metrics import LEARNER_IDLE, SERVERS_IDLE
from roll_flash.processes.background import error_of, start_background
from roll_flash.rollout.episode_log import EpisodeLog
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.recovery import MicroBatches, Recovery, encode_teacher
from roll_flash.rollout.turn_file import TurnFile
from roll_flash.rollout.turns import SentTurn
from roll_flash.run.journal import Event, Journal, state_event
from roll_flash.scheduling.async_ratio import Decision, StepMeasurement, controller_of
from roll_flash.scheduling.group_queues import OpenGroup
from roll_flash.scheduling.scheduler import Scheduler
from roll_flash.scheduling.tasks import TaskSource
from roll_flash.stream import REWARD, TrajectoryStream
from roll_flash.types import EpisodeFailure, FinishedEpisode, FinishedGroup, SamplingParams
from roll_flash.watchdog.activity import Activity, doing


class Rollout:
    """Owns the background task that keeps the slots filled. Use as an async context manager."""

    def __init__(
        self,
        config: Config,
        fleet: WorkerFleet,
        tasks: TaskSource,
        files: EpisodesWriter,
        stream: TrajectoryStream,
        *,
        version: int = 0,
        recovery: Recovery | None = None,
        trajectories: Mapping[str, FinishedEpisode] | None = None,
        journal: Journal | None = None,
        turns: TurnFile | None = None,
    ) -> None:
        """`recovery`: where to go on, with those of its `trajectories` that were found, by episode id; the others are
        played again, after the finished turns that the fleet has. Raises ValueError, KeyError or TypeError if it is
        another run's. `journal`: of all decisions; `turns`: finished ones of running episodes."""
        rollout, scheduler = config.rollout, config.scheduler
        self._fleet = fleet
        self._tasks = tasks
        self._files = files
        self._log = EpisodeLog(files, journal, turns)
        self._has_journal = journal is not None
        self._stream = stream
        self._has_stages = bool(config.stages) or config.distill is not None
        self._max_concurrent = rollout.max_concurrent
        self._max_failures_in_a_row = scheduler.max_failures_in_a_row
        self._stall_timeout_s = config.stall_timeout_s
        self._episode_timeout_s = rollout.episode_timeout_s
        self._controller = controller_of(scheduler)
        self.scheduler = Scheduler(
            scheduler,
            max_turns=config.envs[0].max_turns,
            sampling=training_sampling(config),
            retries=rollout.retries,
            version=version,
            longest_episode_s=rollout.episode_timeout_s,
        )
        self._is_closed = False
        self._is_batch = scheduler.mode == "batch"
        self._rules = {
            "group_size": scheduler.group_size,
            "replicas": scheduler.replicas,
            "retries": rollout.retries,
        }
        self._again: list[str] = []
        """Episodes that had ended, and are played again."""
        if recovery is not None:
            self._restore(recovery, trajectories or {})
        self._changed = asyncio.Event()
        self._group_ready = asyncio.Event()
        self._failures_in_a_row = 0
        self._first_failure_s = 0.0
        """When the first of them failed."""
        self._last_causes: Counter[str] = Counter()
        self._last_message = ""
        self._tasks_ended = False
        self._notices = [str(fleet.turns)] if recovery is not None and fleet.turns.records() else []
        self._error: BaseException | None = None
        self._last_progress = time.monotonic()
        self._waiting: Activity | None = None
        """Set while a step waits for groups."""
        self._longest_s = 0.0
        """Longest episode so far, in seconds."""
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._background: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Rollout:
        self._background = start_background(self._keep_slots_filled(), "the rollout")
        self._log.start().add_done_callback(self._note_log_failure)
        self._note({"event": "opened", "again": self._again, **self._rules})
        self._fleet.turns.on_add = self._note_turn
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._background is not None
        self._fleet.turns.on_add = None
        self._background.cancel()
        await asyncio.gather(self._background, return_exceptions=True)
        self._end_dropped()
        self._is_closed = True
        await self._log.close()

    async def groups_for_step(
        self, report: Callable[[str], None] = lambda _: None
    ) -> AsyncIterator[list[FinishedGroup]]:
        """Yield the groups of the current step as they become ready, until the step is full.

        After the task source ends, the last step may get fewer groups or none: then the run `is_over`.
        Raises RunError if every episode fails, if no group can be trained, or if no episode ends for
        `monitor.stall_timeout_s`.
        """
        self._last_progress = time.monotonic()
        then = f"the run ends if no episode ends within {self._stall_timeout_s:g} s (monitor.stall_timeout_s)"
        waits = doing(
            "the rollout",
            "no turn and no episode ended",
            may_take_s=self._episode_timeout_s,
            then=then,
            about=self._describe_wait,
            learns=False,
        )
        with waits as self._waiting:
            while self.scheduler.groups_wanted() > 0:
                self._group_ready.clear()
                self.scheduler.now_s = time.monotonic()
                if groups := self.scheduler.take_ready():
                    self._changed.set()  # a full step cancels the groups that no later step may train
                    yield groups
                    self._last_progress = time.monotonic()
                    continue
                if self.is_over:
                    return
                report(f"{self.scheduler.groups_wanted()} groups to go, {len(self.scheduler.running)} episodes running")
                await self._wait_for_group()

    async def version_advanced(
        self, version: int, micro_batches: MicroBatches = (), metrics: Mapping[str, float] | None = None
    ) -> asyncio.Future[None]:
        """Record that the learner finished a step, from these micro-batches and with these metrics; cancel and drop the
        groups that are now too old. Return what is set when the disk has it."""
        self._note_step(version, micro_batches, metrics or {})
        written = self.written()
        self.scheduler.now_s = time.monotonic()
        self.scheduler.version_advanced(version)
        if steps := self.scheduler.progress.steps_without_signal:
            in_a_row = f" ({steps} steps in a row)" if steps > 1 else ""
            self._notices.append(f"nothing was learned: no group had replicas with different rewards{in_a_row}")
        self._end_dropped()  # before the fleet forgets their turns
        await self._fleet.cancel(self.scheduler.take_cancelled())
        self._changed.set()
        return written

    def published(self, version: int) -> None:
        """Record that all servers have `version`."""
        self.scheduler.published(version)
        self._changed.set()

    @property
    def is_over(self) -> bool:
        """True if the task source has ended and nothing is left for another step to train."""
        scheduler = self.scheduler
        if not self._tasks_ended or scheduler.running or scheduler.ready or scheduler.requeued:
            return False
        # While servers lag behind the learner, queued groups may still start with the next weights.
        return not scheduler.queued or (
            scheduler.server_version >= scheduler.learner_version and not scheduler.startable
        )

    def take_notices(self) -> list[str]:
        """Return the messages for the user since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON, for `Recovery`. What is decided from now on is journaled as after it:
        after its `mark`, since an earlier try of a checkpoint of this step may have begun the same file."""
        self._end_dropped()  # a file of the journal tells only of groups that are open when it begins, or come later
        mark = secrets.token_hex(8)
        self._log.begin_journal(self.scheduler.learner_version, self._fleet.turns.records())
        groups = self.scheduler.unfinished_groups()
        ended = {group.group_id: [each.episode_id for each in group.trajectories] for group in groups}
        self._note(state_event(mark, ended))
        self._note({"event": "opened", "again": [], **self._rules})
        return {
            "mark": mark,
            "version": self.scheduler.learner_version,
            "tasks": self._tasks.state(),
            "next_group": self.scheduler.next_group,
            "groups": [[group.number, group.task.to_dict(), group.requeues, ended[group.group_id]] for group in groups],
            "requeued": [[task.to_dict(), requeues] for task, requeues in self.scheduler.requeued],
            "async_ratio": self._controller.state() if self._controller else None,
        }

    def written(self) -> asyncio.Future[None]:
        """Return what is set when the disk has all episodes that ended before."""
        return self._log.written()

    def metrics(self) -> dict[str, float]:
        """Return the async ratio, the selection bias so far, and the metrics of the task source."""
        bias = {f"bias/{name}": value for name, value in self.scheduler.bias.metrics().items()}
        tasks = {f"tasks/{name}": value for name, value in self._tasks.metrics().items()}
        turns = self._fleet.turns
        moved = {"moved_episodes": turns.moved_episodes, "moved_turns": turns.moved_turns}
        return {"async_ratio": float(self.scheduler.rule.async_ratio), **bias, **tasks, **moved}

    def adapt(self, metrics: Mapping[str, float]) -> Decision | None:
        """Let `async_ratio: auto` decide, after each step and from its metrics. None if the ratio is fixed."""
        if self._controller is None:
            return None
        decision = self._controller.update(
            StepMeasurement(
                learner_idle=metrics[LEARNER_IDLE],
                server_idle=metrics[SERVERS_IDLE],
                # a step whose groups had no signal has no importance weights, so its staleness does no harm
                effective_sample_size=metrics.get("effective_sample_size", 1.0),
            )
        )
        if decision.changed:
            self.scheduler.set_async_ratio(decision.async_ratio)
            self._changed.set()
        self._note({"event": "async_ratio", "state": self._controller.state()})
        return decision

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the caller that waits for groups: a component that episodes depend on is broken."""
        self._error = self._error or error
        self._group_ready.set()

    def idle_s(self) -> float:
        """Return the total time in seconds without a running episode."""
        return self._idle_s + (time.monotonic() - self._idle_since if self._idle_since is not None else 0.0)

    def books(self) -> dict[str, int]:
        """Count every trajectory and episode by its result: `produced == trained + dropped_* + waiting`."""
        scheduler = self.scheduler
        failures = {f"failed_{cause}": count for cause, count in sorted(scheduler.failures.items())}
        waiting, cancelled = scheduler.waiting_trajectories(), scheduler.cancelled_episodes
        counts = {f"groups_{name}": count for name, count in scheduler.counts().items()}
        return {**scheduler.trajectories, "waiting": waiting, "cancelled": cancelled, **failures, **counts}

    def _restore(self, recovery: Recovery, trajectories: Mapping[str, FinishedEpisode]) -> None:
        recovery.restore_source(self._tasks)
        if self._controller is not None and recovery.async_ratio is not None:
            self._controller.restore(recovery.async_ratio)
            self.scheduler.set_async_ratio(self._controller.async_ratio)
        self.scheduler.requeued.extend(recovery.requeued)
        begun_at = self._keep_turns(recovery)
        for group in sorted(recovery.groups.values(), key=lambda group: group.number):
            names = [] if self._is_batch else [name for name in group.episodes if name in trajectories]
            self._again += [name for name in group.episodes if name not in names]
            found = [trajectories[name] for name in names]
            for each in found:
                self._put(each)
            self.scheduler.restore_group(
                group.number, group.task, group.requeues, found, begun_at=begun_at.get(group.group_id)
            )
        self.scheduler.next_group = recovery.next_group
        for group_id in self.scheduler.take_completed():
            self._stream.complete(group_id)

    def _keep_turns(self, recovery: Recovery) -> dict[str, int]:
        """Keep the turns of episodes that can still be trained; return the oldest version of each of their groups."""
        allowed = recovery.version - self.scheduler.rule.max_staleness
        begun_at: dict[str, int] = {}
        kept = []
        for name, (oldest, newest) in self._fleet.turns.versions().items():
            group = recovery.groups.get(name.rpartition("-r")[0])
            if self._is_batch or group is None or name in group.episodes:
                continue
            if allowed <= oldest and newest <= recovery.version:
                kept.append(name)
                begun_at[group.group_id] = min(oldest, begun_at.get(group.group_id, oldest))
        self._fleet.turns.keep_only(kept)
        return begun_at

    def _put(self, outcome: FinishedEpisode) -> None:
        columns = {} if self._has_stages else {REWARD: outcome.reward}
        self._stream.put(outcome.episode_id, outcome.group_id, outcome, columns)

    def _note_turn(self, turn: SentTurn) -> None:
        if turn.episode_id in self.scheduler.running:  # not of an evaluation
            if self._waiting is not None:
                self._waiting.begin()
            self._log.note_turn(turn.record)

    def _note(self, event: Event) -> None:
        if self._has_journal:
            self._log.note(event)

    def _note_admitted(self, group: OpenGroup, *, drawn: bool) -> None:
        task = group.task.to_dict()
        self._note(
            {"event": "admitted", "number": group.number, "task": task, "requeues": group.requeues, "drawn": drawn}
        )

    def _note_step(self, version: int, micro_batches: MicroBatches, metrics: Mapping[str, float]) -> None:
        batches = [
            [[group.group_id, [[each.episode_id, each.reward] for each in group.trajectories]] for group in groups]
            for groups in micro_batches
        ]
        given = {group.group_id for groups in micro_batches for group in groups}
        lost = [name for name in self.scheduler.step_group_ids if name not in given]
        event = {"event": "trained", "version": version, "batches": batches, "without_rows": lost}
        event["lost"] = self._stream.take_lost()
        if teacher := encode_teacher(micro_batches):
            event["teacher"] = teacher
        self._note({**event, "async_ratio": self.scheduler.rule.async_ratio, "metrics": dict(metrics)})

    async def _keep_slots_filled(self) -> None:
        try:
            while True:
                self._changed.clear()
                self.scheduler.now_s = time.monotonic()
                self._end_dropped()  # before a dropped task is admitted again: the journal has it in this order
                if cancelled := self.scheduler.take_cancelled():
                    await self._fleet.cancel(cancelled)
                self._admit()
                free = self._max_concurrent - len(self.scheduler.running)
                if episodes := self.scheduler.next_episodes(free):
                    await self._fleet.submit(episodes, self._receive)
                self._note_idleness()
                if self._tasks_ended:
                    self._group_ready.set()  # the caller that waits for a group checks if the run is over
                await self._changed.wait()
        except Exception as error:
            self.fail(error)
            raise

    def _note_progress(self, outcome: FinishedEpisode | EpisodeFailure) -> None:
        self._last_progress = self.scheduler.now_s = time.monotonic()
        if self._waiting is not None:
            if isinstance(outcome, FinishedEpisode):
                self._longest_s = max(self._longest_s, outcome.finished_s - outcome.started_s)
            if self._longest_s:
                self._waiting.moved(self._longest_s)  # as seldom as slow episodes may be, they are usual
            else:
                self._waiting.begin()

    def _describe_wait(self) -> str:
        if (oldest := self.scheduler.oldest_running()) is None:
            return "no episode is running"
        name, started_s = oldest
        since_s = time.monotonic() - started_s
        return f"waiting for {len(self.scheduler.running)} episodes, the oldest ({name}) since {since_s:.0f} s"

    def _note_log_failure(self, log: asyncio.Task[None]) -> None:
        if (error := error_of(log)) is not None:
            self.fail(error)

    def _note_idleness(self) -> None:
        if not self.scheduler.running:
            self._idle_since = self._idle_since or time.monotonic()
        elif self._idle_since is not None:
            self._idle_s, self._idle_since = self.idle_s(), None

    def _end_dropped(self) -> None:
        for group in self.scheduler.take_dropped():
            turns = [len(self._fleet.turns.of(name)) for name in group.stopped_s]
            record = asdict(group) | {"task": group.task.task_id, "stopped_turns": turns}
            record["stopped_s"] = list(group.stopped_s.values())
            self._files.write_dropped(self.scheduler.learner_version, record)
            self._stream.drop_group(group.group_id, group.reason)
            self._note({"event": "dropped", "group": group.group_id, "reason": group.reason})

    def _admit(self) -> None:
        while self.scheduler.room():
            if (again := self.scheduler.admit_requeued()) is not None:
                self._note_admitted(again, drawn=False)
            elif not self._admit_next():
                return

    def _admit_next(self) -> bool:
        """Admit the next task of the source; return False if the source has ended."""
        if self._tasks_ended:
            return False
        try:
            task = self._tasks.next()
        except StopIteration:
            self._tasks_ended = True
            count = self.scheduler.admitted
            self._notices.append(f"the task source has ended after {count} groups: what is there is trained")
            return False
        self._note_admitted(self.scheduler.admit(task), drawn=True)
        return True

    def _receive(self, outcome: FinishedEpisode | EpisodeFailure) -> None:
        if self._is_closed:  # it is played again after a resume, as all that were running
            return
        self._log.add(self.scheduler.learner_version, outcome)
        self._note_progress(outcome)
        if isinstance(outcome, EpisodeFailure):
            self._count_failure(outcome)
            self._last_causes[outcome.cause] += 1
            self._last_message = outcome.message
        else:
            self._failures_in_a_row = 0
            self._last_causes.clear()
            score = min(1.0, max(0.0, outcome.reward if outcome.success is None else outcome.success))
            self._tasks.report(outcome.task, score)
        is_kept = self.scheduler.finished(outcome)
        if isinstance(outcome, FinishedEpisode):
            if is_kept:
                self._put(outcome)
            ended = {"event": "ended", "episode": outcome.episode_id, "group": outcome.group_id, "kept": is_kept}
            self._note({**ended, "score": score, "task": None if is_kept else outcome.task.to_dict()})
        for group_id in self.scheduler.take_completed():
            self._stream.complete(group_id)
        self._changed.set()
        self._group_ready.set()

    def _count_failure(self, failure: EpisodeFailure) -> None:
        """Count it, unless it ran when another one failed: what ends all running episodes at once, such as an engine of
        sandboxes that is restarted, is one failure."""
        if not self._failures_in_a_row:
            self._first_failure_s = self.scheduler.now_s
        began_s = self.scheduler.began_s(failure.episode_id)
        if not self._failures_in_a_row or began_s is None or began_s >= self._first_failure_s:
            self._failures_in_a_row += 1

    async def _wait_for_group(self) -> None:
        left_s = self._stall_timeout_s - (time.monotonic() - self._last_progress)
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self._group_ready.wait()
        except TimeoutError:
            if time.monotonic() - self._last_progress >= self._stall_timeout_s:
                raise RunError(await self._describe_stall()) from None
        if self._error is not None:
            raise self._error
        if (problem := self.scheduler.progress.problem) is not None:
            raise RunError(problem)
        if self._failures_in_a_row >= self._max_failures_in_a_row:
            causes = ", ".join(f"{cause} {count}" for cause, count in self._last_causes.most_common())
            raise RunError(
                f"the last {self._failures_in_a_row} episodes all failed ({causes}); the newest: {self._last_message}"
            )

    async def _describe_stall(self) -> str:
        stuck = sorted(await self._fleet.status(), key=lambda s: -s.waited_s)[:3]
        names = "; ".join(
            f"{s.episode_id} turn {s.turn} waits for {s.waits_for} since {s.waited_s:.0f} s" for s in stuck
        )
        return (
            f"no episode ended for {self._stall_timeout_s:g} s (monitor.stall_timeout_s); {names or 'none is running'}"
        )


def training_sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens, stop=tuple(rollout.stop)
    )
