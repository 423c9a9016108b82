"""What each part of a run does and since when, and the rules that say when it stands still. No threads, no clock.

A part says with `doing` what it is about to wait for, and with `Activity.moved` that it gets on. How long that usually
takes is learned. Time counts only while somebody looks: while the event loop is held up, the laptop is suspended or the
driver is stopped, nobody can say anything about other parts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from roll_flash.processes.deadlines import LearnedDeadline

SHORTEST_S, FIRST_LINE_S = 20.0, 27.0
"""The first line comes within these seconds without progress: after FACTOR times what is usual. What usually takes so
long itself stands still after LEAST_FACTOR times that, and has a line about its waiting before."""
FACTOR, LEAST_FACTOR = 3.0, 2.0
UNKNOWN = "how long it usually takes is not known yet"
QUIET_S = 600.0
"""Seconds between two lines about a wait that is as long as usual."""
LONGEST_TICK_S = 3.0
"""Most seconds that count between two looks: in the rest nothing could run."""


@dataclass(slots=True, eq=False)
class _Kind:
    """One thing that one part does again and again."""

    usual: LearnedDeadline = field(default_factory=lambda: LearnedDeadline(floor_s=0.0, max_s=math.inf, factor=1.0))
    waited_line_s: float = -math.inf
    """When the last line about a usual wait was written."""
    since_s: float = -1.0
    """Beginning of the wait that has lines."""
    next_line_s: float = 0.0
    """Length of the wait at its next line."""
    stood_still: bool = False
    """True if the wait that has lines was called a standstill."""


@dataclass(slots=True, eq=False)
class Activity:
    """One part, and what it does or waits for. Times are those of `Activities`."""

    part: str
    what: str
    activities: Activities
    size: float = 1.0
    announced_s: float = 0.0
    """What it usually takes, as the user was told before; 0: nothing was said."""
    may_take_s: float = 0.0
    """What counts as usual until something was learned; 0: nothing does."""
    then: str = ""
    """What happens if it lasts: who acts, and when."""
    about: Callable[[], str] | None = None
    """Returns more to say of the wait."""
    since_s: float = 0.0

    def moved(self, took_s: float | None = None) -> None:
        """Note progress. `took_s`: how long such a wait takes; by default the time since the last progress."""
        now_s = self.activities.now_s
        self.activities.learn(self, now_s - self.since_s if took_s is None else took_s)
        self.since_s = now_s

    def begin(self) -> None:
        """Begin to wait, without progress so far."""
        self.since_s = self.activities.now_s


@dataclass(frozen=True, slots=True)
class Alarm:
    """A line to write. A part that `stands_still` is looked at; otherwise it waits as long as usual, or goes on."""

    activity: Activity
    silent_s: float
    usual_s: float | None
    stands_still: bool
    goes_on: bool = False

    def __str__(self) -> str:
        activity = self.activity
        if self.goes_on:
            return f"{activity.part} goes on after {self.silent_s:.0f} s"
        usual = f"usually at most {max(1.0, self.usual_s):.0f} s" if self.usual_s is not None else UNKNOWN
        state = "stands still" if self.stands_still else "waits"
        text = f"{activity.part} {state}: {activity.what} since {self.silent_s:.0f} s ({usual})"
        more = activity.about() if activity.about is not None else ""
        return "; ".join(part for part in (text, more, activity.then if self.stands_still else "") if part)


class Activities:
    """Everything that goes on in a run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds counted by `tick`."""
        self._running: list[Activity] = []
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def add(self, activity: Activity) -> None:
        activity.begin()
        self._running.append(activity)

    def remove(self, activity: Activity) -> None:
        self._running.remove(activity)

    def lines(self, at_least_s: float = 0.0) -> list[str]:
        """What goes on now, and has for `at_least_s`. May be called from another thread."""
        ages = [(each, self.now_s - each.since_s) for each in list(self._running)]
        return [f"{each.part}: {each.what} since {age_s:.0f} s" for each, age_s in ages if age_s >= at_least_s]

    def is_doing(self, part: str) -> bool:
        """True if this part does something now."""
        return any(each.part == part for each in self._running)

    def learn(self, activity: Activity, seconds: float) -> None:
        self._kind(activity).usual.record(seconds, activity.size)

    def tick(self, seconds: float) -> list[Alarm]:
        """Count the time since the last call; return what is to be said now."""
        self.now_s += min(seconds, LONGEST_TICK_S)
        oldest: dict[tuple[str, str], Activity] = {}
        for each in self._running:
            other = oldest.setdefault((each.part, each.what), each)
            oldest[each.part, each.what] = min(other, each, key=lambda activity: activity.since_s)
        gone_on = [alarm for name in self._kinds if (alarm := self._gone_on(name, oldest.get(name)))]
        return [*gone_on, *(alarm for each in oldest.values() if (alarm := self._look_at(each)))]

    def _kind(self, activity: Activity) -> _Kind:
        return self._kinds.setdefault((activity.part, activity.what), _Kind())

    def _look_at(self, activity: Activity) -> Alarm | None:
        kind, silent_s = self._kind(activity), self.now_s - activity.since_s
        if kind.since_s != activity.since_s:
            kind.since_s, kind.next_line_s = activity.since_s, 0.0
        usual_s = _usual_s(kind, activity)
        limit_s = _limit_s(usual_s)
        if silent_s >= max(limit_s, kind.next_line_s):
            kind.next_line_s, kind.stood_still = 2 * silent_s, True
            return Alarm(activity, silent_s, usual_s, stands_still=True)
        is_quiet = silent_s < max(FIRST_LINE_S, activity.announced_s)  # what was announced needs no line
        if not is_quiet and silent_s < limit_s and self.now_s - kind.waited_line_s >= QUIET_S:
            kind.waited_line_s = self.now_s
            return Alarm(activity, silent_s, usual_s, stands_still=False)
        return None

    def _gone_on(self, name: tuple[str, str], activity: Activity | None) -> Alarm | None:
        """Say of what stood still that it does no longer."""
        kind = self._kinds[name]
        if not kind.stood_still or (activity is not None and activity.since_s == kind.since_s):
            return None
        kind.stood_still = False
        silent_s = self.now_s - kind.since_s
        return Alarm(activity or Activity(*name, self), silent_s, None, stands_still=False, goes_on=True)


def _usual_s(kind: _Kind, activity: Activity) -> float | None:
    """The longest that it recently took for this size; None if that is not known."""
    learned_s = kind.usual.limit_s(activity.size)
    if learned_s < math.inf:
        return max(learned_s, activity.announced_s)
    return activity.announced_s or activity.may_take_s or None


def _limit_s(usual_s: float | None) -> float:
    if usual_s is None:
        return FIRST_LINE_S
    return max(min(max(FACTOR * usual_s, SHORTEST_S), FIRST_LINE_S), LEAST_FACTOR * usual_s)


_WATCHED: WeakKeyDictionary[asyncio.AbstractEventLoop, Activities] = WeakKeyDictionary()


@contextmanager
def watched(activities: Activities) -> Iterator[None]:
    """Within this block, `doing` on this event loop adds to `activities`."""
    loop = asyncio.get_running_loop()
    _WATCHED[loop] = activities
    try:
        yield
    finally:
        del _WATCHED[loop]


@contextmanager
def doing(
    part: str,
    what: str,
    *,
    size: float = 1.0,
    announced_s: float = 0.0,
    may_take_s: float = 0.0,
    then: str = "",
    about: Callable[[], str] | None = None,
    learns: bool = True,
) -> Iterator[Activity]:
    """Tell the watchdog of this event loop, if there is one, what a part does within the block. Durations are learned
    per `part`, `what` and unit of `size`. Not `learns`: only `Activity.moved` says what is usual."""
    activities = _WATCHED.get(asyncio.get_running_loop()) or Activities()
    activity = Activity(part, what, activities, size, announced_s, may_take_s, then, about)
    activities.add(activity)
    try:
        yield activity
        if learns:
            activity.moved()
    finally:
        activities.remove(activity)
