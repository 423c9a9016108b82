"""The runs and evaluations that a dashboard shows, and what their small files say."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from roll_flash.checked_files import MAX_FILE_BYTES, DamagedFileError, decode, load_yaml, open_checked, read_checked
from roll_flash.dashboard.episode_index import EpisodeIndex
from roll_flash.dashboard.fates import Fates
from roll_flash.errors import RunError
from roll_flash.evaluation.journal import EPISODES_FILE, PLAN_FILE, RESULTS_FILE
from roll_flash.monitor.episode_files.steps import removed_line, step_files
from roll_flash.monitor.metrics import FILE_NAME, REWARD, SUCCESS
from roll_flash.monitor.status import RunStatus, read_status
from roll_flash.run.run_dir import SUMMARY, find_run, list_checkpoints

CONFIG = "config.yaml"
TAIL_BYTES = 1 << 17
"""Bytes of the metrics that the list of runs reads of each run."""
NOT_OF_THE_EXPERIMENT = frozenset({"seed", "name", "runs"})
"""Keys of a config in which repetitions of one experiment differ."""


class Source:
    """A run's folder, or an evaluation's."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.is_run = (folder / CONFIG).is_file()
        self.lock = threading.Lock()
        """Held by whoever reads on in the metrics or the fates."""
        self._rows: list[dict[str, Any]] = []
        self._read = 0

    @cached_property
    def index(self) -> EpisodeIndex:
        return EpisodeIndex(self._episode_files)

    @cached_property
    def fates(self) -> Fates:
        return Fates(self.folder)

    def _episode_files(self) -> list[Path]:
        if self.is_run:
            return step_files(self.folder / "episodes")
        return [path for path in [self.folder / EPISODES_FILE] if path.exists()]

    def status(self) -> RunStatus | None:
        """Return what the run says that it does now; None for an evaluation, and for a run of an older version."""
        try:
            return read_status(self.folder)
        except RunError:
            return None

    @property
    def state(self) -> str:
        """A state of `status`; without one `done` or `stopped`, or `running` where a process holds the folder."""
        if (status := self.status()) is not None:
            return status.state
        end = self.folder / (SUMMARY if self.is_run else RESULTS_FILE)
        if end.exists():
            return "done"
        return "running" if _is_locked(self.folder / ".lock") else "stopped"

    def mark(self) -> str:
        """Return a text that changes when the files that grow have changed."""
        places = [self.folder, *(self.folder / name for name in ("logs", "episodes", "journal", "eval"))]
        files = [self.folder / FILE_NAME, self.folder / EPISODES_FILE, *self._episode_files()[-1:]]
        stats = [path.stat() for path in (*places, *files) if path.exists()]
        return f"{self.state}-{sum(stat.st_mtime_ns for stat in stats) & (1 << 53) - 1}-{stats[-1].st_size}"

    @property
    def removed(self) -> str:
        """What the run has removed of its episodes, in one line; empty if nothing."""
        return removed_line(self.folder / "episodes")

    def config(self) -> Any:
        """Return the config as plain data; for an evaluation its plan. Keys of other versions are kept."""
        path = self.folder / (CONFIG if self.is_run else PLAN_FILE)
        return _read_yaml(path, path.stat().st_mtime_ns) if path.exists() else {}

    def summary(self) -> Any:
        """Return what a run or an evaluation wrote at its end; None before."""
        path = self.folder / (SUMMARY if self.is_run else RESULTS_FILE)
        return decode(read_checked(path)) if path.exists() else None

    def metrics(self, names: Sequence[str]) -> dict[str, Any]:
        """Return columns of `metrics.jsonl`, one value per step, null where it was not logged; and all names. Several
        rows of a step are one; the last value counts."""
        with self.lock:
            self._rows, self._read = _grown(self.folder / FILE_NAME, self._rows, self._read)
            rows = self._rows
        steps: dict[int, dict[str, Any]] = {}
        for row in rows:
            steps.setdefault(row.get("step", 0), {}).update({k: v for k, v in row.items() if v is not None})
        known = sorted({name for row in steps.values() for name in row} - {"step"})
        columns = {name: [row.get(name) for row in steps.values()] for name in names}
        return {"steps": list(steps), "columns": columns, "names": known}

    def card(self) -> dict[str, Any]:
        """Return what the list of runs shows, from the end of the metrics only."""
        config = self.config()
        rows = list(_last_rows(self.folder / FILE_NAME))
        last: dict[str, Any] = {name: value for row in rows for name, value in row.items() if value is not None}
        written = [
            path.stat().st_mtime for path in (self.folder / FILE_NAME, *self._episode_files()[-1:]) if path.exists()
        ]
        model = config.get("model") if isinstance(config, dict) else None
        scores = {} if self.is_run else self.summary() or {}
        return {
            "name": self.name,
            "kind": "run" if self.is_run else "evaluation",
            "state": self.state,
            "step": last.get("step"),
            "steps": config.get("steps") if self.is_run else None,
            "reward": last.get(REWARD, _value(scores.get("reward"))),
            "success": last.get(SUCCESS, _value(scores.get("success"))),
            "recent": [row[REWARD] for row in rows if row.get(REWARD) is not None],
            "written_s": max(written, default=None),
            "model": model.get("path") if isinstance(model, dict) else None,
            "experiment": experiment(config) if self.is_run else None,
        }

    def tokenizer_file(self) -> Path | None:
        """Return the tokenizer of the newest model that the run, or the run of this evaluation, wrote."""
        run = _run_of(self.folder) or self.folder
        models = [*(each.hf for each in reversed(list_checkpoints(run))), run / "model"]
        return next((path for model in models if (path := model / "tokenizer.json").is_file()), None)


