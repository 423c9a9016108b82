"""Rewards that the learner changes, episodes that it leaves out because of their length, and a constant divisor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll_flash.config.sections.learner import LearnerConfig, OverlongConfig
from roll_flash.dashboard.fates import _rules
from roll_flash.learner.losses.shaping import overlong_penalty, shape_rewards
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.stream import finished_group
from roll_flash.types import Group, Trajectory
from tests.learner.conftest import make_tiny_model
from tests.learner.in_process import assert_equal_weights, assert_same_weights
from tests.learner.plain_loop import logprobs_of, plain_loop, plain_step
from tests.learner.samples import make_group, prepare_group, replace_trajectory
from tests.learner.test_steps import GROUPS, SILENT, trained


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, 0.1), (90, 1.0), (99, 1.9), (100, 2.0), (500, 2.0)]
)
def test_the_soft_penalty_is_dapos_equation_13(tokens: int, expected: float) -> None:
    rules = OverlongConfig(max_tokens=100, buffer_tokens=20, penalty=2.0)
    assert overlong_penalty(tokens, rules) == pytest.approx(expected, abs=1e-12)
    assert overlong_penalty(tokens, OverlongConfig()) == 0


def cut(trajectory: Trajectory, how: str) -> Trajectory:
    if how == "context_limit":
        return dataclasses.replace(trajectory, end="context_limit")
    last = dataclasses.replace(trajectory.turns[-1], finish_reason="length")
    return dataclasses.replace(trajectory, turns=(*trajectory.turns[:-1], last))


@pytest.mark.parametrize("how", ["context_limit", "length"])
def test_an_episode_that_was_cut_is_compared_with_and_not_trained(how: str) -> None:
    group = make_group(0, rewards=[0.0, 1.0, 0.0, 1.0])
    group = replace_trajectory(group, 1, cut(group.trajectories[1], how))
    plain, filtered = (prepare_group(group, 0, AdvantageConfig(filter_overlong=filter)) for filter in (False, True))
    assert [each.episode_id for each in filtered.planned] == ["0-0", "0-2", "0-3"]
    assert [each.advantages for each in filtered.planned] == [plain.planned[n].advantages for n in (0, 2, 3)]
    assert filtered.policy_tokens == plain.policy_tokens - group.trajectories[1].policy_tokens
    assert (filtered.num_valid, filtered.counts["overlong_filtered"]) == (3, 1)
    assert sum(tokens for _, tokens in filtered.staleness) == filtered.policy_tokens


def test_a_turn_before_the_last_may_be_cut() -> None:
    trajectory = make_group(0).trajectories[0]
    first = dataclasses.replace(trajectory.turns[0], finish_reason="length")
    trajectory = dataclasses.replace(trajectory, turns=(first, *trajectory.turns[1:]))
    group = replace_trajectory(make_group(0), 0, trajectory)
    assert prepare_group(group, 0, AdvantageConfig(filter_overlong=True)).num_valid == 4


def test_a_step_of_nothing_but_cut_episodes_changes_nothing(tiny_model: Path) -> None:
    """Early in training all may be cut; the run goes on, as after a step without signal."""
    group = GROUPS[0]
    for number, trajectory in enumerate(group.trajectories):
        group = replace_trajectory(group, number, cut(trajectory, "length"))
    found, result = trained(tiny_model, [[group]], overlong={"filter": True})
    assert_equal_weights(found, trained(tiny_model, [[SILENT]])[0])
    assert (result.version, result.metrics["overlong_filtered"], result.metrics["grad_norm"]) == (1, 4, 0)


def with_reward(group: Group, rewards: list[float]) -> Group:
    for number, reward in enumerate(rewards):
        group = replace_trajectory(group, number, dataclasses.replace(group.trajectories[number], reward=reward))
    return group


def test_a_step_with_a_penalty_is_that_of_the_lower_rewards(tiny_model: Path) -> None:
    """A group whose replicas earned the same learns too: to be shorter."""
    groups = [GROUPS[0], make_group(9, rewards=[1.0] * 4, turn=(3, 12))]
    lower = []
    for group in groups:
        excess = [trajectory.policy_tokens - 10 for trajectory in group.trajectories]
        penalties = [0.5 * min(1.0, max(0.0, each / 10)) for each in excess]
        assert len(set(penalties)) > 2
        rewards = [each.reward - penalty for each, penalty in zip(group.trajectories, penalties, strict=True)]
        lower.append(with_reward(group, rewards))
    settings = {"max_tokens": 20, "buffer_tokens": 10, "penalty": 0.5}
    found, result = trained(tiny_model, [groups[:1], groups[1:]], overlong=settings)
    assert_same_weights(found, plain_loop(tiny_model, [[lower]]))
    rewards = [trajectory.reward for group in lower for trajectory in group.trajectories]
    assert result.metrics["shaped_reward"] == pytest.approx(np.mean(rewards))
    before = np.mean([trajectory.reward for group in groups for trajectory in group.trajectories])
    assert result.metrics["overlong_penalty"] == pytest.approx(before - np.mean(rewards))


def test_a_broken_reward_is_not_shaped_and_still_dropped() -> None:
    group = with_reward(make_group(0), [float("nan")])
    config = LearnerConfig(overlong=OverlongConfig(max_tokens=4, buffer_tokens=2))
    shaped, rewards = shape_rewards(finished_group(group), config, {})
    assert np.isnan(shaped.trajectories[0].reward)
    assert len(rewards) == 3


@pytest.mark.parametrize("settings", [{}, {"minibatches": 2}, {"advantage": "reinforce++"}])
def test_the_divergence_in_the_reward_is_verls_sum_over_the_episode(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """r - c * sum(log mu - log reference), then the advantage; the loss has no term for the reference."""
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    groups, lower, divergences = [*GROUPS[:2], SILENT], [], []
    for group in groups:
        gaps = [
            float((each.logprobs[each.policy_mask] - logprobs_of(other, each).numpy()).sum(dtype=np.float64))
            for each in group.trajectories
        ]
        divergences += gaps
        rewards = [each.reward - 0.1 * gap for each, gap in zip(group.trajectories, gaps, strict=True)]
        lower.append(with_reward(group, rewards))
    kl = {"coefficient": 0.1, "in_reward": True, "reference": str(other)}
    found, result = trained(tiny_model, [groups[:1], groups[1:]], kl=kl, micro_batch_tokens=90, **settings)
    expected, plain = trained(tiny_model, [lower], **settings)
    assert_same_weights(found, expected)
    assert result.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-4)
    tokens = sum(group.policy_tokens for group in groups)
    assert result.metrics["kl_reference"] == pytest.approx(sum(divergences) / tokens, rel=1e-5)
    assert result.metrics["reference_s"] > 0


def test_a_reward_with_adapters_is_compared_with_the_policy_without_them(tiny_model: Path) -> None:
    """At the start the two are the same, so the divergence is that of the sampler from the model."""
    gaps = [
        (each.logprobs[each.policy_mask] - logprobs_of(tiny_model, each).numpy()).sum(dtype=np.float64)
        for group in GROUPS[:2]
        for each in group.trajectories
    ]
    kl = {"coefficient": 0.1, "in_reward": True}
    _, result = trained(tiny_model, [GROUPS[:2]], kl=kl, lora={"rank": 2, "targets": ["q_proj"]})
    tokens = sum(group.policy_tokens for group in GROUPS[:2])
    assert result.metrics["kl_reference"] == pytest.approx(sum(gaps) / tokens, rel=1e-5)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_dr_grpo_divides_by_a_constant_and_by_no_deviation(tiny_model: Path, minibatches: int) -> None:
    """Equation 1 of arXiv 2503.20783 with its constant, at the first step of a policy gradient (ratio 1)."""
    groups = GROUPS[:2]
    settings = {"loss_normalization": "constant", "loss_length": 50, "normalize_advantage": "none"}
    loss = {"name": "reinforce", "correction": "none"}
    if minibatches == 2:  # split and order change nothing
        expected, _ = trained(tiny_model, [groups], minibatches=2, loss=loss, **settings)
        streamed = [groups[1:], groups[:1]]
        found, _ = trained(tiny_model, streamed, minibatches=2, loss=loss, micro_batch_tokens=60, **settings)
        return assert_same_weights(found, expected)
    means = {group.group_id: np.mean([each.reward for each in group.trajectories]) for group in groups}
    advantages = {
        each.episode_id: each.reward - means[group.group_id] for group in groups for each in group.trajectories
    }

    def loss_of(trajectory: Trajectory, logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return -(logprobs * float(advantages[trajectory.episode_id])).sum() / 50 / len(advantages)

    expected = plain_step(tiny_model, [each for group in groups for each in group.trajectories], loss_of)
    found, _ = trained(tiny_model, [groups], loss=loss, **settings)
    assert_same_weights(found, expected)


def test_the_dashboard_shows_no_advantages_that_it_cannot_know() -> None:
    assert _rules({"learner": {"kl": {"coefficient": 0.1, "in_reward": True}}}) is None
    assert _rules({"learner": {"overlong": {"max_tokens": 8, "buffer_tokens": 4}}}) is None
    assert _rules({"learner": {"kl": {"coefficient": 0.1}}}) is not None
