"""The journal of a run: what rollout and learner decided since a checkpoint. A crash then loses running episodes only.

Trajectories are in `episodes/`; the journal says what became of them. `journal/after_step_N.jsonl` has the events after
checkpoint N in the order in which they fell, one line each, with a checksum:

- `state`: the state of the rollout was copied for this checkpoint; what comes before is in it; `open` has the groups
  that had not left, with their episodes that had ended;
- `opened`: a driver writes on, with these sizes of groups; episodes of `again` had ended, but their trajectories are
  lost, so they are played again;
- `admitted`: a task became a group; `drawn` if it came from the task source, not from the requeued tasks;
- `ended`: a trajectory was told to the task source, and became part of its group if `kept`;
- `dropped`: a group left without being trained;
- `trained`: a step, with the episodes and rewards of its micro-batches in the order in which they were accumulated,
  what a teacher said of them, and the episodes of its groups that are `lost`: dropped by a stage, with the reason;
- `async_ratio`: a decision of `async_ratio: auto`.

A resumed run repeats them from the checkpoint on (`roll_flash/rollout/recovery.py`), up to the first damaged line.
Files before the newest are kept for `roll-flash verify` (`verify.py`), compressed as those of episodes are; they are
removed with the episodes of which they tell (`episode_space.py`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.checked_files import decode, lines_of
from roll_flash.errors import RunError
from roll_flash.monitor.episode_files.steps import (
    compress_step,
    compressed,
    decompress_step,
    open_step,
    stored_bytes,
)
from roll_flash.monitor.json_lines import JsonLinesFile, encode, is_intact, with_checksum
from roll_flash.run.files import free_name, sync

FORMAT = 1
Event = Mapping[str, Any]
_FILE = re.compile(r"after_step_(\d+)\.jsonl(\.gz)?")


class Journal:
    """Appends events. `begin` comes first, and at each checkpoint. Raises RunError if the disk write fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: JsonLinesFile | None = None
        self._failure: RunError | None = None

    def newest(self, step: int) -> int:
        """Return the checkpoint whose file a run that resumes at the checkpoint of `step` goes on with."""
        return max(step, *journal_files(self._folder), step)

    def begin(self, step: int) -> None:
        """Write what follows into the file of the checkpoint of `step`, or go on with it."""
        self.close()
        self._failure = None
        path = self._folder / f"after_step_{step:06d}.jsonl"
        decompress_step(path)
        self._file = JsonLinesFile(path)
        if not self._file.path.stat().st_size:
            self.write({"event": "begin", "format": FORMAT, "step": step})
            sync(self._folder)

    def write(self, event: Event) -> None:
        """Append an event. After one that could not be written, none is until `begin`: without those before them events
        say nothing."""
        assert self._file is not None, "begin comes first"
        if self._failure is not None:
            raise self._failure
        try:
            self._file.write_line(with_checksum(encode(event).encode()))
        except RunError as error:
            self._failure = error
            raise

    def sync(self) -> None:
        """Wait until the disk has all events."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None


def state_event(mark: str | None, open_groups: Mapping[str, Sequence[str]]) -> Event:
    """`open_groups`: ids of the episodes that have ended, by group id."""
    return {"event": "state", "mark": mark, "open": open_groups}


def journal_files(folder: Path) -> dict[int, Path]:
    """Return the files of a journal by the step of their checkpoint, oldest first, without `.gz` (`open_step`)."""
    names = {path.name.removesuffix(".gz") for path in folder.glob("*") if _FILE.fullmatch(path.name)}
    return dict(sorted((int(name[len("after_step_") : -len(".jsonl")]), folder / name) for name in names))


def journal_bytes(folder: Path) -> int:
    """Return the bytes that the files take on the disk. Raises OSError."""
    return sum(map(stored_bytes, journal_files(folder).values()))


def compress_finished(folder: Path, may_go_on: Callable[[], bool]) -> None:
    """Compress all files but the newest, as `compress_step`. Raises OSError."""
    for path in list(journal_files(folder).values())[:-1]:
        if path.exists():
            compress_step(path, may_go_on)


def remove_before(folder: Path, step: int) -> None:
    """Remove files, oldest first, whose events all come before the checkpoint of `step` or a later one. Raises
    OSError."""
    files = journal_files(folder)
    for path, end in zip(files.values(), [*files][1:], strict=False):
        if end > step:
            break
        for each in (path, compressed(path)):
            each.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that cannot be read. `step` is that of its file, `offset` its place there in bytes."""

    step: int
    path: Path
    offset: int
    message: str


def read_journal(folder: Path, step: int = 0) -> tuple[list[Event], Damage | None]:
    """Return the events after the checkpoint of `step`, up to the first damaged line. A last line of the last file
    without newline is what a killed process leaves, and no damage. Raises OSError for a file that cannot be read."""
    events: list[Event] = []
    files = journal_files(folder)
    for number, path in files.items():
        if number < step:
            continue
        offset = 0
        try:
            file = open_step(path)
        except FileNotFoundError:
            if events:
                raise
            continue  # a run that goes on has removed its oldest file meanwhile
        with file:
            for place, line in enumerate(lines_of(file), start=1):
                if not line.endswith(b"\n") and number == max(files):
                    break
                event = _event(line)
                if event is None or (event["event"] == "begin" and event.get("format") != FORMAT):
                    what = "is damaged" if event is None else f"is of format {event.get('format')!r}, not {FORMAT}"
                    return events, Damage(number, path, offset, f"{path}, line {place} {what}")
                events.append(event)
                offset += len(line)
    return events, None


def _event(line: bytes) -> Event | None:
    """Return the event of a line; None if it is damaged. What the event has is for the reader to check."""
    try:
        event: Event = decode(line, dict[str, Any])
    except ValueError:
        return None
    return event if is_intact(line) and isinstance(event.get("event"), str) else None


def cut_at(folder: Path, damage: Damage) -> None:
    """Keep the journal up to a damaged line, and set aside a copy of the whole as `*.bak`: events without those before
    them say nothing."""
    set_aside(folder, damage.step + 1)
    decompress_step(damage.path)
    shutil.copyfile(damage.path, free_name(damage.path))
    os.truncate(damage.path, damage.offset)


def set_aside(folder: Path, step: int) -> None:
    """Rename the files of the checkpoint of `step` and of later ones to `*.bak`."""
    for number, path in journal_files(folder).items():
        if number >= step:
            for each in (path, compressed(path)):
                if each.exists():
                    each.replace(free_name(each))
