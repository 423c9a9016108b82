"""The controller of alpha against steps that are idle, busy, or too far off-policy."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.scheduling.async_ratio import AsyncRatioController, StepMeasurement


def controller_at(async_ratio: int) -> AsyncRatioController:
    controller = AsyncRatioController(0, 4)
    controller.async_ratio = async_ratio
    return controller


def run(controller: AsyncRatioController, steps: int, **idle_at: float) -> list[int]:
    """A system whose idle time falls with alpha as `alpha_N=idle` says; past the last it stays."""
    curve = [idle_at[key] for key in sorted(idle_at)]
    history = []
    for _ in range(steps):
        idle = curve[min(controller.async_ratio, len(curve) - 1)]
        controller.update(StepMeasurement(idle, 0.0, 1.0))
        history.append(controller.async_ratio)
    return history


def test_alpha_rises_until_nobody_waits_and_stays_there() -> None:
    history = run(controller_at(0), 40, alpha_0=0.5, alpha_1=0.2, alpha_2=0.05)
    assert history[-1] == 2
    assert set(history[10:]) == {2}


def test_alpha_goes_back_when_raising_it_brought_nothing() -> None:
    history = run(controller_at(0), 15, alpha_0=0.5, alpha_1=0.3, alpha_2=0.3)
    assert max(history) == 2
    assert history[-1] == 1


def test_alpha_falls_at_once_when_the_data_is_too_far_off_policy() -> None:
    controller = controller_at(3)
    decision = controller.update(StepMeasurement(0.5, 0.0, 0.3))
    assert (decision.async_ratio, decision.changed) == (2, True)
    assert "effective sample size 0.30" in decision.reason


def test_alpha_falls_when_fresher_data_costs_nothing() -> None:
    history = run(controller_at(3), 60, alpha_0=0.3, alpha_1=0.0, alpha_2=0.0, alpha_3=0.0)
    assert min(history) <= 1
    assert history.count(0) < 10, "what did not pay is not tried again and again"


def test_every_decision_says_why() -> None:
    controller = controller_at(0)
    for _ in range(3):
        decision = controller.update(StepMeasurement(0.42, 0.1, 0.9))
        assert "learner idle 42%" in decision.reason


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), max_size=100), st.integers(0, 3))
def test_alpha_stays_within_its_bounds_and_moves_by_one(steps: list[tuple[float, float, float]], lowest: int) -> None:
    controller = AsyncRatioController(lowest, lowest + 2)
    before = controller.async_ratio
    for step in steps:
        decision = controller.update(StepMeasurement(*step))
        assert lowest <= decision.async_ratio <= lowest + 2
        assert abs(decision.async_ratio - before) <= 1
        assert decision.changed == (decision.async_ratio != before)
        before = decision.async_ratio


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_measurement_that_is_no_fraction_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="fraction between 0 and 1"):
        StepMeasurement(value, 0.0, 1.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), max_size=60), st.integers(0, 60))
def test_a_restored_controller_decides_as_one_that_never_stopped(
    steps: list[tuple[float, float, float]], stop_after: int
) -> None:
    lasting = controller_at(0)
    stopped = controller_at(0)
    for index, measured in enumerate(steps):
        if index == stop_after:
            state = json.loads(json.dumps(stopped.state()))
            stopped = controller_at(0)
            stopped.restore(state)
        assert stopped.update(StepMeasurement(*measured)) == lasting.update(StepMeasurement(*measured))


def test_restoring_keeps_within_the_bounds_of_now() -> None:
    controller = AsyncRatioController(0, 1)
    controller.restore(controller_at(4).state())
    assert controller.async_ratio == 1


def test_a_sample_size_that_is_not_a_number_decides_nothing() -> None:
    """`nan < 0.6` is false: it must not pass for on-policy data."""
    controller = controller_at(2)
    for _ in range(5):
        decision = controller.update(StepMeasurement(0.9, 0.9, math.nan))
        assert not decision.changed
        assert "not a number" in decision.reason
    controller.update(StepMeasurement(0.9, 0.9, 1.0))
    assert controller.update(StepMeasurement(0.9, 0.9, 1.0)).async_ratio == 3
