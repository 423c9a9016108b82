"""Metrics of a run for other systems, beside `metrics.jsonl`.

Each system has a thread and a bounded queue of its own, so that one that is slow or dead neither holds up the run nor
ends it: what it does not take is dropped and counted, and said once.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from roll_flash.errors import ConfigError, first_line
from roll_flash.monitor.exporters.config_values import leaves, without_secrets
from roll_flash.monitor.exporters.systems import EXPORTERS, Config, Exporter, Values
from roll_flash.terminal import one_line

MOST_WAITING = 256
"""Most points that wait for one system; a point is what one call of `MetricsLog.log` logs."""
CLOSES_WITHIN_S = 20.0
"""Seconds in which all systems together have to take what still waits at the end of a run."""


def check_exporters(names: Iterable[str]) -> None:
    """Import what these need. Raises ConfigError with what to install."""
    for name in names:
        _, module, packages = EXPORTERS[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"monitor.export: {name}: {first_line(error)}; pip install {packages}") from None


class Exports:
    """The systems that get the metrics of a run. `note`, called from any thread, prints a line."""

    def __init__(self, exporters: Mapping[str, Exporter], note: Callable[[str], None]) -> None:
        self._threads = [_Export(name, exporter, note) for name, exporter in exporters.items()]

    @classmethod
    def of(cls, config: Config, run_folder: Path, note: Callable[[str], None]) -> Exports:
        """Start those of `monitor.export`. What they send of the config has no secrets."""
        shown = without_secrets(config)
        return cls({name: EXPORTERS[name][0](run_folder, shown) for name in config["monitor"]["export"]}, note)

    def log(self, step: int, time_s: float, values: Values) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for thread in self._threads:
            thread.add((step, time_s, {**finite, "step": float(step)}))

    def metrics(self) -> dict[str, float]:
        """Number of points that each system did not take, where there are any."""
        return {f"export/dropped_{each.name}": float(each.dropped) for each in self._threads if each.dropped}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Note the summary of a run that is complete, for `close`."""
        found = dict(leaves(summary, "summary", "/"))
        numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
        largest = sys.float_info.max  # also says no to nan, and to integers that float does not hold
        for thread in self._threads:
            thread.summary = {name: float(value) for name, value in numbers.items() if -largest <= value <= largest}

    def close(self) -> None:
        """Send what waits, and end within CLOSES_WITHIN_S in any case."""
        deadline_s = time.monotonic() + CLOSES_WITHIN_S
        for thread in self._threads:
            thread.points.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            thread.say_what_was_lost()


class _Export(threading.Thread):
    """Gives points to one system. A daemon: a library that never returns does not keep the process."""

    def __init__(self, name: str, exporter: Exporter, note: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.points: SimpleQueue[tuple[int, float, Values] | None] = SimpleQueue()
        self.dropped = self._added = self._settled = 0
        self.summary: Values | None = None
        self._exporter, self._note, self._is_open, self._is_known = exporter, note, False, False
        self._lock = threading.Lock()
        self.start()

    def add(self, point: tuple[int, float, Values]) -> None:
        if self._added - self._settled < MOST_WAITING:
            self._added += 1
            self.points.put(point)
        else:
            self._lose(1, f"{MOST_WAITING} points wait for it")

    def say_what_was_lost(self) -> None:
        if self.is_alive():
            self._lose(self._added - self._settled, f"it did not end within {CLOSES_WITHIN_S:g} s")
        if self.dropped:
            self._note(f"{self.name} did not get {self.dropped} points of metrics.jsonl, which has all")

    def run(self) -> None:
        self._try(0, self._open)
        while (point := self.points.get()) is not None:
            self._try(1, self._open, partial(self._exporter.log, *point))
            self._settled += 1
        if self._is_open:
            self._is_known = False  # a failure at the end is said even after others
            self._try(0, partial(self._exporter.close, self.summary))

    def _open(self) -> None:
        if not self._is_open:
            self._exporter.open()
            self._is_open = True

    def _try(self, points: int, *calls: Callable[[], None]) -> None:
        try:
            for call in calls:
                call()
        except BaseException as error:  # a library may raise anything, also SystemExit
            self._lose(points, without_secrets(f"{type(error).__name__}: {first_line(error)}"))

    def _lose(self, points: int, reason: str) -> None:
        """Count lost points, and say the first reason of the run, and that of its end."""
        with self._lock:
            is_first, self._is_known = not self._is_known, True
            self.dropped += points
        if is_first:
            self._note(f"{self.name} does not take the metrics ({one_line(reason[:300])}); the run goes on")
