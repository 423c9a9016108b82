"""Estimates against closed forms and against counting all cases."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from roll_flash.evaluation.statistics import (
    bootstrap_interval,
    estimate_mean,
    estimate_pass_at_k,
    estimate_success,
    ks_to_report,
    pass_at_k,
    students_t,
    wilson_interval,
)


@pytest.mark.parametrize("attempts", range(1, 7))
def test_pass_at_k_equals_counting_all_choices_of_k_attempts(attempts: int) -> None:
    for successes in range(attempts + 1):
        outcomes = [index < successes for index in range(attempts)]
        for k in range(1, attempts + 1):
            chosen = list(itertools.combinations(outcomes, k))
            assert pass_at_k(attempts, successes, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_k_is_unbiased() -> None:
    """Over many tasks with a true rate of 0.3, 4 attempts estimate 1 - 0.7^2 for k = 2."""
    generator = random.Random(0)
    draws = [pass_at_k(4, sum(generator.random() < 0.3 for _ in range(4)), 2) for _ in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(1 - 0.7**2, abs=0.01)


@pytest.mark.parametrize(("attempts", "successes", "k"), [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_what_makes_no_sense(attempts: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(attempts, successes, k)


def test_wilson_interval_equals_published_values() -> None:
    """Newcombe 1998, table I: 81/263 and 0/20 (score method without continuity correction)."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_wilson_interval_is_symmetric_and_stays_inside() -> None:
    for successes in range(11):
        low, high = wilson_interval(successes, 10)
        other = wilson_interval(10 - successes, 10)
        assert 0 <= low <= successes / 10 <= high <= 1
        assert (low, high) == pytest.approx((1 - other[1], 1 - other[0]))


def test_bootstrap_of_many_tasks_approaches_the_normal_interval_and_repeats_exactly() -> None:
    values = [float(index % 2) for index in range(400)]
    low, high = bootstrap_interval(values)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.005)
    assert bootstrap_interval(values) == (low, high)


def test_quantiles_of_students_t_are_those_of_tables() -> None:
    found = [students_t(degrees) for degrees in (3, 4, 7, 30, 120)]
    assert found == pytest.approx([3.182, 2.776, 2.365, 2.042, 1.980], rel=1.2e-3)


def test_nineteen_of_twenty_intervals_of_few_tasks_hold_the_mean() -> None:
    """Of the plain percentile intervals only 88 % do."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = bootstrap_interval(generator.normal(size=8).tolist())
        held += low <= 0 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_attempts_at_one_task_count_as_one_cluster() -> None:
    """100 copies of the same attempt say nothing new: the interval must be that of the two tasks."""
    clustered = estimate_mean([[0.0] * 100, [1.0] * 100])
    assert clustered.value == 0.5
    assert (clustered.low, clustered.high) == (0.0, 1.0)
    assert clustered.count == 2


def test_a_task_with_more_surviving_attempts_weighs_no_more_than_another() -> None:
    assert estimate_mean([[1.0], [0.0, 0.0, 0.0], []]).value == 0.5


def test_success_of_one_attempt_each_has_the_wilson_interval() -> None:
    estimate = estimate_success([[True]] * 3 + [[False]] * 7)
    assert estimate.value == pytest.approx(0.3)
    assert (estimate.low, estimate.high) == pytest.approx(wilson_interval(3, 10))


@pytest.mark.parametrize("outcome", [True, False])
def test_when_all_came_out_alike_the_interval_still_has_a_width(outcome: bool) -> None:
    for estimate in (estimate_success([[outcome] * 4] * 10), estimate_pass_at_k([[outcome] * 4] * 10, 2)):
        assert estimate is not None
        assert estimate.high - estimate.low > 0.2


def test_tasks_that_were_all_solved_equally_often_prove_little() -> None:
    alike = [[True, False, False, False]] * 3
    for estimate in (estimate_success(alike), estimate_pass_at_k(alike, 1), estimate_pass_at_k(alike, 2)):
        assert estimate is not None
        assert estimate.low < estimate.value < estimate.high
        assert estimate.high - estimate.low > 0.4


def test_pass_at_k_is_over_the_tasks_that_have_k_attempts() -> None:
    estimate = estimate_pass_at_k([[True, False], [False, False], [True]], 2)
    assert estimate is not None
    assert (estimate.value, estimate.count) == (0.5, 2)
    assert estimate_pass_at_k([[True]], 2) is None


@pytest.mark.parametrize(("attempts", "ks"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_reported_ks_are_powers_of_two_and_the_number_of_attempts(attempts: int, ks: list[int]) -> None:
    assert ks_to_report(attempts) == ks
