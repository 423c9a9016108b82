"""Keeps the status of a run of this process, and writes it to its folder once a second, from a thread: also while the
event loop is held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from roll_flash.monitor.status import NEWS, RECENT_STEPS, News, new_status, write
from roll_flash.terminal import one_line

EVERY_S = 1.0
LONGEST_LINE = 500
"""Most characters of a line of news or of an error: text of a model or an endpoint may be long."""


class StatusWriter:
    """`status` is the newest; all methods may be called from any thread."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self.status = new_status(run_dir.resolve().name, total_steps)
        self.activities: Callable[[], Sequence[str]] = lambda: ()
        """Returns what goes on now, one line per part."""
        self._run_dir = run_dir
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, after_each: Callable[[], None], on_error: Callable[[str], None]) -> None:
        """Write until `end`. `after_each` is called after each time; `on_error` when a disk first refuses."""
        arguments = (after_each, on_error)
        self._thread = threading.Thread(target=self._run, args=arguments, name="status", daemon=True)
        self._thread.start()

    def change(self, **fields: object) -> None:
        """Replace fields of the status."""
        with self._lock:
            self.status = replace(self.status, **fields)  # type: ignore[arg-type]

    def add_news(self, text: str) -> None:
        news = News(time_s=time.time(), text=_bounded(text))
        with self._lock:
            self.change(news=[*self.status.news, news][-NEWS:])

    def add_step(self, step: int, metrics: Mapping[str, float], left_s: float, staleness: Mapping[int, int]) -> None:
        """Note a finished step and these of its metrics."""
        with self._lock:
            before = self.status.recent
            recent = {name: [*before.get(name, ()), value][-RECENT_STEPS:] for name, value in metrics.items()}
            self.change(step=step, left_s=left_s, recent=recent, staleness=dict(staleness), waits_for="")

    def end(self, error: BaseException | None) -> None:
        """Write the last status. Safe to call twice."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        stopped = isinstance(error, KeyboardInterrupt)
        self.change(
            state="done" if error is None else "stopped" if stopped else "failed",
            error="" if error is None or stopped else _bounded(str(error) or type(error).__name__),
            now=[],
        )
        self._write()

    def _run(self, after_each: Callable[[], None], on_error: Callable[[str], None]) -> None:
        was_written = True
        while not self._is_over.wait(EVERY_S):
            self.change(now=[_bounded(line) for line in self.activities()])
            error = self._write()
            if error is not None and was_written:
                on_error(f"status.json cannot be written: {error.strerror}")
            was_written = error is None
            after_each()

    def _write(self) -> OSError | None:
        self.change(written_s=time.time())
        try:
            write(self._run_dir, self.status)
        except OSError as error:  # a full disk must not end the run
            return error
        return None


def _bounded(text: str) -> str:
    return one_line(text[: 2 * LONGEST_LINE])[:LONGEST_LINE]
