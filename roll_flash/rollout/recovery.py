"""What a resumed run begins with: the state in its checkpoint, and the journal after it. No I/O."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from roll_flash.checked_files import Count
from roll_flash.run.journal import Event
from roll_flash.scheduling.group_queues import group_id_of
from roll_flash.scheduling.tasks import TaskSource
from roll_flash.types import FinishedGroup, Task

MicroBatches = Sequence[Sequence[FinishedGroup]]
TEACHER_TYPE = "<f4"


@dataclass(slots=True)
class RestoredGroup:
    """A group that was neither trained nor dropped. `episodes`: ids of its trajectories, in the order of their ends."""

    number: int
    task: Task
    requeues: int
    episodes: list[str] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        return group_id_of(self.number)


@dataclass(slots=True)
class RecordedStep:
    """A step that was trained after the checkpoint. Groups of a micro-batch: (id, task, [(episode id, reward)])."""

    version: int
    batches: list[list[tuple[str, Task, list[tuple[str, float]]]]]
    metrics: dict[str, float | None]
    teacher: dict[str, NDArray[np.float32]]
    """`FinishedEpisode.teacher_log_ratios` by episode id; empty without a teacher."""


class _State(msgspec.Struct):
    """`Rollout.state` in a checkpoint."""

    mark: str
    version: Count
    next_group: Count
    groups: list[tuple[Count, Task, Count, list[str]]]
    requeued: list[tuple[Task, Count]]
    tasks: dict[str, Any]
    async_ratio: Any


class _Admitted(msgspec.Struct):
    """Events of the journal, as `Recovery` reads them (`roll_flash/run/journal.py`)."""

    number: Count
    task: Task
    requeues: Count
    drawn: bool


class _Ended(msgspec.Struct):
    group: str
    episode: str
    kept: bool
    score: float
    task: Task | None


class _Dropped(msgspec.Struct):
    group: str
    reason: str


class _Trained(msgspec.Struct):
    version: Count
    batches: list[list[tuple[str, list[tuple[str, float]]]]]
    without_rows: list[str]
    metrics: dict[str, float | None]
    teacher: dict[str, bytes] = {}


def encode_teacher(micro_batches: MicroBatches) -> dict[str, str]:
    """Return what the teacher said of each episode of a step, for the journal: little-endian float32 in base64."""
    return {
        each.episode_id: b64encode(each.teacher_log_ratios.astype(TEACHER_TYPE).tobytes()).decode()
        for groups in micro_batches
        for group in groups
        for each in group.trajectories
        if each.teacher_log_ratios is not None
    }


@dataclass(slots=True)
class Recovery:
    """State of the rollout when the run stopped."""

    mark: str | None
    """Of the event in the journal that stands for the checkpoint; None: the whole journal counts."""
    version: int
    next_group: int
    groups: dict[str, RestoredGroup]
    requeued: list[tuple[Task, int]]
    async_ratio: Any
    tasks: Mapping[str, Any]
    """State of the task source in the checkpoint; `calls` are what it was asked and told since."""
    calls: list[tuple[str, float | None]] = field(default_factory=list)
    """(task id, None) for a task that was drawn, (group id, score) for a report."""
    steps: list[RecordedStep] = field(default_factory=list)
    is_marked: bool = False
    """The journal has the `mark`; else nothing in it is of use, and what follows needs the mark before it."""
    known_tasks: dict[str, Task] = field(default_factory=dict)
    """Of all groups since the checkpoint, by group id."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Recovery:
        """Begin with a checkpoint (`Rollout.state`). Raises ValueError for another state."""
        saved = msgspec.convert(state, _State)
        groups = [RestoredGroup(*each) for each in saved.groups]
        found = cls(
            mark=saved.mark,
            version=saved.version,
            next_group=saved.next_group,
            groups={group.group_id: group for group in groups},
            requeued=saved.requeued,
            async_ratio=saved.async_ratio,
            tasks=saved.tasks,
        )
        found.known_tasks = {group.group_id: group.task for group in groups}
        return found

    @classmethod
    def beginning(cls) -> Recovery:
        """Begin without a checkpoint, where the run began."""
        return cls(None, version=0, next_group=0, groups={}, requeued=[], async_ratio=None, tasks={})

    def ended(self) -> dict[str, list[str]]:
        """Return the episodes that have ended of each group that is left, by group id."""
        return {name: group.episodes for name, group in self.groups.items()}

    def repeat(self, events: Sequence[Event], *, max_requeues: int | None) -> None:
        """Apply what the journal has after the checkpoint. `max_requeues`: how often the task of a stale group is
        played again; None: never. Raises ValueError or KeyError for what is no journal of this run."""
        marked = [place for place, event in enumerate(events) if event.get("mark") == self.mark]
        before = [-1] if self.mark is None else marked
        self.is_marked = bool(before)
        for event in events[before[-1] + 1 :] if before else ():
            match event["event"]:
                case "admitted":
                    self._admit(msgspec.convert(event, _Admitted))
                case "ended":
                    self._end(msgspec.convert(event, _Ended))
                case "dropped":
                    dropped = msgspec.convert(event, _Dropped)
                    group = self.groups.pop(dropped.group, None)
                    stale = dropped.reason == "stale" and max_requeues is not None
                    if group is not None and stale and group.requeues < (max_requeues or 0):
                        self.requeued.append((group.task, group.requeues + 1))
                case "trained":
                    self._train(msgspec.convert(event, _Trained))
                case "async_ratio":
                    self.async_ratio = event["state"]

    def _admit(self, event: _Admitted) -> None:
        if event.drawn:
            self.calls.append((event.task.task_id, None))
        elif self.requeued:
            self.requeued.pop(0)
        group = RestoredGroup(event.number, event.task, event.requeues)
        self.groups[group.group_id] = group
        self.known_tasks[group.group_id] = event.task
        self.next_group = group.number + 1

    def _end(self, event: _Ended) -> None:
        if event.task is not None:  # its group may have left before the checkpoint
            self.known_tasks.setdefault(event.group, event.task)
        self.calls.append((event.group, event.score))
        group = self.groups.get(event.group)
        if event.kept and group is not None and event.episode not in group.episodes:
            group.episodes.append(event.episode)

    def _train(self, event: _Trained) -> None:
        self.version = event.version
        batches = [[(name, self.known_tasks[name], rows) for name, rows in each] for each in event.batches]
        teacher = {name: np.frombuffer(values, TEACHER_TYPE) for name, values in event.teacher.items()}
        self.steps.append(RecordedStep(self.version, batches, event.metrics, teacher))
        for name in {name for batch in batches for name, _, _ in batch} | set(event.without_rows):
            self.groups.pop(name, None)

    def restore_source(self, source: TaskSource) -> None:
        """Bring a task source to where it was. Raises ValueError if it draws other tasks than it did, and what the
        source raises for a state of another one."""
        source.restore(self.tasks)
        for name, score in self.calls:
            if score is not None:
                source.report(self.known_tasks[name], score)
                continue
            try:
                drawn = source.next()
            except StopIteration:
                raise ValueError(f"the task source has ended where it drew {name!r} before") from None
            if drawn.task_id != name:
                raise ValueError(f"the task source draws {drawn.task_id!r} where it drew {name!r} before")
