"""The run folder `runs/NAME/`: its lock, its layout, and its complete checkpoints.

A checkpoint is written to `checkpoints/step_N.partial` and renamed when all of it is on disk, so that a folder `step_N`
with its `COMPLETE` marker is always whole. One process at a time holds the folder (flock).
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from roll_flash.checked_files import open_checked
from roll_flash.config.tree import Config
from roll_flash.errors import CheckpointError, ConfigError, RunError
from roll_flash.monitor.episodes import DROPPED_FILE
from roll_flash.monitor.json_lines import JsonLinesFile
from roll_flash.monitor.limits import usable_cores
from roll_flash.monitor.metrics import keep_steps_until
from roll_flash.processes.gpus import is_cpu_installation
from roll_flash.run.checkpoints.checksums import find_damage, has_checksums, write_checksums
from roll_flash.run.checkpoints.folder import new_folder, replace_folder
from roll_flash.run.config_changes import check_same_run
from roll_flash.run.files import free_name, sync_tree
from roll_flash.run.journal import set_aside
from roll_flash.run.origin import mark_as_own
from roll_flash.run.scale_request import ANSWER, REQUEST
from roll_flash.run.trained_tasks import TRAINED_TASKS
from roll_flash.terminal import say

FOLDERS = ("episodes", "journal", "checkpoints", "logs", "eval", "plots")
COMPLETE = "COMPLETE"
COPYING = ".copying"
"""End of the names of folders with links to checkpoints that are being copied elsewhere."""
TIMELINE = "timeline.jsonl"
SUMMARY = "summary.json"
"""Written at the end of a run."""
PRIVATE = 0o700
"""Folder mode: only the user may read a run's folder, with its model and task texts and logs."""
MIN_FREE_BYTES = 1 << 30
LARGE_BYTES = 1 << 30
"""What is larger takes seconds to read, and that is said."""
STEP_ENDINGS = ("", ".jsonl", ".jsonl.gz", ".removed")
"""Ends of the names of files and folders of a step."""
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `state` is the learner's state, `hf` a model folder, `trainer` the state of the run."""

    step: int
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    @property
    def trainer(self) -> Path:
        return self.folder / "trainer.json"