class Sources:
    """All runs and evaluations, by name."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are names or folders of runs, folders of evaluations, or folders with several of them; none: `runs`.
        Raises ConfigError for a word that names nothing."""
        self._roots = [_root(word) for word in words] or [Path("runs")]
        self._known: dict[Path, Source] = {}

    @property
    def roots(self) -> str:
        return ", ".join(map(str, self._roots))

    def all(self) -> dict[str, Source]:
        """Look for new folders, and return all by their names in addresses."""
        found: dict[str, Source] = {}
        for root in self._roots:
            for folder in _folders(root):
                name = folder.resolve().name
                if (run := _run_of(folder)) is not None:
                    name = f"{run.resolve().name}/{name}"
                if name in found and found[name].folder != folder:
                    name = f"{name} ({folder.parent})"
                source = self._known.setdefault(folder, Source(name, folder))
                found[source.name] = source
        return found

    def __getitem__(self, name: str) -> Source:
        known = {source.name: source for source in self._known.values()}
        return known[name] if name in known else self.all()[name]


def experiment(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for runs which differ only in their name and seed."""
    kept = {name: value for name, value in config.items() if name not in NOT_OF_THE_EXPERIMENT}
    return hashlib.sha256(msgspec.json.encode(kept, order="deterministic")).hexdigest()[:12]


@lru_cache(maxsize=256)
def _read_yaml(path: Path, modified_ns: int) -> Any:
    """Read a file, once as long as it does not change: it takes milliseconds, and an answer may need it ten times."""
    return load_yaml(read_checked(path))


def _value(score: Any) -> Any:
    """Return the figure of a score with an interval; None where there is no such score."""
    return score.get("value") if isinstance(score, dict) else None


def _run_of(folder: Path) -> Path | None:
    """Return the run of an evaluation during training; None for other folders."""
    run = folder.parent.parent
    return run if folder.parent.name == "eval" and (run / CONFIG).is_file() else None


def _root(word: str) -> Path:
    folder = Path(word).expanduser()
    return folder if folder.is_dir() and any(_folders(folder)) else find_run(word)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folder itself, those in it, and the evaluations of each, if they are of a run or an evaluation."""
    for folder in (root, *sorted(root.glob("*/"))):
        if (folder / CONFIG).is_file() or (folder / PLAN_FILE).is_file():
            yield folder
            yield from sorted(path.parent for path in folder.glob(f"eval/*/{PLAN_FILE}"))


def _is_locked(path: Path) -> bool:
    """True if a process of this machine holds the lock. Trying to take it could make a run fail that starts now."""
    try:
        inode, holder = path.stat().st_ino, read_checked(path).decode("utf-8", "replace").strip()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    fields = [line.split() for line in locks if "FLOCK" in line]
    return any(line[-3].rpartition(":")[2] == str(inode) and holder in line for line in fields)


def _grown(path: Path, rows: list[dict[str, Any]], read: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file, of which `rows` were read before, and how many bytes they have."""
    size = path.stat().st_size if path.exists() else 0
    if size < read:
        rows, read = [], 0
    if size > read:
        if size - read > MAX_FILE_BYTES:
            raise DamagedFileError(f"{path}: is larger than the metrics of any run")
        with open_checked(path) as file:
            file.seek(read)
            data = file.read(size - read)
        end = data.rfind(b"\n") + 1
        rows, read = [*rows, *_records(data[:end])], read + end
    return rows, read


def _last_rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with open_checked(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        data = file.read()
    begin = data.find(b"\n") + 1 if start else 0
    yield from _records(data[begin : data.rfind(b"\n") + 1])


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines that are records; a damaged one is left out."""
    for line in data.splitlines():
        try:
            record = decode(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
