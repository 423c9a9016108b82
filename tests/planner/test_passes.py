"""Passes over a token that the learner makes beside its forward and backward pass, by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.test_communication_times import speeds

REFERENCE = {"coefficient": 0.01}
IN_REWARD = {"coefficient": 0.01, "in_reward": True}


@pytest.mark.parametrize(
    ("learner", "forward_share"),
    [({}, 1 / 3), ({"gradient_checkpointing": True}, 1 / 4), ({"lora": {"rank": 8}}, 1 / 2)],
)
def test_a_reference_costs_one_forward_pass_wherever_its_divergence_goes(
    learner: dict[str, Any], forward_share: float
) -> None:
    plain, in_loss, in_reward = (speeds(**learner, kl=kl) for kl in ({}, REFERENCE, IN_REWARD))
    assert in_loss.train_token_s == pytest.approx((1 + forward_share) * plain.train_token_s, rel=0.02)
    assert in_reward.train_token_s == in_loss.train_token_s
    assert in_loss.proximal_token_s == plain.proximal_token_s
    assert plain.proximal_token_s == pytest.approx(forward_share * plain.train_token_s, rel=0.02)


def test_rewards_need_the_reference_before_the_first_of_several_minibatches() -> None:
    plain, in_reward = (speeds(minibatches=2, kl=kl) for kl in ({}, IN_REWARD))
    assert in_reward.train_token_s == plain.train_token_s
    assert in_reward.proximal_token_s == pytest.approx(2 * plain.proximal_token_s)


def test_a_critic_of_its_own_is_computed_too_but_has_no_reference() -> None:
    critic: dict[str, Any] = {"advantage": "gae", "critic": {"kind": "model"}}
    plain, two, with_reference = speeds(), speeds(**critic), speeds(**critic, kl=REFERENCE)
    assert two.train_token_s == pytest.approx(2 * plain.train_token_s)
    assert two.proximal_token_s == pytest.approx(2 * plain.proximal_token_s)
    assert with_reference.train_token_s - two.train_token_s == pytest.approx(plain.proximal_token_s)
