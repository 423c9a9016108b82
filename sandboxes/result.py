"""Results of commands, and usage statistics of sandboxes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of one command. If output was cut, `stdout`/`stderr` hold the head, a notice line and the tail."""

    exit_code: int
    """Exit code of the command; 128 + signal if a signal ended it, 127 not found, 126 found but not startable."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """True if the timeout ended the command; its output so far is kept."""
    truncated: bool = False
    stdout_bytes: int = 0
    """Number of bytes that the command wrote, including cut output."""
    stderr_bytes: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    """Processor seconds of the first process and of the children it waited for."""
    peak_memory_kb: int = 0
    """Largest resident size in KiB of one of those processes."""
    signal: int | None = None

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
    """A piece of an output stream, as received."""

    source: str
    """`stdout` or `stderr`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """Current, peak and total resource usage of a sandbox. None if the provider cannot measure it."""

    memory_bytes: int | None
    peak_memory_bytes: int | None
    cpu_s: float | None
    pids: int | None
    oom_kills: int | None
    commands: int
    """Number of commands that ended so far."""
    timeouts: int
    truncations: int
    exec_s: Histogram
    """Durations of the commands in seconds."""


SMALLEST = 1e-5
BUCKETS = 64
PER_DOUBLING = 2


@dataclass(slots=True)
class Histogram:
    """Histogram of values from SMALLEST up; quantiles are accurate within a factor of 2 ** (1 / PER_DOUBLING)."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, value: float) -> None:
        bucket = 0 if value <= SMALLEST else int(math.log2(value / SMALLEST) * PER_DOUBLING) + 1
        self.counts[min(bucket, BUCKETS - 1)] += 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)

    def merge(self, other: Histogram) -> None:
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bucket at or below which `share` (0 to 1) of the values lie; 0 if empty."""
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= share * self.count:
                return float(min(self.largest, SMALLEST * 2 ** (bucket / PER_DOUBLING)))
        return 0.0
