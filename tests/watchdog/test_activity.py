"""The rules of the watchdog, on a clock that only the test moves."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from roll_flash.watchdog.activity import (
    FIRST_LINE_S,
    LEAST_FACTOR,
    LONGEST_TICK_S,
    SHORTEST_S,
    Activities,
    Activity,
    Alarm,
    doing,
)


def run(activities: Activities, seconds: float) -> list[tuple[float, Alarm]]:
    """Let time pass in steps of a second; return the alarms with the times at which they came."""
    began_s = activities.now_s
    found: list[tuple[float, Alarm]] = []
    while activities.now_s - began_s < seconds:
        alarms = activities.tick(1.0)
        found += [(activities.now_s - began_s, alarm) for alarm in alarms]
    return found


def does_once(activities: Activities, seconds: float, part: str = "the learner", what: str = "micro-batch") -> Activity:
    """Do something that takes so long, and remember it."""
    activity = Activity(part, what, activities)
    activities.add(activity)
    run(activities, seconds)
    activity.moved()
    activities.remove(activity)
    activities.tick(0.0)  # if it stood still, it goes on
    return activity


def begins(activities: Activities, part: str = "the learner", what: str = "micro-batch", **more: object) -> Activity:
    activity = Activity(part, what, activities, **more)  # type: ignore[arg-type]
    activities.add(activity)
    return activity


@given(usual_s=st.one_of(st.none(), st.integers(0, 900)))
def test_whatever_lasts_has_a_first_line_within_thirty_seconds(usual_s: int | None) -> None:
    activities = Activities()
    if usual_s is not None:
        does_once(activities, usual_s)
    activities.now_s += 10_000.0  # the last line is long ago
    begins(activities)
    first_s, _ = run(activities, 40)[0]
    assert SHORTEST_S <= first_s <= 30


def test_what_takes_long_because_it_usually_does_waits_and_does_not_stand_still() -> None:
    activities = Activities()
    does_once(activities, 600)
    episodes = begins(activities, about=lambda: "waiting for 12 episodes, the oldest (7-3) since 41 s")
    alarms = run(activities, 600)
    assert [alarm.stands_still for _, alarm in alarms] == [False]
    assert str(alarms[0][1]).startswith(
        "the learner waits: micro-batch since 27 s (usually at most 600 s); waiting for 12"
    )
    later = run(activities, 700)
    assert [(int(at_s) + 600, alarm.stands_still) for at_s, alarm in later if alarm.stands_still] == [(1200, True)]
    assert LEAST_FACTOR * 600 == 1200
    activities.remove(episodes)


def test_what_is_usually_quick_stands_still_after_twenty_seconds_and_is_named_again_ever_more_seldom() -> None:
    activities = Activities()
    does_once(activities, 2)
    begins(activities, then="the run ends after 300 s")
    alarms = run(activities, 200)
    assert [round(at_s) for at_s, _ in alarms] == [20, 40, 80, 160]
    assert all(alarm.stands_still for _, alarm in alarms)
    line = "the learner stands still: micro-batch since 20 s (usually at most 2 s); the run ends after 300 s"
    assert str(alarms[0][1]) == line


def test_slow_episodes_wait_from_the_first_one_on() -> None:
    activities = Activities()
    rollout = begins(activities, "the rollout", "no episode ended", may_take_s=600.0)
    assert [alarm.stands_still for _, alarm in run(activities, 300)] == [False]
    rollout.moved(299.0)
    assert run(activities, 300) == [], "a second line would say nothing new"


def test_what_was_announced_to_take_long_has_no_line_before_that() -> None:
    activities = Activities()
    begins(activities, "the start", "servers are not ready", announced_s=180.0)
    alarms = run(activities, 400)
    assert [(at_s, alarm.stands_still) for at_s, alarm in alarms] == [(180, False), (360, True)]


def test_more_work_may_take_longer() -> None:
    activities = Activities()
    does_once(activities, 10)
    begins(activities, size=10.0)
    assert not [alarm for _, alarm in run(activities, 190) if alarm.stands_still]


def test_a_part_that_goes_on_is_said_once() -> None:
    activities = Activities()
    worker = begins(activities, "worker 0", "no answer", announced_s=2.0)
    assert len(run(activities, 25)) == 1
    worker.moved()
    assert [str(alarm) for _, alarm in run(activities, 10)] == ["worker 0 goes on after 26 s"]


def test_a_part_that_is_closed_while_it_stands_still_is_said_once() -> None:
    activities = Activities()
    worker = begins(activities, "worker 0", "no answer", announced_s=2.0)
    run(activities, 25)
    activities.remove(worker)
    assert [alarm.goes_on for _, alarm in run(activities, 10)] == [True]


def test_a_part_that_answers_is_never_named() -> None:
    activities = Activities()
    worker = begins(activities, "worker 0", "no answer", announced_s=2.0)
    for _ in range(300):
        assert run(activities, 2) == []
        worker.moved()


def test_time_in_which_the_driver_itself_was_stopped_does_not_count() -> None:
    activities = Activities()
    begins(activities, "worker 0", "no answer", announced_s=2.0)
    assert activities.tick(3600.0) == []
    assert activities.now_s == LONGEST_TICK_S


def test_an_unknown_duration_is_looked_at_and_says_so() -> None:
    activities = Activities()
    begins(activities)
    ((at_s, alarm),) = run(activities, 40)
    assert at_s == FIRST_LINE_S
    assert alarm.stands_still
    assert "how long it usually takes is not known yet" in str(alarm)


def test_two_of_one_kind_are_one_standstill() -> None:
    activities = Activities()
    begins(activities, "the evaluation", "no episode ended")
    run(activities, 5)
    begins(activities, "the evaluation", "no episode ended")
    assert len(run(activities, 40)) == 1


def test_without_a_watchdog_nothing_is_needed() -> None:
    async def work() -> None:
        with doing("the learner", "micro-batch") as activity:
            activity.moved()

    asyncio.run(work())


def test_what_goes_on_is_listed_once_it_has_lasted() -> None:
    activities = Activities()
    begins(activities, "server 0", "it starts again")
    run(activities, 5)
    begins(activities)
    run(activities, 2)
    assert activities.lines() == ["server 0: it starts again since 7 s", "the learner: micro-batch since 2 s"]
    assert activities.lines(3.0) == ["server 0: it starts again since 7 s"]
    assert activities.is_doing("the learner")
    assert not activities.is_doing("server 1")
