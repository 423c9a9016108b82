from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.learner.losses.advantages import (
    ADVANTAGES,
    EPSILON,
    discounted_returns,
    gigpo,
    grpo,
    rloo,
    scale_by_batch,
)
from roll_flash.learner.losses.token_advantages import AdvantageConfig, turn_advantages
from roll_flash.stream import finished_group
from tests.learner.samples import make_group, prepare_group, sequences_of

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_grpo_is_the_z_score_of_the_group() -> None:
    np.testing.assert_allclose(grpo([0.0, 0.0, 1.0, 1.0]), np.array([-0.5, -0.5, 0.5, 0.5]) / (0.5 + EPSILON))
    np.testing.assert_allclose(grpo([0.0, 0.0, 0.0, 4.0]), np.array([-1, -1, -1, 3]) / (np.sqrt(3) + EPSILON))


@given(rewards)
def test_mean_and_deviation_are_those_of_numpy_bit_by_bit(values: list[float]) -> None:
    if np.ptp(values) > 1e-6:
        array = np.array(values)
        assert grpo(values).tobytes() == ((array - array.mean()) / (array.std() + EPSILON)).tobytes()


@pytest.mark.parametrize("noise", [1e-8, 1e-6])
def test_the_noise_of_a_judge_is_no_signal(noise: float) -> None:
    for function in (grpo, rloo):
        assert np.abs(function([0.0, noise], True)).max() <= noise / EPSILON
    (scaled,) = scale_by_batch([grpo([0.0, noise], False)])
    assert np.abs(scaled).max() <= noise / EPSILON
    turns = gigpo([[0.0], [noise]], [["start"], ["start"]], episode_rewards=[0.0, noise])
    assert np.abs(np.concatenate(turns)).max() <= 2 * noise / EPSILON


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


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("reward", [float("nan"), 1e39, -1e25])
def test_a_reward_that_is_not_finite_where_it_is_trained_is_an_error(name: str, reward: float) -> None:
    """In float32, squares included: beyond it advantages would be infinite, or silently zero."""
    with pytest.raises(ValueError, match="finite"):
        ADVANTAGES[name]([0.0, reward], False)


def test_scaling_by_the_batch_keeps_the_weight_of_groups_against_each_other() -> None:
    first, second = scale_by_batch([grpo([0.0, 8.0], False), grpo([0.0, 1.0], False)])
    np.testing.assert_allclose(first / second, [8, 8])
    assert np.concatenate([first, second]).std() == pytest.approx(1, rel=1e-4)
    assert [values.tolist() for values in scale_by_batch([np.zeros(3), np.zeros(2)])] == [[0.0] * 3, [0.0] * 2]
    assert scale_by_batch([]) == []


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    """Two replicas reach the same room; the third is alone in another. Worked out by hand."""
    found = gigpo(
        [[0.0, 1.0], [0.0, 0.0], [0.5]],
        [["start", "room"], ["start", "room"], ["start"]],
        episode_rewards=[1.0, 0.0, 0.5],
        turn_weight=2.0,
        discount=0.5,
        normalize=False,
    )
    episode = np.array([0.5, -0.5, 0.0])
    start = np.array([0.5, 0.0, 0.5]) - 1 / 3  # discounted returns at the start
    np.testing.assert_allclose(found[0], episode[0] + 2 * np.array([start[0], 0.5]))
    np.testing.assert_allclose(found[1], episode[1] + 2 * np.array([start[1], -0.5]))
    np.testing.assert_allclose(found[2], [episode[2] + 2 * start[2]])


def test_gigpo_is_grpo_where_no_state_is_shared_and_the_start_tells_nothing() -> None:
    rewards = [[0.0, 1.0], [1.0], [0.0]]
    states = [["a", "b"], ["c"], ["d"]]
    found = gigpo(rewards, states, episode_rewards=[1.0, 1.0, 0.0])
    for values, expected in zip(found, grpo([1.0, 1.0, 0.0]), strict=True):
        np.testing.assert_allclose(values, expected)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.floats(0, 1))
def test_discounted_returns_are_their_sum(rewards: list[float], discount: float) -> None:
    expected = [sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    np.testing.assert_allclose(discounted_returns(rewards, discount), expected, atol=1e-9)


def test_turns_get_their_own_advantage_on_their_own_tokens() -> None:
    group = make_group(0, replicas=3, rewards=[1.0, 0.0, 0.0])
    members = []
    for number, trajectory in enumerate(group.trajectories):
        first, second = trajectory.turns
        seen = "wall" if number else "door"
        turns = (dataclasses.replace(first, observation=seen), dataclasses.replace(second, reward=trajectory.reward))
        members.append(dataclasses.replace(trajectory, turns=turns))
    group = dataclasses.replace(group, trajectories=tuple(members))
    prepared = prepare_group(group, 0, AdvantageConfig(advantage="gigpo"))
    winner, loser, _ = [sequence.advantages for sequence in sequences_of(prepared)]
    first, second = members[0].turns
    episode, start = grpo([1.0, 0.0, 0.0]), grpo([0.95, 0.0, 0.0])
    np.testing.assert_allclose(winner[first.start : first.end], episode[0] + start[0], rtol=1e-6)
    np.testing.assert_allclose(winner[second.start : second.end], episode[0], rtol=1e-6)  # alone behind the door
    np.testing.assert_allclose(loser[members[1].turns[1].start : members[1].turns[1].end], episode[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (AdvantageConfig(), [[-1, 1], [-1, 1]]),
        (AdvantageConfig(scale="none"), [[-0.5, 0.5], [-2, 2]]),
        (AdvantageConfig(advantage="rloo", scale="none"), [[-1, 1], [-4, 4]]),
        (AdvantageConfig(advantage="reinforce++", scale="none"), [[-1.25, -0.25], [-1.25, 2.75]]),
        (AdvantageConfig(scale="batch"), np.array([[-0.5, 0.5], [-2, 2]]) / np.sqrt(17 / 8)),
    ],
)
def test_rules_choose_baseline_and_scale(rules: AdvantageConfig, expected: ArrayLike) -> None:
    groups = [make_group(0, replicas=2, rewards=[0.0, 1.0]), make_group(1, replicas=2, rewards=[0.0, 4.0])]
    found = turn_advantages([finished_group(group).trajectories for group in groups], rules)
    np.testing.assert_allclose([[values[-1] for values in group] for group in found], expected, rtol=3e-4)


def test_rules_follow_the_config() -> None:
    assert AdvantageConfig.of(LearnerConfig(advantage="rloo")).scale == "none"
    assert AdvantageConfig.of(LearnerConfig(advantage="reinforce++")).needs_whole_batch
    assert AdvantageConfig.of(LearnerConfig(normalize_advantage="batch")).needs_whole_batch
    assert not AdvantageConfig.of(LearnerConfig()).needs_whole_batch
    assert AdvantageConfig.of(LearnerConfig(entropy_bonus=0.1)).keep_without_signal
    assert AdvantageConfig.of(LearnerConfig(router_aux_loss=0.1)).keep_without_signal
