"""What a pool counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_flash.sandboxes.result import Histogram, SandboxStats


@dataclass
class PoolStats:
    """Counts since the pool was made, and what is there now. Usage is of leases that have ended."""

    ready: int = 0
    starting: int = 0
    waiting: int = 0
    """Leases that wait for a start."""
    leased: int = 0
    closing: int = 0
    started: int = 0
    start_failures: int = 0
    leases: int = 0
    leases_expired: int = 0
    reused: int = 0
    not_reused: int = 0
    """With `reuse`: sandboxes that could not be made as good as new, and were closed."""
    reaped: int = 0
    """Containers, images and folders that dead controllers left, found and removed; builds that nobody uses."""
    sweep_failures: int = 0
    """Times that looking for them failed."""
    died_on_shelf: int = 0
    died_in_lease: int = 0
    """Sandboxes that could not tell their usage when their lease ended."""
    close_failures: int = 0
    commands: int = 0
    timeouts: int = 0
    truncations: int = 0
    oom_kills: int = 0
    cpu_s: float = 0.0
    start_s: Histogram = field(default_factory=Histogram)
    wait_s: Histogram = field(default_factory=Histogram)
    """From asking for a lease to having it."""
    lease_s: Histogram = field(default_factory=Histogram)
    exec_s: Histogram = field(default_factory=Histogram)
    peak_memory_mib: Histogram = field(default_factory=Histogram)
    cpu_of_lease_s: Histogram = field(default_factory=Histogram)
    """Processor time of each sandbox."""

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
        """Add what another pool counted."""
        for name, value in vars(other).items():
            if isinstance(value, Histogram):
                getattr(self, name).merge(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def as_metrics(self) -> dict[str, float]:
        """Flat numbers for a metrics file: counts as they are, histograms as mean, p50, p95 and maximum."""
        flat: dict[str, float] = {}
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                flat |= {f"{name}.mean": value.mean, f"{name}.p50": value.quantile(0.5)}
                flat |= {f"{name}.p95": value.quantile(0.95), f"{name}.max": value.largest}
            else:
                flat[name] = value
        return flat
