"""Detect identical tasks with different seeds: a data set read as `rows[seed % len(rows)]` repeats its training rows in
every range of seeds.

Tasks are identical if the model sees the same messages before its first turn. If all tasks of an evaluation begin
equally (a game with hidden cards), that is no evidence, and seeds distinguish them. An environment can name its task in
the info of `reset`, as `info["task"]`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from roll_flash.checked_files import as_a_run_writes
from roll_flash.monitor.episodes import task_hash
from roll_flash.monitor.json_lines import JsonLinesFile, read_lines
from roll_flash.types import FinishedEpisode

TRAINED_TASKS = "trained_tasks.jsonl"


def hashes_by_task(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Hash of each task of episode records (`roll_flash.monitor.episodes`) by its id; empty if the hashes do not
    distinguish the tasks."""
    found = {record["task_id"]: task_hash(record) for record in records if "messages" in record}
    named = any("task" in record["info"] for record in records if "messages" in record)
    return found if named or len(found) == 1 or len(set(found.values())) > 1 else {}


class TrainedTasks:
    """Hashes of all tasks that a run has trained on, stored in its folder `logs`."""

    def __init__(self, logs: Path) -> None:
        self.hashes = read_trained_tasks(logs)
        self._file = JsonLinesFile(logs / TRAINED_TASKS)

    def add(self, step: int, trajectories: Iterable[FinishedEpisode]) -> None:
        """Add a step (from 1). Raises RunError if the disk write fails."""
        new = {trajectory.task_hash for trajectory in trajectories} - self.hashes
        if new:
            self.hashes |= new
            self._file.write({"step": step, "tasks": sorted(new)})

    def close(self) -> None:
        self._file.close()


def read_trained_tasks(logs: Path) -> set[str]:
    """Read a run's folder `logs`; empty if there are none. Raises RunError for content that no run writes."""
    with as_a_run_writes(logs / TRAINED_TASKS):
        return {name for line in read_lines(logs / TRAINED_TASKS) for name in line["tasks"]}


def notes_on_tasks(hashes: Mapping[str, str], trained: Collection[str]) -> list[str]:
    """Notes for a reader: identical tasks, and tasks that were trained on."""
    distinct, notes = set(hashes.values()), []
    if len(distinct) < len(hashes):
        notes.append(f"{len(hashes)} tasks are {len(distinct)} distinct ones (by what the model is shown first)")
    if seen := distinct & set(trained):
        notes.append(f"{len(seen)} of {len(distinct)} distinct tasks were trained on: these figures are not held out")
    return notes
