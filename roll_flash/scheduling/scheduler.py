"""Queue scheduling with prompt replication, as a state machine: no asyncio, no clock, no I/O.

Every replica of every task is a separate episode in one queue; a free slot takes the next episode. Groups complete in
any order. The caller reports events (`admit`, `finished`, `published`, `version_advanced`) and asks for decisions
(`room`, `next_episodes`, `take_ready`, `take_cancelled`, `take_dropped`). `SchedulerConfig` has the options.
The time is an input too (`now_s`). If no group can be trained for too long, `progress.problem` is set.

Invariants, checked by the property tests:
- every admitted group leaves exactly once: taken by the learner or dropped with a reason;
- every started episode ends exactly once: with a trajectory, with a failure, or cancelled;
- `admitted == taken + dropped + waiting`, and a group holds only replicas of its own task;
- no group with a token older than the staleness rule allows goes to the learner;
- no group starts that the rule could not train in time, and nothing else keeps a slot idle while work is queued;
- a step takes `groups_per_step` groups under every policy.

The time of each event grows with its group, not with the number of running or waiting groups.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from roll_flash.config.sections.scheduler import SchedulerConfig
from roll_flash.scheduling.group_queues import (
    Batches,
    DeadlineBuckets,
    DroppedGroup,
    DropReason,
    OpenGroup,
    SubmissionOrder,
    group_id_of,
)
from roll_flash.scheduling.progress import ProgressMonitor
from roll_flash.scheduling.selection_bias import SelectionBias
from roll_flash.scheduling.staleness import StalenessRule
from roll_flash.types import (
    MIN_GROUP_SIZE,
    EpisodeFailure,
    EpisodeSpec,
    FinishedEpisode,
    FinishedGroup,
    SamplingParams,
    Task,
)

MAX_FILTERED_STEPS = 4
"""Groups without signal that one step may drop, in steps' worth of groups; later ones pass, so that a step ends."""


