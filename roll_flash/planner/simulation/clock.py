"""Virtual time: events in order, each a function and its argument."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """The time and the events to come. Events of the same time happen in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """Number of events so far."""
        self._waiting: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        """True while an event is left."""
        return bool(self._waiting)

    def at(self, time_s: float, handle: Callable[[Any], None], argument: Any = None) -> None:
        heapq.heappush(self._waiting, (time_s, next(self._order), handle, argument))

    def after(self, delay_s: float, handle: Callable[[Any], None], argument: Any = None) -> None:
        self.at(self.now_s + delay_s, handle, argument)

    def soon(self, delay_s: float, handle: Callable[[Any], None], argument: Any = None) -> None:
        """Like `after`, but without a delay it happens now."""
        if delay_s > 0:
            self.after(delay_s, handle, argument)
        else:
            handle(argument)

    def next(self) -> tuple[Callable[[Any], None], Any]:
        """Move to the next event and return it."""
        self.now_s, _, handle, argument = heapq.heappop(self._waiting)
        self.events += 1
        return handle, argument
