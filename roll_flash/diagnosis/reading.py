"""Reads the folder of a run, also while it is written: config, metrics, and the first and the last episodes.

Nothing is written into it. What cannot be read is left out and noted; of a long run only the ends are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec
import yaml

from roll_flash.checked_files import as_a_run_writes, decode, load_yaml, open_checked, read_checked
from roll_flash.diagnosis.run_view import (
    FIRST_EPISODES,
    FIRST_STEPS,
    RECENT_EPISODES,
    RECENT_STEPS,
    Episode,
    RunView,
    Settings,
    Steps,
)
from roll_flash.diagnosis.summaries import LoggedEpisode, of_line
from roll_flash.errors import RunError
from roll_flash.monitor.episode_files.steps import open_step, removed_line, step_files
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.run.run_dir import TIMELINE

MAX_LINE = 64 << 20
"""Bytes of an episode's line; longer ones are left out."""
MAX_READ = 1 << 30
"""Bytes of episodes that are read."""
_DECODER = msgspec.json.Decoder(LoggedEpisode, strict=False)


def read_run(folder: Path) -> RunView:
    """Read a run. Raises RunError, with one line, for a folder that is none, cannot be read, or is damaged."""
    with as_a_run_writes(folder):
        try:
            settings = _settings(folder)
        except FileNotFoundError as error:
            raise RunError(f"{error.filename}: no such file; {folder} is not the folder of a run") from None
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.get(STEP_S) is not None]
        log = _Log(folder / "episodes")
        first, recent = log.read()
    return RunView(
        settings, Steps(rows[:FIRST_STEPS]), Steps(rows[-RECENT_STEPS:]), tuple(first), tuple(recent), log.notes()
    )


def _settings(folder: Path) -> Settings:
    path = folder / "config.yaml"
    try:
        content = load_yaml(read_checked(path))
    except (yaml.YAMLError, ValueError):
        raise RunError(f"{path}: is no YAML; put back the config of the run") from None
    if not isinstance(content, Mapping):
        raise RunError(f"{path}: has no keys; put back the config of the run")
    return Settings.of(content, is_on_gpus=_is_on_gpus(folder / "logs" / TIMELINE))


def _is_on_gpus(path: Path) -> bool:
    """What the first step of the timeline says: on GPUs it counts no cores."""
    if not path.exists():
        return False
    with open_checked(path) as file:
        line = file.readline(MAX_LINE)
    try:
        step = decode(line)
    except ValueError:  # being written
        return False
    return isinstance(step, dict) and step.get("cpu_cores") == 0


class _Log:
    """The folder `episodes/`, with counts of what was left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = step_files(folder)
        self._left = MAX_READ
        self._damaged: set[tuple[Path, int]] = set()
        self._long: set[tuple[Path, int]] = set()
        """File and number of the line: a short run is read from both ends."""

    def read(self) -> tuple[list[Episode], list[Episode]]:
        """Return the first FIRST_EPISODES and the last RECENT_EPISODES; in a short run some are both."""
        recent: list[Episode] = []
        for path in reversed(self._files):
            if len(recent) >= RECENT_EPISODES:
                break
            recent = [*self._episodes(path), *recent]
        first = islice((each for path in self._files for each in self._episodes(path)), FIRST_EPISODES)
        return list(first), recent[-RECENT_EPISODES:]

    def notes(self) -> tuple[str, ...]:
        lines = []
        if self._damaged:
            lines.append(f"{len(self._damaged)} damaged lines of episodes/ were left out (or of another version)")
        if self._long:
            lines.append(f"{len(self._long)} episodes of more than {MAX_LINE >> 20} MiB were left out")
        if gone := removed_line(self._folder):
            lines.append(gone)
        if self._left <= 0:
            lines.append(f"only {MAX_READ >> 30} GiB of episodes/ were read")
        return tuple(lines)

    def _episodes(self, path: Path) -> Iterator[Episode]:
        for number, line in self._lines(path):
            try:
                record = _DECODER.decode(line)
            except (ValueError, RecursionError):
                self._damaged.add((path, number))
                continue
            yield of_line(record)

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines with their numbers; the last one may be half written."""
        number = 0
        with open_step(path) as file:
            while self._left > 0 and (line := file.readline(MAX_LINE)):
                self._left -= len(line)
                number += 1
                if line.endswith(b"\n"):
                    yield number, line
                elif len(line) == MAX_LINE:
                    self._long.add((path, number))
                    _skip_line(iter(lambda: file.readline(MAX_LINE), b""))


def _skip_line(pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        if piece.endswith(b"\n"):
            return
