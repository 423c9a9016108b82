"""Queue scheduling with prompt replication, as a state machine: no asyncio, no clock, no I/O.

Every replica of every task is an episode of its own in one queue, and a free slot takes the next. Groups complete in
any order. The owner feeds in what happened (`admit`, `started`, `finished`, `version_advanced`, ...) and asks what to
do (`room`, `next_episodes`, `take_ready`).

Invariants, checked by the property tests:
- every admitted group leaves exactly once: taken by the learner or dropped with a reason;
- every started episode ends exactly once: with a trajectory, with a failure, or cancelled;
- `admitted == taken + dropped + waiting`, and a group holds replicas of its own task only;
- no group is handed out that holds a token older than the staleness rule allows.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Literal

from roll_flash.rollout.staleness import StalenessRule
from roll_flash.types import EpisodeFailure, EpisodeSpec, Group, SamplingParams, Task, Trajectory

DropReason = Literal["stale", "too_few_trajectories"]

SMALLEST_GROUP = 2
"""An advantage compares replicas: a group of one says nothing."""


@dataclass(slots=True)
class _OpenGroup:
    """A group on its way: what it still waits for and what it has."""

    group_id: str
    task: Task
    waiting_for: int
    start_version: int | None = None
    """The version at which its first episode was started: no token of it is older."""
    trajectories: list[Trajectory] = field(default_factory=list)
    failures: list[EpisodeFailure] = field(default_factory=list)

    def closed(self) -> Group:
        return Group(self.group_id, self.task, tuple(self.trajectories), tuple(self.failures))


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    group_id: str
    task: Task
    reason: DropReason
    episodes_lost: int
    """Finished trajectories that went with it."""


class Scheduler:
    """Decides which episode starts next, which are cancelled, and which groups the learner may have.

    `on_stale`: `evict` drops what can no longer be trained in time; `requeue` drops it and puts its task back in front;
    `wait` lets no step finish without it.
    """

    def __init__(
        self,
        rule: StalenessRule,
        *,
        group_size: int,
        max_turns: int,
        sampling: SamplingParams,
        retries: int = 0,
        on_stale: Literal["evict", "requeue", "wait"] = "evict",
        version: int = 0,
        first_group: int = 0,
    ) -> None:
        self._rule = rule
        self._group_size = group_size
        self._max_turns = max_turns
        self._sampling = sampling
        self._retries = retries
        self._on_stale = on_stale
        self._next_group = first_group
        self._open: dict[str, _OpenGroup] = {}
        self._queue: deque[EpisodeSpec] = deque()
        self._running: dict[str, EpisodeSpec] = {}
        self._ready: deque[Group] = deque()
        self._in_step: list[Group] = []
        self.learner_version = version
        self.server_version = version
        self.requeued_tasks: deque[Task] = deque()
        """Tasks that want to be admitted again, oldest first."""
        self.dropped_groups: Counter[str] = Counter()
        self.trajectories: Counter[str] = Counter()
        """`produced` == `trained` + `dropped_stale` + `dropped_too_few_trajectories` + `waiting_trajectories()`."""
        self.failures: Counter[str] = Counter()
        self.admitted = 0
        self.trained_groups = 0

    # What the owner asks

    def room(self) -> int:
        """How many tasks may be admitted now."""
        held = len(self._open) + len(self._ready) + len(self._in_step)
        return max(0, self._rule.capacity(self.server_version, self.learner_version) - held)

    def next_episodes(self, free_slots: int) -> list[EpisodeSpec]:
        """The episodes to start now, at most `free_slots`, first come first served. They count as started."""
        count = min(free_slots, len(self._queue))
        starting = [self._queue.popleft() for _ in range(count)]
        for episode in starting:
            self._running[episode.episode_id] = episode
            group = self._open[episode.group_id]
            if group.start_version is None:
                group.start_version = self.server_version
        return starting

    def groups_wanted(self) -> int:
        """Groups that the step in progress still needs; 0 when it may finish.

        With `on_stale="wait"` also those that would go stale if it finished without them.
        """
        return max(self._rule.groups_per_step - len(self._in_step), len(self._urgent()))

    def take_ready(self) -> list[Group]:
        """Complete, fresh groups for the step in progress, the oldest versions first; at most what it needs."""
        urgent = self._urgent()
        places = self._rule.groups_per_step - len(self._in_step) - len(urgent)
        taken = []
        for group in sorted(self._ready, key=lambda g: g.oldest_version):
            if group.group_id in urgent:
                taken.append(group)
            elif places > 0:
                places -= 1
                taken.append(group)
        gone = {group.group_id for group in taken}
        self._ready = deque(group for group in self._ready if group.group_id not in gone)
        self._in_step.extend(taken)
        return taken

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def ready(self) -> int:
        return len(self._ready)

    def waiting_trajectories(self) -> int:
        """Trajectories that were produced and neither trained nor dropped yet."""
        return sum(len(group.trajectories) for group in (*self._in_step, *self._ready, *self._open.values()))

    def unfinished_tasks(self) -> list[Task]:
        """Tasks whose groups no finished step has seen, oldest first: what a checkpoint must bring back."""
        waiting = [*self._in_step, *self._ready, *self._open.values()]
        return [*self.requeued_tasks, *(group.task for group in sorted(waiting, key=lambda g: g.group_id))]

    # What the owner reports

    def admit(self, task: Task) -> None:
        """Take in a task and queue its replicas."""
        group_id = f"g{self._next_group:08d}"
        self._next_group += 1
        self.admitted += 1
        self._open[group_id] = _OpenGroup(group_id, task, waiting_for=self._group_size)
        self._queue.extend(
            EpisodeSpec(
                episode_id=f"{group_id}-r{replica}",
                group_id=group_id,
                replica=replica,
                task=task,
                sampling=self._sampling,
                max_turns=self._max_turns,
            )
            for replica in range(self._group_size)
        )

    def finished(self, outcome: Trajectory | EpisodeFailure) -> list[DroppedGroup]:
        """An episode ended by itself. Unknown ones (cancelled meanwhile) are ignored: they are already counted."""
        episode = self._running.pop(outcome.episode_id, None)
        if episode is None:
            return []
        group = self._open[episode.group_id]
        if isinstance(outcome, EpisodeFailure):
            self.failures[outcome.cause] += 1
            if episode.attempt < self._retries:
                self._queue.appendleft(replace(episode, attempt=episode.attempt + 1))
                return []
            group.failures.append(outcome)
        else:
            self.trajectories["produced"] += 1
            group.trajectories.append(outcome)
        group.waiting_for -= 1
        return self._complete(group) if group.waiting_for == 0 else []

    def published(self, version: int) -> None:
        """All servers sample with `version` from now on."""
        self.server_version = version

    def version_advanced(self, version: int) -> tuple[list[str], list[DroppedGroup]]:
        """A step finished. Returns the running episodes to cancel and the groups that are dropped as stale."""
        self.learner_version = version
        self.trained_groups += len(self._in_step)
        self.trajectories["trained"] += sum(len(group.trajectories) for group in self._in_step)
        self._in_step.clear()
        return self._drop_stale()

    # How

    def _complete(self, group: _OpenGroup) -> list[DroppedGroup]:
        del self._open[group.group_id]
        if len(group.trajectories) < SMALLEST_GROUP:
            return [self._drop(group.closed(), "too_few_trajectories")]
        closed = group.closed()
        if not self._rule.is_fresh(closed.oldest_version, self.learner_version):
            return [self._drop(closed, "stale")]
        self._ready.append(closed)
        return []

    def _urgent(self) -> set[str]:
        """Groups that this step must take because the next may not, where the policy is to wait for them."""
        if self._on_stale != "wait":
            return set()
        after = self.learner_version + 1
        waiting = {g.group_id for g in self._open.values() if self._is_stale_at(g.start_version, after)}
        return waiting | {g.group_id for g in self._ready if not self._rule.is_fresh(g.oldest_version, after)}

    def _is_stale_at(self, start_version: int | None, learner_version: int) -> bool:
        return start_version is not None and not self._rule.is_fresh(start_version, learner_version)

    def _drop_stale(self) -> tuple[list[str], list[DroppedGroup]]:
        """Drop what the rule forbids: ready groups by their tokens, open ones by the version they began with."""
        stale_open = [g for g in self._open.values() if self._is_stale_at(g.start_version, self.learner_version)]
        gone = {group.group_id for group in stale_open}
        cancelled = [key for key, episode in self._running.items() if episode.group_id in gone]
        for key in cancelled:
            del self._running[key]
        self._queue = deque(episode for episode in self._queue if episode.group_id not in gone)
        for group in stale_open:
            del self._open[group.group_id]
        stale_ready = [g for g in self._ready if not self._rule.is_fresh(g.oldest_version, self.learner_version)]
        self._ready = deque(g for g in self._ready if self._rule.is_fresh(g.oldest_version, self.learner_version))
        dropped = [self._drop(group, "stale") for group in (*(g.closed() for g in stale_open), *stale_ready)]
        return cancelled, dropped

    def _drop(self, group: Group, reason: DropReason) -> DroppedGroup:
        self.dropped_groups[reason] += 1
        self.trajectories[f"dropped_{reason}"] += len(group.trajectories)
        if reason == "stale" and self._on_stale == "requeue":
            self.requeued_tasks.append(group.task)
        return DroppedGroup(group.group_id, group.task, reason, len(group.trajectories))
