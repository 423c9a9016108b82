"""Time: a clock that is never set, counts of recent events, timeouts learned from recent durations, and idle times of
processes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Iterable
from typing import TypeVar

import psutil

from roll_flash.errors import RunError

T = TypeVar("T")


class HungError(RunError):
    """An operation takes far longer than ever before."""


class SteadyClock:
    """Unix time as the machine's clock had it when this one began, plus the seconds since: differences are durations,
    also if the machine's clock is set meanwhile."""

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._ahead_s + time.monotonic()


class RecentCount:
    """Events of the last `window_s` seconds. A limit on them stops frequent failures, however long the run is."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times: deque[float] = deque()

    def add(self, now_s: float) -> int:
        """Add an event; return the number of events in the window, including this one."""
        self._times.append(now_s)
        return self.count(now_s)

    def clear(self) -> None:
        """Forget all events."""
        self._times.clear()

    def count(self, now_s: float) -> int:
        while self._times and now_s - self._times[0] > self._window_s:
            self._times.popleft()
        return len(self._times)


DEADLINE_FACTOR, REMEMBERED_DURATIONS = 10.0, 20


class LearnedDeadline:
    """Timeout of a repeated operation: `factor` times the slowest of the last 20 times per unit of work, at least
    `floor_s` and at most `max_s`; `max_s` until the first one has ended."""

    def __init__(self, *, floor_s: float, max_s: float, factor: float = DEADLINE_FACTOR) -> None:
        self._floor_s = floor_s
        self._max_s = max_s
        self._factor = factor
        self._durations: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_DURATIONS)
        """(seconds, size)."""

    def record(self, seconds: float, size: float = 1.0) -> None:
        """Record a duration in seconds. A size of 0 says nothing about other operations, and is ignored."""
        if size > 0:
            self._durations.append((seconds, size))

    async def run(self, work: Awaitable[T], what: str, size: float = 1.0) -> T:
        """Await `work` within the timeout, and learn from its duration. Raises HungError if the time is over."""
        started, limit_s = time.monotonic(), self.limit_s(size)
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                result = await work
        except TimeoutError:
            if not scope.expired():
                raise
            longest_s = max((seconds for seconds, _ in self._durations), default=None)
            longest = "" if longest_s is None else f", while it took {longest_s:.0f} s at most before"
            raise HungError(f"{what} did not end within {limit_s:.0f} s{longest}; it hangs") from None
        self.record(time.monotonic() - started, size)
        return result

    def limit_s(self, size: float = 1.0) -> float:
        """Timeout in seconds for work of this size, always in the same unit; 0 means unknown size."""
        if not self._durations or not size:
            return self._max_s
        slowest = max(seconds / done for seconds, done in self._durations)
        return min(self._max_s, max(self._floor_s, self._factor * slowest * size))


IDLE_CORES = 0.1
"""A process that waits for work uses less than this, also with the threads of Ray in it."""


class Idleness:
    """How long processes have done nothing: they used no core, waited for no core and for no disk, and were not stopped
    by a signal."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Raises psutil.NoSuchProcess."""
        self._processes = [psutil.Process(pid) for pid in pids]
        self.begin_again()

    def begin_again(self) -> None:
        self._since_s, self._used_s = time.monotonic(), self._core_seconds()

    def idle_s(self) -> float:
        """Return the seconds since they last did something, as far as it was seen by calling this often. Raises
        psutil.NoSuchProcess."""
        idle_s = time.monotonic() - self._since_s
        if self._core_seconds() - self._used_s > IDLE_CORES * (1 + idle_s) or any(
            process.status() != psutil.STATUS_SLEEPING for process in self._processes
        ):
            self.begin_again()
            return 0.0
        return idle_s

    def _core_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(float(each.user + each.system) for each in times)
