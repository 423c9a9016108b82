"""The folder of an evaluation: its plan, and the episodes by id. The last record of an id counts.

Each episode is on disk before the next is awaited; `kill -9` loses only running episodes. A truncated last line is
ignored, and its attempt runs again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from roll_flash.checked_files import decode, read_checked
from roll_flash.errors import ConfigError
from roll_flash.evaluation.budget import Budget
from roll_flash.monitor.episodes import Outcome, episode_line, episode_record, is_readable, transcript
from roll_flash.monitor.json_lines import JsonLinesFile, encode, read_lines
from roll_flash.run.run_dir import PRIVATE, require_no_links
from roll_flash.types import EpisodeSpec

EPISODES_FILE = "episodes.jsonl"
RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"
PLAN_FILE = "plan.json"
TRANSCRIPTS = "transcripts"


class Journal:
    """Records in memory and on disk. Adds all usage, also of earlier calls, to `budget`."""

    def __init__(self, folder: Path, plan: Mapping[str, Any], budget: Budget) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._budget = budget
        try:
            folder.mkdir(PRIVATE, parents=True, exist_ok=True)
            require_no_links(folder)
            (folder / TRANSCRIPTS).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: the results cannot be written there: {error.strerror}; give --out") from None
        self._plan, self._saved_plan = _as_read(plan), read_plan(folder)
        for record in read_records(folder):
            self._count(record)
        if self.records and self._saved_plan is not None:
            _require_same_plan(folder, self._saved_plan, self._plan)
        self._file = JsonLinesFile(folder / EPISODES_FILE)

    def begin(self) -> None:
        """Write the plan. It holds for the folder once an attempt has ended: before that, as after a start that failed
        for a misspelt model, another one takes its place."""
        if self._saved_plan is None or not self.records:
            (self._folder / PLAN_FILE).write_text(json.dumps(self._plan, indent=2) + "\n")

    def forget_changed(self, specs: Sequence[EpisodeSpec]) -> None:
        """Forget attempts at tasks whose arguments have changed since, such as the rows of an edited file."""
        for spec in specs:
            record = self.records.get(spec.episode_id, {})
            if "env_kwargs" in record and _as_read(record["env_kwargs"]) != _as_read(spec.task.kwargs):
                del self.records[spec.episode_id]

    def unscored(self, specs: Sequence[EpisodeSpec]) -> list[EpisodeSpec]:
        """Attempts to run: those without a record, and those that failed."""
        done = {name for name, record in self.records.items() if record["kind"] == "trajectory"}
        return [spec for spec in specs if spec.episode_id not in done]

    def add(self, outcome: Outcome) -> None:
        record = episode_record(outcome)
        self._count(record)
        if is_readable(line := episode_line(outcome)):  # else the next call runs its attempt again
            self._file.write_line(line)
        path = self._folder / TRANSCRIPTS / transcript_name(record)
        path.write_text(transcript(record), encoding="utf-8", errors="replace")

    def write_result(self, tree: Mapping[str, Any]) -> None:
        """Write `results.json` atomically."""
        partial = self._folder / f"{RESULTS_FILE}.new"
        partial.write_text(json.dumps(tree, indent=2, default=str) + "\n")
        partial.replace(self._folder / RESULTS_FILE)

    def close(self) -> None:
        self._file.close()

    def _count(self, record: dict[str, Any]) -> None:
        self.records[record["episode_id"]] = record
        # Records of older versions have no such columns.
        self._budget.add(record.get("prompt_tokens"), record.get("completion_tokens"))


def transcript_name(record: Mapping[str, Any]) -> str:
    """`seed_1000_attempt_0.md`, or with the task's name if tasks are not seeds."""
    *_, task, attempt = str(record["episode_id"]).split(":")
    task = f"seed_{task}" if task == str(record["seed"]) else task
    return f"{task}_attempt_{attempt}.md"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Episodes of an evaluation folder, in the order they ended. Raises ConfigError for a damaged file."""
    path = folder / EPISODES_FILE
    try:
        records = list(read_lines(path))
    except ValueError as error:
        raise ConfigError(f"{error}; or evaluate into another folder") from None
    for record in records:
        lacking = [name for name in ("episode_id", "kind", "task_id", "reward") if name not in record]
        if lacking:
            raise ConfigError(f"{path}: a record has no {lacking[0]!r}; choose another folder")
        for name, kinds in _COLUMNS.items():
            if name in record and not isinstance(record[name], kinds):
                raise ConfigError(f"{path}: {name} of a record is {record[name]!r:.60}; choose another folder")
    return records


_COLUMNS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("episode_id", "kind", "task_id", "env_id"), (str,)),
    "reward": (int, float, NoneType),
    **dict.fromkeys(("prompt_tokens", "completion_tokens"), (int, NoneType)),
    "success": (bool, NoneType),
    **dict.fromkeys(("turns", "messages"), (list,)),
    **dict.fromkeys(("info", "env_kwargs"), (dict,)),
}
"""Types of columns that are computed with."""


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Plan of an evaluation folder; None if there is none. Raises ConfigError for a damaged one."""
    path = folder / PLAN_FILE
    try:
        plan = decode(read_checked(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable ({error}); remove the folder or choose another") from None
    if not isinstance(plan, dict):
        raise ConfigError(f"{path}: not a plan but a {type(plan).__name__}; remove the folder or choose another")
    return plan


def _require_same_plan(folder: Path, saved: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    for key in {**plan, **saved}:
        if saved.get(key) != plan.get(key):
            name, *values = _difference(key, saved.get(key), plan.get(key))
            old, new = ("(the default)" if each is None else each for each in values)
            raise ConfigError(f"{folder}: holds an evaluation with {name} {old}, not {new}; choose another folder")


def _difference(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the name and the values of the first difference; of mappings it is that of an entry."""
    if isinstance(old, dict) and isinstance(new, dict):
        name = next(name for name in {**old, **new} if old.get(name) != new.get(name))
        return _difference(f"{key}.{name}", old.get(name), new.get(name))
    return key, old, new


def _as_read(value: Any) -> Any:
    return decode(encode(value).encode())
