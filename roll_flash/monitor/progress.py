"""Progress output of a run: one line per step, and on a terminal a live view below the lines.

The lines are the same on a terminal, in a pipe and in a CI log; the live view exists only on a terminal.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.text import Text

from roll_flash.monitor.metrics import (
    REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    STEP_S,
    SUCCESS,
    TOKENS_PER_S,
    WEIGHTS_S,
    Metrics,
    as_numbers,
)
from roll_flash.monitor.status_view import StatusView, duration
from roll_flash.monitor.status_writer import StatusWriter
from roll_flash.terminal import one_line, printable

RECENT_STEPS = 8
SHOWN = (REWARD, SUCCESS, STALENESS_MEAN, STALENESS_MAX, TOKENS_PER_S, STEP_S, WEIGHTS_S)
"""Metrics whose last values are in the status of a run."""


class Progress:
    """Print to `stream` (standard output), and keep the status of the run whose folder is `run_folder`, if any."""

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, run_folder: Path | None = None) -> None:
        self._total = total_steps
        self._console = Console(file=stream or sys.stdout, highlight=False)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._spinner: Status | None = None
        self._writer = None if run_folder is None else StatusWriter(run_folder, total_steps)
        self._view: LiveView | None = None
        self._warnings = _Warnings(self._add_news)

    def step(self, step: int, metrics: Metrics, staleness: Mapping[int, int] | None = None) -> None:
        """Report that `step` (counted from 1) is done. `staleness`: number of its tokens by staleness in versions."""
        numbers = as_numbers(metrics)
        self._recent.append(numbers[STEP_S])
        left_s = (self._total - step) * sum(self._recent) / len(self._recent)
        self._print(self._line(step, numbers, left_s))
        if self._writer is not None:
            shown = {name: numbers[name] for name in SHOWN if name in numbers}
            self._writer.add_step(step, shown, left_s, staleness or {})

    def status(self, text: str) -> None:
        """Say what the run waits for, where there is a live view or a status."""
        if self._writer is not None:
            self._writer.change(waits_for=one_line(text))
        elif not self._console.is_terminal:
            return
        elif self._spinner is None:
            self._spinner = self._console.status(Text(one_line(text)), spinner="dots")
            self._spinner.start()
        else:
            self._spinner.update(Text(one_line(text)))

    def note(self, text: str) -> None:
        """Print a permanent line: set-up steps, warnings, evaluations."""
        self._print(Text(printable(text)))
        self._add_news(text)

    def show(self, **fields: object) -> None:
        """Replace fields of the run's status (`RunStatus`)."""
        if self._writer is not None:
            self._writer.change(**fields)

    def watch(self, activities: Callable[[], Sequence[str]]) -> None:
        """Show what goes on: one line per part, as these `activities` return at any time."""
        if self._writer is not None:
            self._writer.activities = activities

    def close(self, error: BaseException | None = None) -> None:
        """End the live view and the status; `error`: why the run ended early."""
        if self._writer is not None:
            logging.getLogger("roll_flash").removeHandler(self._warnings)
            self._writer.end(error)
        for shown in (self._view, self._spinner):
            if shown is not None:
                shown.stop()
        self._view = self._spinner = None

    def __enter__(self) -> Progress:
        if self._writer is not None:
            logging.getLogger("roll_flash").addHandler(self._warnings)
            if self._console.is_terminal:
                self._view = LiveView(self._console, self._writer)
            self._writer.start(self._refresh, self.note)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(error)

    def _refresh(self) -> None:
        if self._view is not None:
            self._view.refresh()

    def _add_news(self, text: str) -> None:
        if self._writer is not None:
            self._writer.add_news(text)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)
        self._console.file.flush()

    def _line(self, step: int, numbers: dict[str, float], left_s: float) -> Text:
        width = len(str(self._total))
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


class LiveView:
    """The status below the lines of a terminal. The cursor stays visible: a killed process could not show it again."""

    def __init__(self, console: Console, writer: StatusWriter) -> None:
        self._console = console
        self._live = Live(
            get_renderable=lambda: StatusView(writer.status), console=console, auto_refresh=False, transient=True
        )
        self._live.start(refresh=True)
        console.show_cursor(True)

    def refresh(self) -> None:
        self._live.refresh()

    def stop(self) -> None:
        self._live.stop()


class _Warnings(logging.Handler):
    """Passes warnings of this process on: a part that died, was started again, is back. Prints them as logging does
    where nobody configured it, which having a handler turns off."""

    def __init__(self, add_news: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._add_news = add_news

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)
        self._add_news(record.getMessage())
