"""Progress output of a run: one line per step, and a live status line in between on a terminal.

The step lines are the same on a terminal, in a pipe and in a CI log; the live line exists only on a terminal.
"""

from __future__ import annotations

import sys
from collections import deque
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
    as_numbers,
)
from roll_flash.terminal import one_line, printable

RECENT_STEPS = 8


class Progress:
    """Print to `stream` (standard output)."""

    def __init__(self, total_steps: int, *, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._live: Status | None = None

    def step(self, step: int, metrics: Metrics) -> None:
        """Report that `step` (counted from 1) is done."""
        numbers = as_numbers(metrics)
        self._recent.append(numbers[STEP_S])
        self._print(self._line(step, numbers))

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, line: Text) -> None:
        self._console.print(line)
        self._console.file.flush()

    def _line(self, step: int, numbers: dict[str, float]) -> Text:
        width = len(str(self._total))
        left_s = (self._total - step) * sum(self._recent) / len(self._recent)
        line = Text(f"step {step:>{width}}/{self._total}", style="bold")
        parts = [(f"reward {numbers[REWARD]:.3f}", "green")]
        if SUCCESS in numbers:
            parts.append((f"success {numbers[SUCCESS]:.2f}", "green"))
        parts.append((f"staleness {numbers[STALENESS_MEAN]:.2f} (max {numbers[STALENESS_MAX]:.0f})", ""))
        parts.append((f"{numbers[TOKENS_PER_S]:,.0f} tok/s", ""))
        parts.append((f"{numbers[STEP_S]:.1f} s", ""))
        if step < self._total:
            parts.append((f"{duration(left_s)} left", "cyan"))
        for text, style in parts:
            line.append("  ").append(text, style=f"not bold {style}")
        return line


def duration(seconds: float) -> str:
    """Format seconds as `48 s`, `6 min 48 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
