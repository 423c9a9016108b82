"""What a run does now, as one small file in its folder: `status.json`, replaced about once a second.

The driver writes it; `roll-flash status` and `watch`, and the live view of `train`, show it. It is the only way to look
at a run from another process, so it says also which process writes it: one that was killed cannot say so itself.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil

from roll_flash.checked_files import Count, decode, read_checked
from roll_flash.errors import RunError

FILE_NAME = "status.json"
SILENT_AFTER_S = 30.0
"""Age of a status in seconds after which its writer counts as silent."""
ROUNDING_S = 2.0
"""Most by which two readings of the start of a process differ: the kernel tells its boot in whole seconds."""
RECENT_STEPS = 60
"""Most steps in `RunStatus.recent`."""
NEWS = 20
"""Most lines in `RunStatus.news`."""

State = Literal["starting", "running", "done", "stopped", "failed", "died", "silent"]
"""`stopped`: by Ctrl-C or a signal; `failed`: with an error. Only readers see `died` (its process is gone) and `silent`
(its process writes nothing, or is on another machine and has not written for a while)."""
UnixTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""No clock can show the time of a larger one, which the folder of another's run may have."""
ENDED: frozenset[State] = frozenset({"done", "stopped", "failed", "died"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The process that writes a status."""

    host: str
    pid: int
    started_s: float
    """Start of the process in seconds since the boot of its machine: another one may have the same number later."""
    boot: str = ""
    """Identifier of that boot."""
    namespace: int = 0
    """Its namespace of process numbers: a container may have the host name of its machine. 0: an older version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A line for the user. Text of models and endpoints is escaped already."""

    time_s: UnixTime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a run at one moment. Times are Unix times in seconds; counts are since the start of the run."""

    name: str
    total_steps: Count
    writer: Writer
    started_s: UnixTime
    written_s: UnixTime
    state: State = "starting"
    error: str = ""
    """Why it failed or was stopped."""
    step: Count = 0
    """Steps that are done."""
    left_s: float | None = None
    """Seconds until the last step is done, at the speed of the last ones; None if it is not known."""
    waits_for: str = ""
    """What the current step waits for."""
    now: list[str] = field(default_factory=list)
    """What has been going on for some seconds, one line per part."""
    news: list[News] = field(default_factory=list)
    """The newest lines for the user: parts that start, end, die and come back; warnings; evaluations."""
    recent: dict[str, list[float | None]] = field(default_factory=dict)
    """Metrics of the last steps, oldest first; None is an unknown value."""
    staleness: dict[Count, Count] = field(default_factory=dict)
    """Tokens of the last step by their staleness in versions."""
    episodes: dict[str, Count] = field(default_factory=dict)
    """Episodes by state: `queued`, `model` (waits for it), `environment`, `sandbox` (runs a command), `agent` (a loop
    of its own), `scoring`, and `ended` (waits to be trained)."""
    books: dict[str, Count] = field(default_factory=dict)
    """Trajectories and episodes by result, as the metrics `books/*`."""
    busy: dict[str, float] = field(default_factory=dict)
    """Share of the last minute in which `learner` and `servers` had work, 0 to 1."""
    servers: list[dict[str, float]] = field(default_factory=list)
    """Per server `up` (0 or 1) and, if it answers, `requests_running`, `requests_waiting` and `kv_cache_usage`."""
    versions: dict[str, Count] = field(default_factory=dict)
    """Weight version of `learner` and `servers`."""

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


def new_status(name: str, total_steps: int) -> RunStatus:
    """Return the first status of a run of this process."""
    now_s = time.time()
    pid = os.getpid()
    writer = Writer(
        host=socket.gethostname(),
        pid=pid,
        started_s=_started_s(psutil.Process(pid)),
        boot=_boot(),
        namespace=_namespace(),
    )
    return RunStatus(name=name, total_steps=total_steps, writer=writer, started_s=now_s, written_s=now_s)


def write(run_dir: Path, status: RunStatus) -> None:
    """Replace the status of a run; readers see the old one or the new one. Raises OSError."""
    path = run_dir / FILE_NAME
    partial = path.with_name(f".{FILE_NAME}.new")
    partial.write_bytes(msgspec.json.encode(status))
    partial.replace(path)


def read_status(run_dir: Path) -> RunStatus:
    """Read the status of a run; its state is `died` or `silent` if its process is gone or says nothing.

    Raises RunError if there is none, or it cannot be read.
    """
    path = run_dir / FILE_NAME
    try:
        status = decode(read_checked(path), RunStatus)
    except FileNotFoundError:
        raise RunError(f"{run_dir}: has no {FILE_NAME}: an older version wrote this run, or it never began") from None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{path}: is damaged or of another version: {error!s:.200}") from None
    if status.is_over:
        return status
    if _is_here(status.writer) and not _is_alive(status.writer):
        return replace(status, state="died")
    return replace(status, state="silent") if time.time() - status.written_s > SILENT_AFTER_S else status


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_here(writer: Writer) -> bool:
    """True if this process would see that one: all of an earlier boot are gone."""
    if writer.host != socket.gethostname():
        return False
    return writer.boot != _boot() or writer.namespace in (0, _namespace())


def _started_s(process: psutil.Process) -> float:
    """Return the seconds from the boot to the start of a process; in Unix time they change when the clock is set."""
    return float(process.create_time() - psutil.boot_time())


def _is_alive(writer: Writer) -> bool:
    try:
        process = psutil.Process(writer.pid)
        if writer.boot != _boot() or abs(_started_s(process) - writer.started_s) > ROUNDING_S:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