class RunDir:
    """A run folder, locked for this process until `close`."""

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self.folder = folder
        self.config_changes: list[str] = []
        """One line for each key of the config that `--resume` changed."""
        self._lock = lock

    @classmethod
    def create(cls, config: Config, *, resume: bool) -> RunDir:
        """Create (or, with `resume`, take over) `config.run_folder` and save the resolved config in it.

        Raises ConfigError if the name is taken or in use, or the saved run is a different one; RunError for a full
        disk; CheckpointError if all checkpoints are damaged.
        """
        folder = config.run_folder
        require_owned_by_user(folder)
        changes: list[str] = []
        if resume:
            changes = check_same_run(config, folder)
        else:
            _make_new(folder)
        try:
            run = cls(folder, _lock(folder))
            run.config_changes = changes
            try:
                run._fill(config)
                if resume:
                    run._set_damaged_aside()
            except BaseException:
                run.close()
                if not resume:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        except OSError as error:
            raise _cannot_be_written(folder, error) from None
        return run

    def _fill(self, config: Config) -> None:
        self.require_space(MIN_FREE_BYTES)
        for name in FOLDERS:
            (self.folder / name).mkdir(exist_ok=True)
        self._save_config(config)
        mark_as_own(self.folder)
        for name in (SUMMARY, REQUEST, ANSWER):  # of the end before `--resume`
            (self.folder / name).unlink(missing_ok=True)
        self._repair_checkpoints()

    @property
    def episodes(self) -> Path:
        return self.folder / "episodes"

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def checkpoints_folder(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def eval(self) -> Path:
        return self.folder / "eval"

    @property
    def model(self) -> Path:
        """Folder of the exported model of the finished run."""
        return self.folder / "model"

    def log_decision(self, decision: Mapping[str, Any]) -> None:
        """Append the decision of `async_ratio: auto` after a step, with its reason, to `logs/async_ratio.jsonl`."""
        with closing(JsonLinesFile(self.logs / "async_ratio.jsonl")) as file:
            file.write(decision)

    def log_timeline(self, step: Mapping[str, Any]) -> None:
        """Append when a step, the learner's work in it, the publication before it and the work of stages began and
        ended to `logs/timeline.jsonl`, which `plan --from` and the dashboard read, with the cores of this machine if
        all computes on them (else 0)."""
        with closing(JsonLinesFile(self.logs / TIMELINE)) as file:
            file.write({**step, "cpu_cores": self._computing_cores})

    @cached_property
    def _computing_cores(self) -> int:
        return usable_cores() if is_cpu_installation() else 0

    def checkpoint_folder(self, step: int) -> Path:
        return self.checkpoints_folder / f"step_{step}"

    def latest_checkpoint(self) -> Checkpoint | None:
        found = list_checkpoints(self.folder)
        return found[-1] if found else None

    @contextmanager
    def writing_checkpoint(self, step: int) -> Iterator[Path]:
        """Yield an empty folder for a checkpoint; it becomes `step_N` if the block ends without an error, and its files
        are as written when they are read back."""
        final = self.checkpoint_folder(step)
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            write_checksums(partial)
            (partial / COMPLETE).touch()
            sync_tree(partial)
            if damage := find_damage(partial):
                raise CheckpointError(f"{final}: read back from the disk, {damage}; check the disk, or set `runs`")
            replace_folder(partial, final)
        except OSError as error:
            raise CheckpointError(f"{final}: the checkpoint could not be written: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def prune_checkpoints(self, keep: int, keep_every: int = 0) -> None:
        """Remove complete checkpoints but the newest `keep`, those of multiples of `keep_every` (0: none) steps, and
        those that are `in_use`, until the next time."""
        for checkpoint in list_checkpoints(self.folder)[:-keep]:
            if (not keep_every or checkpoint.step % keep_every) and not _is_in_use(checkpoint):
                _remove(checkpoint)

    def set_aside_after(self, step: int) -> None:
        """Rename (to `*.bak`) episodes, evaluations and checkpoints of steps after `step`, which will be run again;
        with -1 all."""
        for parent in (self.episodes, self.eval, self.checkpoints_folder):
            for path in sorted(parent.glob("step_*")):
                match = _STEP.match(path.name)
                if match and int(match[1]) > step and path.name[match.end() :] in STEP_ENDINGS:
                    path.rename(free_name(path))
        for path in (self.episodes / DROPPED_FILE, self.logs / TRAINED_TASKS, self.logs / TIMELINE):
            keep_steps_until(path, step)

    def begin_again(self) -> None:
        """Set aside all that a run without a checkpoint has written."""
        self.set_aside_after(-1)
        set_aside(self.journal, 0)

    def require_space(self, num_bytes: int) -> None:
        """Check the free disk space. Raises RunError if it is less than `num_bytes`."""
        _require_space(self.folder, num_bytes)

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        self._lock.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save_config(self, config: Config) -> None:
        path, text = self.folder / "config.yaml", config.to_yaml()
        if path.exists() and path.read_text() != text:
            path.rename(free_name(path))
        if not path.exists():
            path.write_text(text)

    def _repair_checkpoints(self) -> None:
        """Clean up after a process that was killed while it wrote or replaced a checkpoint."""
        for ending in (".partial", COPYING):
            for path in self.checkpoints_folder.glob(f"step_*{ending}"):
                shutil.rmtree(path)
        for path in self.checkpoints_folder.glob("step_*.old"):
            if path.with_suffix("").exists():
                shutil.rmtree(path)
            else:
                path.rename(path.with_suffix(""))

    def _set_damaged_aside(self) -> None:
        """Rename the newest checkpoints to `*.bak` as far as they are damaged, and say so.

        Raises CheckpointError, and renames none, if there is no other.
        """
        damaged: list[tuple[Checkpoint, str]] = []
        for checkpoint in reversed(list_checkpoints(self.folder)):
            if not has_checksums(checkpoint.folder):
                say(f"{checkpoint.folder}: has no checksums (of an older version), so it is not checked", error=True)
            if not (damage := _read_back(checkpoint.folder)):
                break
            damaged.append((checkpoint, damage))
        else:
            if damaged:
                raise _all_damaged(*damaged[0])
        for bad, damage in damaged:
            aside = bad.folder.rename(free_name(bad.folder))
            say(f"{bad.folder}: damaged ({damage}); now {aside.name}, the run uses step {checkpoint.step}", error=True)


def _all_damaged(newest: Checkpoint, damage: str) -> CheckpointError:
    return CheckpointError(
        f"{newest.folder}: damaged ({damage}), and no other checkpoint is whole; put back a copy, or begin again: "
        f"with name=OTHER, or under this name after you have renamed {newest.folder.parent}"
    )


def require_owned_by_user(folder: Path) -> None:
    """Raises ConfigError for a folder of another user, who could read all of it and plant links for us to follow, and
    for a place without access."""
    try:
        owner = folder.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; choose another") from None
    if owner != os.geteuid():
        raise ConfigError(
            f"{folder}: belongs to the user with id {owner}, who could read and change all of it; make it your own "
            "with chown, or choose another"
        )


def require_no_links(folder: Path) -> None:
    """Raises ConfigError for a link in a folder to write to, which may be somebody else's: we would write over what it
    leads to."""
    if link := next((path for path in folder.rglob("*") if path.is_symlink()), None):
        raise ConfigError(f"{link}: is a link, which none of ours is; remove it")


def make_own_folder(folder: Path, name: str) -> None:
    """Create a folder for model output if it does not exist; `name` is the option shown to the user.

    Raises ConfigError if it belongs to another user, holds links, or cannot be created.
    """
    require_owned_by_user(folder)
    require_no_links(folder)
    try:
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} {folder}: {error.strerror}; choose another") from None


def check_run_folder(config: Config, *, resume: bool) -> list[str]:
    """Check that `RunDir.create` would succeed, and leave nothing behind. Raises what it would raise.

    Returns one line for each key of the config that `resume` would change.
    """
    changes: list[str] = []
    folder = config.run_folder
    require_owned_by_user(folder)
    if resume:
        changes = check_same_run(config, folder)
    elif folder.exists():
        _require_unused(folder)
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # the mode of a folder says too little, above all to root
            pass
    except OSError as error:
        raise _cannot_be_written(folder, error) from None
    _require_space(existing, MIN_FREE_BYTES)
    return changes


def link_folder(source: Path, target: Path) -> None:
    """Replace `target` by the files of `source` as hard links, which outlive the source; copy them if the file system
    has no hard links. Raises CheckpointError."""

    def link_or_copy(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copyfile(file, to)

    _copy_folder(source, target, link_or_copy)


def _copy_folder(source: Path, target: Path, copy_file: Callable[[str, str], object]) -> None:
    with new_folder(target, replaces=True) as partial:
        shutil.copytree(source, partial, copy_function=copy_file, dirs_exist_ok=True)


def list_checkpoints(run_folder: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run folder, oldest step first."""
    found = []
    for path in (run_folder / "checkpoints").glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / COMPLETE).exists():
            found.append(Checkpoint(int(match[1]), path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint; what a killed process leaves of it is no checkpoint, and removed by the next resume."""
    partial = checkpoint.folder.with_name(f"{checkpoint.folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(checkpoint.folder.rename(partial))


@contextmanager
def in_use(model: Path) -> Iterator[None]:
    """While the block uses a model folder that is the `hf` of a checkpoint, neither its run nor `checkpoints rm`
    removes it: a server that dies reads it again. Other folders are left alone."""
    try:
        file = open_checked(model.parent / COMPLETE)
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _is_in_use(checkpoint: Checkpoint) -> bool:
    with (checkpoint.folder / COMPLETE).open("r+b") as file:  # NFS gives this lock only to who may write
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def newest_whole(run_folder: Path) -> Checkpoint | None:
    """Newest checkpoint without damage. Reads all of its files."""
    found = reversed(list_checkpoints(run_folder))
    return next((checkpoint for checkpoint in found if not find_damage(checkpoint.folder)), None)


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Hold the folder of a run or evaluation that does not run; it is made if it is not there. Raises ConfigError if it
    runs."""
    require_owned_by_user(folder)
    folder.mkdir(PRIVATE, parents=True, exist_ok=True)
    with closing(_lock(folder, "wait until it has ended, or stop it with Ctrl-C")):
        yield


def remove_checkpoints(run_folder: Path, steps: Collection[int]) -> None:
    """Remove checkpoints of a run that does not run. Raises ConfigError, and removes none, if it runs, or for a step
    without a checkpoint, with the newest whole one, or with one that is `in_use`."""
    with locked_run(run_folder):
        found = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run_folder)}
        if missing := [step for step in steps if step not in found]:
            have = ", ".join(map(str, found)) or "none"
            raise ConfigError(f"{run_folder}: no complete checkpoint of step {missing[0]}; it has: {have}")
        newest = newest_whole(run_folder)
        if newest is not None and newest.step in steps:
            raise ConfigError(
                f"{newest.folder}: is the newest whole checkpoint, from which --resume goes on; if you need nothing of "
                "the run, remove its folder"
            )
        if used := next((step for step in steps if _is_in_use(found[step])), None):
            raise ConfigError(f"{found[used].folder}: an evaluation or a server uses it; wait until that has ended")
        for step in set(steps):
            _remove(found[step])


def find_run(name: str, runs: str = "runs") -> Path:
    """Folder of a run given as a path or as a name under `runs`. Raises ConfigError with a suggestion."""
    for folder in (Path(name).expanduser(), Path(runs) / name):
        if (folder / "config.yaml").is_file():
            return folder
    known = [path.parent.name for path in Path(runs).glob("*/config.yaml")]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; runs in {runs}/: {', '.join(sorted(known)) or 'none'}"
    raise ConfigError(f"{name}: no run of this name and no run folder{hint}")


def find_checkpoint(reference: str, runs: str = "runs") -> Checkpoint:
    """Checkpoint of `RUN` (the newest) or `RUN@step`. Raises ConfigError that lists the existing ones."""
    name, _, step = reference.partition("@")
    folder = find_run(name, runs)
    found = list_checkpoints(folder)
    if not found:
        raise ConfigError(
            f"{folder}: the run has no complete checkpoint yet; the first is written after its first step"
        )
    if not step:
        return found[-1]
    for checkpoint in found:
        if step.removeprefix("step_") == str(checkpoint.step):
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in found)
    raise ConfigError(f"{reference}: no complete checkpoint of that step; {folder} has: {steps}")


def find_model(reference: str) -> Checkpoint:
    """Checkpoint as by `find_checkpoint`, with a model folder. Raises CheckpointError if it has none."""
    checkpoint = find_checkpoint(reference)
    if not (checkpoint.hf / "config.json").is_file():
        raise CheckpointError(f"{checkpoint.folder}: holds no model folder hf/; take another step")
    return checkpoint


def find_exported(reference: str) -> Checkpoint:
    """Checkpoint as by `find_model`, undamaged and without links, since who exports a model gives it to others. Raises
    CheckpointError."""
    checkpoint = find_model(reference)
    require_undamaged(checkpoint.hf)
    if link := next((path for path in checkpoint.hf.rglob("*") if path.is_symlink()), None):
        raise CheckpointError(
            f"{link}: a link, which may lead to any file of this machine, and no run writes one; put a file there"
        )
    return checkpoint


def require_undamaged(folder: Path) -> None:
    """Compare a folder of a checkpoint, its `hf` or `state`, with the checksums. Raises CheckpointError."""
    if damage := _read_back(folder.parent, folder.name):
        raise CheckpointError(f"{folder.parent}: damaged ({damage}); take another step, or put back a copy")


def _read_back(checkpoint: Path, part: str = "") -> str | None:
    """Read a checkpoint, or one folder of it, as `find_damage` does, and say so first if that takes long."""
    folder = checkpoint / part
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size >= LARGE_BYTES:
        say(f"{folder}: reading {size / 2**30:.1f} GiB to compare them with their checksums", error=True)
    return find_damage(checkpoint, part=part)


def _make_new(folder: Path) -> None:
    try:
        folder.mkdir(PRIVATE, parents=True)
    except FileExistsError:
        _require_unused(folder)
        folder.chmod(PRIVATE)
    except OSError as error:
        raise _cannot_be_written(folder, error) from None


def _require_unused(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; choose another with name=OTHER or runs=FOLDER")
    if any(path.name != ".lock" for path in folder.iterdir()) and not _never_began(folder):
        raise ConfigError(
            f"{folder}: this run exists; continue it with --resume or choose another name with name=OTHER"
        )


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise RunError(
            f"{folder}: {num_bytes / 2**20:,.0f} MiB are needed on this disk but only {free / 2**20:,.0f} MiB "
            "are free; free some or set `runs` to a folder on another disk"
        )


def _cannot_be_written(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: the run folder cannot be written: {error.strerror or error}; set `runs`")


def _never_began(folder: Path) -> bool:
    """True for the folder of a run that failed during its start: its name may be reused."""
    played = (path for name in ("episodes", "eval", "checkpoints") for path in (folder / name).glob("*"))
    return (folder / "config.yaml").is_file() and not any(played)


def _lock(folder: Path, advice: str = "wait for it, stop it, or choose name=OTHER") -> IO[str]:
    path = folder / ".lock"
    if path.is_symlink():
        raise ConfigError(f"{path}: is a link, which none of ours is; remove it")
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(f"{folder}: the run is in use by process {holder}; {advice}") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def require_new(target: str) -> Path:
    """Return the path of a folder to write. Raises ConfigError if there is one that is not empty."""
    folder = Path(target).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty; choose another folder")
    return folder


def export_checkpoint(reference: str, target: str) -> tuple[Checkpoint, Path]:
    """Copy the Hugging Face folder of `RUN[@step]` to `target`, which appears only when complete.

    Raises ConfigError for an unknown run or a non-empty folder, CheckpointError as `find_exported`, and for a folder
    that cannot be written.
    """
    checkpoint, folder = find_exported(reference), require_new(target)
    _copy_folder(checkpoint.hf, folder, shutil.copy2)
    return checkpoint, folder
