"""Statistics of a sandbox pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_flash.sandboxes.result import Histogram, SandboxStats


@dataclass
class PoolStats:
    """Counts since the creation of the pool, and its current state. Usage covers leases that have ended."""

    ready: int = 0
    starting: int = 0
    waiting: int = 0
    """Number of leases that wait for a sandbox to start."""
    leased: int = 0
    closing: int = 0
    started: int = 0
    start_failures: int = 0
    leases: int = 0
    leases_expired: int = 0
    reused: int = 0
    not_reused: int = 0
    """With `reuse`: number of sandboxes closed because their reset failed."""
    reaped: int = 0
    """Number of removed leftovers of dead controllers (containers, images, folders) and of removed unused builds."""
    sweep_failures: int = 0
    """Number of failed searches for leftovers."""
    died_while_ready: int = 0
    died_in_lease: int = 0
    """Number of sandboxes that could not report their usage at the end of their lease."""
    close_failures: int = 0
    commands: int = 0
    timeouts: int = 0
    truncations: int = 0
    oom_kills: int = 0
    cpu_s: float = 0.0
    start_s: Histogram = field(default_factory=Histogram)
    wait_s: Histogram = field(default_factory=Histogram)
    """Seconds from the request for a lease to its start."""
    lease_s: Histogram = field(default_factory=Histogram)
    exec_s: Histogram = field(default_factory=Histogram)
    peak_memory_mib: Histogram = field(default_factory=Histogram)
    cpu_of_lease_s: Histogram = field(default_factory=Histogram)
    """Processor seconds of each lease."""

    def note_usage(self, usage: SandboxStats) -> None:
        self.commands += usage.commands
        self.timeouts += usage.timeouts
        self.truncations += usage.truncations
        self.oom_kills += usage.oom_kills or 0
        self.cpu_s += usage.cpu_s or 0.0
        self.exec_s.merge(usage.exec_s)
        if usage.cpu_s is not None:
            self.cpu_of_lease_s.add(usage.cpu_s)
        if usage.peak_memory_bytes is not None:
            self.peak_memory_mib.add(usage.peak_memory_bytes / 2**20)

    def merge(self, other: PoolStats) -> None:
        """Add the counts of another pool."""
        for name, value in vars(other).items():
            if isinstance(value, Histogram):
                getattr(self, name).merge(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def as_metrics(self) -> dict[str, float]:
        """Return flat numbers for a metrics file: counts, and mean, p50, p95 and maximum of each histogram."""
        flat: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                flat |= {f"{name}.mean": value.mean, f"{name}.p50": value.quantile(0.5)}
                flat |= {f"{name}.p95": value.quantile(0.95), f"{name}.max": value.largest}
            else:
                flat[name] = value
        return flat
