"""Progress output of a run: one line per step, and a live status line in between on a terminal.

The step lines are the same on a terminal, in a pipe and in a CI log; the live line exists only on a terminal.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from roll_flash.monitor.metrics import (
    REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    STEP_S,
    SUCCESS,
    TOKENS_PER_S,
    Metrics,
    flatten,
)
from roll_flash.terminal import one_line, printable

RECENT_STEPS = 8


class Progress:
    """Print to `stream` (standard output). Step times come from the metric `step_s`, else from a clock."""

    def __init__(self, total_steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        """`first_step`: number of steps done before by the resumed run."""
        self._total = total_steps
        self._done = first_step
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_s = time.monotonic()
        self._live: Status | None = None

    def step(self, step: int, metrics: Metrics) -> None:
        """Report that `step` (counted from 1) is done."""
        flat = flatten(metrics)
        now = time.monotonic()
        seconds = flat.get(STEP_S, now - self._last_s)
        self._last_s = now
        self._recent.append(seconds)
        self._done = step
        self._print(self._line(step, flat, seconds))

    def status(self, text: str) -> None:
        """Replace the live line; print nothing if there is no terminal."""
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = self._console.status(Text(one_line(text)), spinner="dots")
            self._live.start()
        else:
            self._live.update(Text(one_line(text)))

    def note(self, text: str) -> None:
        """Print a permanent line: set-up steps, warnings, evaluations."""
        self._print(Text(printable(text)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, line: Text) -> None:
        self._console.print(line)
        self._console.file.flush()

    def _line(self, step: int, flat: dict[str, float], seconds: float) -> Text:
        width = len(str(self._total))
        line = Text(f"step {step:>{width}}/{self._total}", style="bold")
        parts = [
            (f"reward {flat[REWARD]:.3f}", "green") if REWARD in flat else None,
            (f"success {flat[SUCCESS]:.2f}", "green") if SUCCESS in flat else None,
            (_staleness(flat), "") if STALENESS_MEAN in flat else None,
            (f"{flat[TOKENS_PER_S]:,.0f} tok/s", "") if TOKENS_PER_S in flat else None,
            (f"{seconds:.1f} s", ""),
            (f"{duration(self._left_s())} left", "cyan") if step < self._total else None,
        ]
        for part in parts:
            if part is not None:
                line.append("  ").append(part[0], style=f"not bold {part[1]}")
        return line

    def _left_s(self) -> float:
        return (self._total - self._done) * sum(self._recent) / len(self._recent)


def _staleness(flat: dict[str, float]) -> str:
    most = f" (max {flat[STALENESS_MAX]:.0f})" if STALENESS_MAX in flat else ""
    return f"staleness {flat[STALENESS_MEAN]:.2f}{most}"


def duration(seconds: float) -> str:
    """Format seconds as `48 s`, `6 min 48 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
