from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.learner.advantages import ADVANTAGES, grpo, rloo

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_grpo_is_the_z_score_of_the_group() -> None:
    np.testing.assert_allclose(grpo([0.0, 0.0, 1.0, 1.0]), [-1, -1, 1, 1])
    np.testing.assert_allclose(grpo([0.0, 0.0, 0.0, 4.0]), np.array([-1, -1, -1, 3]) / np.sqrt(3))


def test_grpo_without_normalisation_only_subtracts_the_mean() -> None:
    np.testing.assert_allclose(grpo([1.0, 2.0, 6.0], normalize=False), [-2, -1, 3])


@given(rewards)
def test_rloo_compares_each_replica_with_the_mean_of_the_others(values: list[float]) -> None:
    if len(values) < 2 or np.ptp(values) < 1e-6:
        return
    expected = [r - np.mean(values[:i] + values[i + 1 :]) for i, r in enumerate(values)]
    np.testing.assert_allclose(rloo(values), expected, atol=1e-9)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("values", [[0.7], [0.5] * 8, [0.1 + 0.2, 0.3, 0.3], []])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_group_without_variance_has_no_signal(name: str, values: list[float], normalize: bool) -> None:
    assert ADVANTAGES[name](values, normalize).tolist() == [0.0] * len(values)


@given(rewards, st.floats(-10, 10))
def test_advantages_sum_to_zero_and_ignore_a_constant(values: list[float], constant: float) -> None:
    for function in (grpo, rloo):
        advantages = function(values, False)
        assert abs(advantages.sum()) < 1e-6
        if np.ptp(values) > 1e-3:
            np.testing.assert_allclose(function(np.asarray(values) + constant, False), advantages, atol=1e-6)


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="finite"):
        grpo([0.0, float("nan")])