class Scheduler:
    """Decides which episode starts next, which episodes are cancelled, and which groups the learner gets."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_turns: int,
        sampling: SamplingParams,
        retries: int = 0,
        version: int = 0,
        longest_episode_s: float = math.inf,
    ) -> None:
        """`retries`: most retries of a failed episode."""
        self.rule = StalenessRule(config.first_async_ratio, config.groups_per_step, config.extra_groups)
        self._config = config
        self._retries = retries
        self._max_turns = max_turns
        self._sampling = sampling
        self.next_group = 0
        """Number of the next group to admit. A resumed run, which must not use a number twice, sets it after all groups
        of the earlier run are restored."""
        self._groups: dict[str, OpenGroup] = {}
        """Groups admitted and not yet taken or dropped."""
        self.running: dict[str, OpenGroup] = {}
        """Group of each running episode, by the episode's id, in the order of their starts."""
        self._queue: deque[EpisodeSpec] = deque()
        """Episodes to start; a cancelled one stays in the queue until it reaches the front."""
        self.queued = 0
        self._begun = DeadlineBuckets()
        """Groups that have started and are not ready for the learner."""
        self._ready: DeadlineBuckets = SubmissionOrder() if config.in_order else DeadlineBuckets()
        self._batches = Batches() if config.mode == "batch" else None
        self._in_step: list[tuple[OpenGroup, FinishedGroup]] = []
        self._filtered_in_step = 0
        self._cancelled: list[str] = []
        self._dropped: list[DroppedGroup] = []
        self._completed: list[str] = []
        self.learner_version = version
        self.server_version = version
        self.now_s = 0.0
        """Time in seconds; the caller sets it before each other call."""
        self.requeued: deque[tuple[Task, int]] = deque()
        """Tasks to admit again with the number of their requeues, oldest first."""
        self._num_requeued = self._num_given_up = 0
        self.progress = ProgressMonitor(config)
        self.bias = SelectionBias(longest_s=longest_episode_s)
        self.dropped_groups: Counter[str] = Counter()
        self.trajectories: Counter[str] = Counter()
        """`produced` == `trained` + every `dropped_*` + `waiting_trajectories()`."""
        self.failures: Counter[str] = Counter()
        self.cancelled_episodes = 0
        self.admitted = 0
        self.trained_groups = 0

    # Queries of the caller

    def room(self) -> int:
        """Number of tasks that may be admitted now."""
        held = len(self._groups) + len(self._in_step)
        return max(0, self.rule.capacity(self.server_version, self.learner_version) - held)

    def next_episodes(self, free_slots: int) -> list[EpisodeSpec]:
        """Return the episodes to start now, at most `free_slots`, in queue order. They count as started.

        With `replicate=False` the replicas of a group are consecutive and must run on one server.
        """
        starting: list[EpisodeSpec] = []
        while len(starting) < free_slots and (episode := self._front()) is not None:
            group = self._groups[episode.group_id]
            if not group.has_begun and not self._may_begin(group, free_slots - len(starting)):
                break
            starting.append(self._start(group, episode))
        return starting

    def groups_wanted(self) -> int:
        """Number of groups that the current step still needs; 0 if the step is full.

        With `on_stale="wait"` the step keeps places for groups that would go stale without it.
        """
        return self.rule.groups_per_step - len(self._in_step)

    def take_ready(self) -> list[FinishedGroup]:
        """Take complete, fresh groups for the current step, oldest versions first; at most `groups_wanted()`.

        When the step is full, groups that no later step can train are dropped and cancelled immediately.
        """
        taken = []
        while (group := self._ready.first()) is not None and self._has_place_for(group):
            taken.append(self._hand_out(group))
        if self.groups_wanted() == 0:
            waits = self._config.on_stale == "wait"
            self._drop_all(self._stale_after(self.learner_version), "surplus" if waits else "stale")
            if self._config.surplus == "cancel":
                self._drop_all(self._surplus_groups(), "surplus")
        return taken

    def take_cancelled(self) -> list[str]:
        """Return the ids of running episodes to cancel, each once."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def take_dropped(self) -> list[DroppedGroup]:
        """Return the groups dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_completed(self) -> list[str]:
        """Return the ids of groups that became complete since the last call: they wait for no further replica."""
        completed, self._completed = self._completed, []
        return completed

    def oldest_running(self) -> tuple[str, float] | None:
        """Return the episode that was started first, with that time in seconds; None if none is running."""
        for episode_id, group in self.running.items():
            return episode_id, group.started_s[episode_id]
        return None

    def began_s(self, episode_id: str) -> float | None:
        """Return when a running episode was started; None if it is not running."""
        group = self.running.get(episode_id)
        return None if group is None else group.started_s[episode_id]

    @property
    def startable(self) -> int:
        """Number of queued episodes of the front group that only need a free slot; 0 if it must wait for a version."""
        front = self._front()
        if front is None:
            return 0
        group = self._groups[front.group_id]
        may_start = group.has_begun or self._may_begin(group, self._config.replicas)
        return len(group.queued) if may_start else 0

    @property
    def ready(self) -> int:
        return len(self._ready)

    def waiting_trajectories(self) -> int:
        """Number of trajectories produced and not yet trained or dropped."""
        waiting = sum(len(group.trajectories) for group in self._groups.values())
        return waiting + sum(len(group.trajectories) for _, group in self._in_step)

    def unfinished_groups(self) -> list[OpenGroup]:
        """Return the groups that no finished step has trained, oldest first: a checkpoint saves them."""
        waiting = [*(group for group, _ in self._in_step), *self._groups.values()]
        return sorted(waiting, key=lambda group: group.number)

    @property
    def step_group_ids(self) -> list[str]:
        """Ids of the groups that the current step has taken so far."""
        return [group.group_id for group, _ in self._in_step]

    def counts(self) -> dict[str, int]:
        """Count groups whose task was requeued or given up, and groups without signal that had to be trained."""
        return {
            "requeued": self._num_requeued,
            "given_up": self._num_given_up,
            "unfiltered": self.progress.unfiltered_groups,
        }

    # Events that the caller reports

    def restore_group(
        self,
        number: int,
        task: Task,
        requeues: int,
        trajectories: Sequence[FinishedEpisode] = (),
        *,
        begun_at: int | None = None,
    ) -> OpenGroup:
        """Add a group of an earlier run with the trajectories that it has; queue its other replicas. `begun_at`: oldest
        version of those that go on after a finished turn. Groups come in the order of their numbers, before any is
        admitted. One that is too old by now is dropped. With `mode="batch"` it begins again: give no trajectories."""
        self.next_group = number
        group = self._add_group(task, requeues)
        group.trajectories.extend(trajectories)
        highest = max((int(each.episode_id.rpartition("-r")[2]) for each in trajectories), default=-1)
        group.refills = max(0, highest + 1 - self._config.replicas)  # no id comes twice
        self.trajectories["produced"] += len(trajectories)
        ended = {trajectory.episode_id for trajectory in trajectories}
        for episode in (self._episode(group, replica) for replica in range(self._config.replicas)):
            if episode.episode_id not in ended:
                self._enqueue(group, episode)
        versions = [each.oldest_version for each in trajectories] + ([] if begun_at is None else [begun_at])
        if versions:
            group.max_staleness = self.rule.max_staleness
            group.last_step = last_step = self.rule.last_step(min(versions))
            self._begun.add(group)
            if last_step < self.learner_version:
                self._drop(group, "stale")
            elif len(trajectories) >= self._config.group_size or not group.is_waiting:
                self._complete(group)
        return group

    def admit_requeued(self) -> OpenGroup | None:
        """Admit the oldest requeued task and return its group; None if no task is requeued."""
        if not self.requeued:
            return None
        task, requeues = self.requeued.popleft()
        return self.admit(task, requeues=requeues)

    def admit(self, task: Task, *, requeues: int = 0) -> OpenGroup:
        """Add a task as a new group and queue its replicas."""
        group = self._add_group(task, requeues)
        for replica in range(self._config.replicas):
            self._enqueue(group, self._episode(group, replica))
        return group

    def _add_group(self, task: Task, requeues: int) -> OpenGroup:
        group = OpenGroup(self.next_group, group_id_of(self.next_group), task, requeues=requeues)
        self.next_group += 1
        self.admitted += 1
        self._groups[group.group_id] = group
        if isinstance(self._ready, SubmissionOrder):
            self._ready.mark_admitted(group.number)
        return group

    def finished(self, outcome: FinishedEpisode | EpisodeFailure) -> bool:
        """Record the end of an episode; return True if a trajectory became part of its group.

        Unknown episodes (already cancelled and counted) are ignored.
        """
        group = self.running.pop(outcome.episode_id, None)
        if group is None:
            return False
        is_kept = False
        episode = group.running.pop(outcome.episode_id)
        if isinstance(outcome, EpisodeFailure):
            self.failures[outcome.cause] += 1
            self._take_failure(group, episode, outcome)
        else:
            del group.started_s[outcome.episode_id]
            self.trajectories["produced"] += 1
            is_kept = self._take_trajectory(group, outcome)
        if not group.is_complete and (len(group.trajectories) >= self._config.group_size or not group.is_waiting):
            self._complete(group)
        return is_kept

    def published(self, version: int) -> None:
        """Record that all servers now sample with `version`."""
        self.server_version = version

    def version_advanced(self, version: int) -> None:
        """Record the end of a step: count its trained groups and drop the groups that are now too old."""
        self.learner_version = version
        self.progress.step_finished()
        self._filtered_in_step = 0
        self.trained_groups += len(self._in_step)
        self.trajectories["trained"] += sum(len(group.trajectories) for _, group in self._in_step)
        for group, _ in self._in_step:
            self.bias.trained(group)
        self._in_step.clear()
        self._drop_all(self._stale_after(version - 1), "stale")

    def set_async_ratio(self, async_ratio: float) -> None:
        """Change the async ratio. Started groups keep their old bound, so lowering it drops none of them."""
        self.rule = replace(self.rule, async_ratio=async_ratio)
        if self._batches is not None:
            self._shrink_batch(self._batches)

    # Starting

    def _episode(self, group: OpenGroup, replica: int) -> EpisodeSpec:
        episode_id = f"{group.group_id}-r{replica}"
        max_turns = group.task.max_turns or self._max_turns
        return EpisodeSpec(episode_id, group.group_id, replica, group.task, self._sampling, max_turns)

    def _enqueue(self, group: OpenGroup, episode: EpisodeSpec, *, first: bool = False) -> None:
        group.queued[episode.episode_id] = episode
        self.queued += 1
        if first:
            self._queue.appendleft(episode)
        else:
            self._queue.append(episode)

    def _front(self) -> EpisodeSpec | None:
        while self._queue:
            group = self._groups.get(self._queue[0].group_id)
            if group is not None and self._queue[0].episode_id in group.queued:
                return self._queue[0]
            self._queue.popleft()
        return None

    def _may_begin(self, group: OpenGroup, free_slots: int) -> bool:
        if not self._config.replicate and len(group.queued) > free_slots:
            return False
        places = self._places()
        return places > 0 and (self._batches is None or self._is_in_batch(self._batches, group, places))

    def _places(self) -> int:
        """Number of groups that may start now; can be negative after alpha was lowered."""
        is_full = self.groups_wanted() == 0
        held = len(self._begun) + len(self._ready) + (0 if is_full else len(self._in_step))
        return self.rule.startable(self.server_version, self.learner_version + is_full) - held

    def _shrink_batch(self, batches: Batches) -> None:
        """Move groups that lost their place to a later batch: a batch must not wait for a group that cannot start."""
        not_begun = [g for g in self._groups.values() if not g.has_begun and batches.contains(g)]
        for group in not_begun[max(0, self._places()) :]:
            self._end_in_batch(group)

    def _is_in_batch(self, batches: Batches, group: OpenGroup, places: int) -> bool:
        if batches.is_done:
            size = min(places, self.rule.groups_per_step + self.rule.extra_groups)
            not_begun = [g.group_id for g in self._groups.values() if not g.has_begun]
            batches.start(not_begun[:size])
        return batches.contains(group)

    def _start(self, group: OpenGroup, episode: EpisodeSpec) -> EpisodeSpec:
        self._queue.popleft()
        del group.queued[episode.episode_id]
        self.queued -= 1
        group.running[episode.episode_id] = episode
        group.started_s[episode.episode_id] = self.now_s
        self.running[episode.episode_id] = group
        if not group.has_begun:
            group.last_step = self.rule.last_step(self.server_version)
            group.max_staleness = self.rule.max_staleness
            self._begun.add(group)
        return episode

    # Ending

    def _take_trajectory(self, group: OpenGroup, trajectory: FinishedEpisode) -> bool:
        if group.is_complete:
            assert group.last_step is not None
            if trajectory.oldest_version + group.max_staleness < group.last_step:  # its group would go stale earlier
                self.trajectories["dropped_surplus"] += 1
                self.bias.trajectory_dropped(group.task, trajectory)
                return False
        group.trajectories.append(trajectory)
        return True

    def _take_failure(self, group: OpenGroup, episode: EpisodeSpec, failure: EpisodeFailure) -> None:
        lasted_s = self.now_s - group.started_s.pop(episode.episode_id)
        if not group.is_complete and episode.attempt < self._retries:
            self._enqueue(group, replace(episode, attempt=episode.attempt + 1), first=True)
            return
        group.failures.append(failure)
        group.unfinished_s.append(lasted_s)
        if group.is_complete:
            return
        if self._config.on_failure == "refill" and group.refills < self._config.group_size:
            self._enqueue(group, self._episode(group, self._config.replicas + group.refills), first=True)
            group.refills += 1

    def _complete(self, group: OpenGroup) -> None:
        """Complete a group that waits for no further replica: drop it, or make it ready for the learner."""
        group.is_complete = True
        self._cancel_surplus(group)
        if len(group.trajectories) < min(MIN_GROUP_SIZE, self._config.group_size):
            self.progress.group_lost([failure.cause for failure in group.failures])
            return self._drop(group, "too_few_trajectories")
        self._begun.remove(group)
        last_step = group.set_last_step_from_tokens()
        self._begun.add(group)
        if last_step < self.learner_version + (self.groups_wanted() == 0):
            self.progress.group_lost(["tokens too old when they came"])
            return self._drop(group, "stale")
        self.progress.group_completed()
        if self._is_refused(group):
            self._filtered_in_step += 1
            return self._drop(group, "no_signal")
        self._completed.append(group.group_id)
        if self._batches is None:
            return self._make_ready(group)
        self._batches.hold_back(group)
        self._end_in_batch(group)

    def _is_refused(self, group: OpenGroup) -> bool:
        if not self._config.drop_groups_without_signal:
            return False
        has_signal = group.to_group().has_signal
        if not has_signal and self._filtered_in_step < MAX_FILTERED_STEPS * self._config.groups_per_step:
            return True
        self.progress.group_passed(has_signal=has_signal)
        return False

    def _make_ready(self, group: OpenGroup) -> None:
        self._begun.remove(group)
        self._ready.add(group)

    def _end_in_batch(self, group: OpenGroup) -> None:
        assert self._batches is not None
        for held_back in self._batches.group_ended(group):
            self._make_ready(held_back)

    def _cancel_surplus(self, group: OpenGroup) -> None:
        """Remove queued surplus replicas, which have cost nothing; stop running ones if `surplus` is `cancel`."""
        self._unqueue(group)
        if self._config.surplus == "cancel":
            self._stop(group)

    # Handing out

    def _has_place_for(self, group: OpenGroup) -> bool:
        """True if this step may take `group`: `wait` keeps places for more urgent groups, in each later step too."""
        assert group.last_step is not None
        taken, size, first = len(self._in_step), self.rule.groups_per_step, self.learner_version
        if taken >= size or self._config.on_stale != "wait" or self._config.in_order:  # in_order: nothing overtakes
            return taken < size
        return all(
            taken + self._begun.due_by(step) + self._ready.due_by(step) < (step - first + 1) * size
            for step in range(first, group.last_step)
        )

    def _hand_out(self, group: OpenGroup) -> FinishedGroup:
        self._ready.remove(group)
        self._leave(group)
        closed = group.to_group()
        self._in_step.append((group, closed))
        return closed

    # Dropping

    def _stale_after(self, version: int) -> list[OpenGroup]:
        """Groups that no step after `version` may train: complete ones by oldest token, others by start version."""
        return [*self._begun.list_due_by(version), *self._ready.list_due_by(version)]

    def _surplus_groups(self) -> list[OpenGroup]:
        """Groups in excess of the places of later steps, oldest first; called when the step is full."""
        places = self.rule.max_staleness * self.rule.groups_per_step
        excess = len(self._begun) + len(self._ready) - places
        return list(self._begun)[: max(0, excess)]

    def _drop_all(self, groups: list[OpenGroup], reason: DropReason) -> None:
        for group in groups:
            self._drop(group, reason)

    def _drop(self, group: OpenGroup, reason: DropReason) -> None:
        if self._ready.holds(group):
            self._ready.remove(group)
        else:
            self._begun.remove(group)
        stopped_s = self._leave(group)
        self.dropped_groups[reason] += 1
        self.trajectories[f"dropped_{reason}"] += len(group.trajectories)
        self.bias.dropped(group)
        tokens = sum(trajectory.policy_tokens for trajectory in group.trajectories)
        self._dropped.append(DroppedGroup(group.group_id, group.task, reason, tokens, stopped_s))
        if reason == "stale" and self._config.on_stale == "requeue":
            self._requeue(group)
        if self._batches is not None:
            self._batches.remove(group)
            self._end_in_batch(group)

    def _requeue(self, group: OpenGroup) -> None:
        if group.requeues >= self._config.max_requeues:
            self._num_given_up += 1
        else:
            self._num_requeued += 1
            self.requeued.append((group.task, group.requeues + 1))

    def _leave(self, group: OpenGroup) -> dict[str, float]:
        """Remove a group that is taken or dropped, and stop its queued and running episodes. Return how long the
        running ones had lasted."""
        del self._groups[group.group_id]
        group.is_complete = True
        self._unqueue(group)
        stopped_s = self._stop(group)
        if isinstance(self._ready, SubmissionOrder):
            self._ready.mark_left(group.number)
        return stopped_s

    def _unqueue(self, group: OpenGroup) -> None:
        self.queued -= len(group.queued)
        group.queued.clear()

    def _stop(self, group: OpenGroup) -> dict[str, float]:
        lasted_s = {name: self.now_s - group.started_s.pop(name) for name in group.running}
        for episode_id in group.running:
            del self.running[episode_id]
            self._cancelled.append(episode_id)
        self.cancelled_episodes += len(lasted_s)
        group.unfinished_s += lasted_s.values()
        group.running.clear()
        return lasted_s
