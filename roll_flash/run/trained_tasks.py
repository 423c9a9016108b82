"""Detect identical tasks with different seeds: a data set read as `rows[seed % len(rows)]` repeats its training rows in
every range of seeds.

Tasks are identical if the model sees the same messages before its first turn. If all tasks of an evaluation begin
equally (a game with hidden cards), that is no evidence, and seeds distinguish them. An environment can name its task in
its info, as `info["task"]`, which tells apart tasks that begin equally. Those of an agent with a loop of its own, whose
messages are the agent's, are known by this name alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from roll_flash.checked_files import as_a_run_writes
from roll_flash.monitor.episodes import is_of_an_agent, task_hash
from roll_flash.monitor.json_lines import JsonLinesFile, read_lines
from roll_flash.types import FinishedEpisode

TRAINED_TASKS = "trained_tasks.jsonl"


def hashes_by_task(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Hash of each task of episode records (`roll_flash.monitor.episodes`) by its id; empty if the hashes do not
    distinguish the tasks."""
    told = [record for record in records if "messages" in record]
    found = {record["task_id"]: task_hash(record) for record in told}
    named = any("task" in record["info"] and is_of_an_agent(record["info"]) for record in told)
    return found if named or len(found) == 1 or len(set(found.values())) > 1 else {}


class TaskHashes(Set[str]):
    """A set of hashes of tasks that takes 8 bytes for each: a long run has trained on millions."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self._numbers = array("Q", sorted({int(each, 16) for each in hashes}))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._place(int(name, 16))[1]

    def __iter__(self) -> Iterator[str]:
        return (f"{number:016x}" for number in self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, name: str) -> None:
        place, is_there = self._place(number := int(name, 16))
        if not is_there:
            self._numbers.insert(place, number)

    def _place(self, number: int) -> tuple[int, bool]:
        """Return where a number is, or would be inserted, and whether it is there."""
        place = bisect_left(self._numbers, number)
        return place, place < len(self._numbers) and self._numbers[place] == number


class TrainedTasks:
    """Hashes of all tasks that a run has trained on, stored in its folder `logs`."""

    def __init__(self, logs: Path) -> None:
        self.hashes = read_trained_tasks(logs)
        self._file = JsonLinesFile(logs / TRAINED_TASKS)

    def add(self, step: int, trajectories: Iterable[FinishedEpisode]) -> None:
        """Add a step (from 1). Raises RunError if the disk write fails."""
        new = sorted({name for each in trajectories if (name := each.task_hash) not in self.hashes})
        if new:
            for name in new:
                self.hashes.add(name)
            self._file.write({"step": step, "tasks": new})

    def close(self) -> None:
        self._file.close()


def read_trained_tasks(logs: Path) -> TaskHashes:
    """Read a run's folder `logs`; empty if there are none. Raises RunError for content that no run writes."""
    with as_a_run_writes(logs / TRAINED_TASKS):
        return TaskHashes(name for line in read_lines(logs / TRAINED_TASKS) for name in line["tasks"])


def notes_on_tasks(hashes: Mapping[str, str], trained: Collection[str]) -> list[str]:
    """Notes for a reader: identical tasks, and tasks that were trained on."""
    distinct, notes = set(hashes.values()), []
    if len(distinct) < len(hashes):
        notes.append(f"{len(hashes)} tasks are {len(distinct)} distinct ones (by what the model is shown first)")
    if seen := sum(name in trained for name in distinct):
        notes.append(f"{seen} of {len(distinct)} distinct tasks were trained on: these figures are not held out")
    return notes
