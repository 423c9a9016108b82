"""A run that learns nothing says so: since when, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from roll_flash.scheduling.signal_watch import SignalWatch


def groups(*rewards: Sequence[float]) -> list[Any]:
    return [SimpleNamespace(trajectories=[SimpleNamespace(reward=r) for r in group]) for group in rewards]


def notices(watch: SignalWatch, steps: Sequence[list[Any]]) -> dict[int, str]:
    found = {number: watch.step(number, step) for number, step in enumerate(steps, 1)}
    return {number: notice for number, notice in found.items() if notice}


def test_five_steps_without_signal_are_told_with_their_first_and_then_more_seldom() -> None:
    nothing = groups([0.0, 0.0], [0.0, 0.0])
    found = notices(SignalWatch(), [groups([0.0, 1.0]), *[nothing] * 21])
    assert list(found) == [6, 11, 21]
    assert found[6].startswith(
        "warning: nothing is learnt since step 2: every episode earned 0. Look at the transcripts"
    )
    assert "warm_start" in found[6]
    assert "since step 2:" in found[21]


def test_one_group_with_signal_is_enough_and_ends_the_warning() -> None:
    nothing, something = groups([0.0, 0.0]), groups([0.0, 0.0], [0.0, 0.5])
    assert notices(SignalWatch(), [nothing, something] * 10) == {}
    found = notices(SignalWatch(), [*[nothing] * 5, something, *[nothing] * 4])
    assert list(found) == [5, 6]
    assert found[6] == "step 6: replicas earn different rewards again"


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (groups([1.0, 1.0], [1.0, 1.0]), "every episode earned 1. If that is the most, the tasks are solved"),
        (groups([1.0, 1.0], [0.0, 0.0]), "all replicas of a task earn the same, though tasks differ"),
    ],
)
def test_the_rewards_decide_what_is_advised(step: list[Any], why: str) -> None:
    assert why in notices(SignalWatch(), [step] * 5)[5]


def test_where_a_whole_step_is_compared_tasks_that_differ_are_a_signal() -> None:
    step = groups([1.0, 1.0], [0.0, 0.0])
    assert notices(SignalWatch(within_groups=False), [step] * 10) == {}
    assert list(notices(SignalWatch(within_groups=False), [groups([1.0, 1.0])] * 9)) == [5]


def test_a_step_without_groups_counts_for_nothing() -> None:
    assert notices(SignalWatch(), [[]] * 20) == {}
