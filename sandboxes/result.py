"""What a command gives back."""

from __future__ import annotations

from dataclasses import dataclass

from roll_flash.sandboxes.histogram import Histogram


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The end of one command. When output was cut, `stdout`/`stderr` hold head, a line that says so, and tail."""

    exit_code: int
    """Of the command; 128 + signal if a signal ended it, 127 not found, 126 found but not startable."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """The time-out ended it; the output up to then is here."""
    truncated: bool = False
    stdout_bytes: int = 0
    """How much the command really wrote."""
    stderr_bytes: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    """Of the first process and those it waited for."""
    peak_memory_kb: int = 0
    """Largest resident size of one of those processes."""
    signal: int | None = None
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def stdout_text(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of a stream, as it came."""

    source: str
    """`stdout` or `stderr`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """What a sandbox uses now and has used at most. None where the provider cannot tell."""

    memory_bytes: int | None
    peak_memory_bytes: int | None
    cpu_s: float | None
    pids: int | None
    oom_kills: int | None
    commands: int
    """Commands started so far."""
    timeouts: int
    truncations: int
    exec_s: Histogram
    """How long the commands took."""
