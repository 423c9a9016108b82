"""What counts only for a while: how often something went wrong lately, and how long something has been taking."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from typing import TypeVar

from roll_flash.errors import RunError

T = TypeVar("T")


class HangsError(RunError):
    """Something takes far longer than it ever took before."""


class RecentCount:
    """Events of the last `window_s` seconds. A limit on these stops what goes wrong in a row, however long the run."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times: deque[float] = deque()

    def add(self, now_s: float) -> int:
        """One more, now. Returns how many there are in the window, this one included."""
        self._times.append(now_s)
        return self.count(now_s)

    def clear(self) -> None:
        """What was counted so far does not count any more."""
        self._times.clear()

    def count(self, now_s: float) -> int:
        while self._times and now_s - self._times[0] > self._window_s:
            self._times.popleft()
        return len(self._times)


class LearnedDeadline:
    """A deadline for something that happens again and again: `factor` times what the slowest of the last `remember`
    times took for as much work, never less than `floor_s` nor more than `most_s`, which holds before the first."""

    def __init__(self, *, floor_s: float, most_s: float, factor: float = 10.0, remember: int = 20) -> None:
        self._floor_s = floor_s
        self._most_s = most_s
        self._factor = factor
        self._taken: deque[tuple[float, float]] = deque(maxlen=remember)
        """(seconds, size)."""

    def took(self, seconds: float, size: float = 1.0) -> None:
        """It happened once more, and took so long. With a size of 0 that says nothing about other times."""
        if size > 0:
            self._taken.append((seconds, size))

    async def bound(self, work: Awaitable[T], what: str, size: float = 1.0) -> T:
        """Await `work` within the deadline, and learn from how long it took. Raises HangsError when it is over."""
        started, limit_s = time.monotonic(), self.limit_s(size)
        try:
            async with asyncio.timeout(limit_s) as scope:
                result = await work
        except TimeoutError:
            if not scope.expired():
                raise
            longest_s = max((seconds for seconds, _ in self._taken), default=None)
            longest = "" if longest_s is None else f", while it took {longest_s:.0f} s at most before"
            raise HangsError(f"{what} did not end within {limit_s:.0f} s{longest}; it hangs") from None
        self.took(time.monotonic() - started, size)
        return result

    def limit_s(self, size: float = 1.0) -> float:
        """For work of this size, in any unit that is always the same; 0: nobody knows how much there is to do."""
        if not self._taken or not size:
            return self._most_s
        slowest = max(seconds / done for seconds, done in self._taken)
        return min(self._most_s, max(self._floor_s, self._factor * slowest * size))
