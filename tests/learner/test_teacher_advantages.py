"""What a teacher adds to the advantage of each token, against float64 written down by hand, and what a step does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from roll_flash.config.sections.distill import DistillConfig, TeacherConfig
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.errors import LearnerError
from roll_flash.learner.losses.policy import policy_loss
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.sequences import prepare_groups
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.stream import finished_group
from roll_flash.stream.blocks import TokenArrays
from roll_flash.types import Branch, FinishedGroup, Group, Trajectory
from tests.learner.in_process import assert_same_weights, in_process, weights_of
from tests.learner.plain_loop import plain_loop
from tests.learner.samples import make_group

GROUPS = [make_group(seed, prompt=16, turn=(3, 9)) for seed in range(3)]
EQUAL_REWARDS = make_group(9, rewards=[1.0] * 4)


def distill(**settings: Any) -> DistillConfig:
    return DistillConfig(teacher=TeacherConfig(model="teacher"), **settings)


def said(trajectory: Trajectory) -> NDArray[np.float32]:
    """What the teacher said of the policy tokens of a trajectory: made up, and the same each time."""
    random = np.random.default_rng(crc32(trajectory.episode_id.encode()))
    return random.normal(0, 2, trajectory.policy_tokens).astype(np.float32)


def scored(group: Group) -> FinishedGroup:
    """The group with what the teacher stage has written of it."""
    finished = finished_group(group)
    rows = (
        replace(row, teacher_log_ratios=said(trajectory))
        for row, trajectory in zip(finished.trajectories, group.trajectories, strict=True)
    )
    return replace(finished, trajectories=tuple(rows))


def advantages_of(group: Group, config: DistillConfig, **learner: Any) -> list[list[NDArray[np.float32]]]:
    """Advantages [T] of each sample of each trajectory, as ranks make them."""
    rules = AdvantageConfig.of(LearnerConfig(**learner), config)
    (prepared,) = prepare_groups([scored(group)], 0, rules)
    return [
        [sequence.advantages for sequence in planned.sequences(TokenArrays.of(trajectory))]
        for planned, trajectory in zip(prepared.planned, group.trajectories, strict=True)
    ]


def by_hand(rewards: Sequence[float], weight: float, reward_weight: float, terms: list[list[float]]) -> list[Any]:
    """reward_weight * (r - mean) / (std + 1e-4) + weight * (log pi_teacher - log mu), with plain Python numbers."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [
        [reward_weight * (reward - mean) / (deviation + 1e-4) + weight * term for term in of_one]
        for reward, of_one in zip(rewards, terms, strict=True)
    ]


@pytest.mark.parametrize(("weight", "reward_weight"), [(1.0, 0.0), (0.5, 1.0), (3.0, 0.25)])
def test_a_tokens_advantage_is_that_of_reward_and_teacher(weight: float, reward_weight: float) -> None:
    group = GROUPS[0]
    found = advantages_of(group, distill(weight=weight, reward_weight=reward_weight))
    terms = [[float(term) for term in said(trajectory)] for trajectory in group.trajectories]
    expected = by_hand([trajectory.reward for trajectory in group.trajectories], weight, reward_weight, terms)
    for trajectory, (advantages,), values in zip(group.trajectories, found, expected, strict=True):
        assert advantages[trajectory.policy_mask] == pytest.approx(values, rel=1e-6, abs=1e-6)


def test_with_a_discount_a_token_gets_the_terms_of_later_ones_of_its_sample() -> None:
    group = GROUPS[0]
    first, other = group.trajectories[:2]
    branch = Branch(
        other.token_ids, other.policy_mask, other.logprobs, other.versions, other.turns, (), other.prompt_length
    )
    branched = replace(first, branches=(branch,))
    group = replace(group, trajectories=(branched, *group.trajectories[1:]))
    (own, of_branch), *_ = advantages_of(group, distill(weight=2.0, discount=0.9))
    terms = [float(term) for term in said(branched)]
    count = int(first.policy_mask.sum())
    for advantages, mask, part in (
        (own, first.policy_mask, terms[:count]),
        (of_branch, other.policy_mask, terms[count:]),
    ):
        values = [2.0 * sum(0.9 ** (k - t) * part[k] for k in range(t, len(part))) for t in range(len(part))]
        assert advantages[mask] == pytest.approx(values, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["decoupled_ppo", "reinforce", "tis", "cispo", "ppo"])
def test_the_gradient_of_a_loss_is_that_of_these_advantages(name: str) -> None:
    """On-policy each of these has the gradient -A at every token."""
    trajectory = GROUPS[0].trajectories[0]
    (advantages,) = advantages_of(GROUPS[0], distill(weight=0.5, reward_weight=1.0))[0]
    terms = [[float(term) for term in said(each)] for each in GROUPS[0].trajectories]
    (expected, *_) = by_hand([each.reward for each in GROUPS[0].trajectories], 0.5, 1.0, terms)
    mask = trajectory.policy_mask
    logprobs = torch.tensor(trajectory.logprobs[mask], dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        name,
        logprobs=logprobs,
        prox_logprobs=logprobs.detach(),
        behavior_logprobs=logprobs.detach(),
        advantages=torch.tensor(advantages[mask]),
        mask=torch.ones(len(logprobs), dtype=torch.bool),
        sequence_ids=torch.zeros(len(logprobs), dtype=torch.int64),
        normalizer=1.0,
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert gradient.tolist() == pytest.approx([-value for value in expected], rel=1e-6, abs=1e-6)


def trained(model: Path, batches: Sequence[Sequence[FinishedGroup]], config: DistillConfig, **settings: Any) -> Any:
    """Weights and metrics after one step."""

    async def use(learner: FsdpLearner) -> Any:
        for batch in batches:
            await learner.accumulate(batch)
        result = await learner.finish_step()
        return await weights_of(learner), result.metrics

    return in_process(model, use, distill=config, **settings)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_step_is_what_a_plain_loop_does_and_no_split_changes_it(tiny_model: Path, minibatches: int) -> None:
    config, groups = distill(weight=0.5, reward_weight=2.0), [*GROUPS, EQUAL_REWARDS]
    rows = [scored(group) for group in groups]
    settings: dict[str, Any] = {"minibatches": minibatches, "micro_batch_tokens": 70}
    found, metrics = trained(tiny_model, [rows[:1], rows[1:]], config, **settings)
    again, _ = trained(tiny_model, [[rows[3], rows[1]], [rows[0]], [rows[2]]], config, minibatches=minibatches)
    assert_same_weights(found, again)
    assert metrics["groups_without_signal"] == 0
    assert metrics["computed_policy_tokens"] == metrics["policy_tokens"]
    if minibatches == 1:
        plain = plain_loop(
            tiny_model,
            [[groups]],
            teacher=lambda trajectory: 0.5 * torch.tensor(said(trajectory)),
            reward_weight=2.0,
        )
        assert_same_weights(found, plain)


def test_without_a_weight_for_rewards_they_change_nothing(tiny_model: Path) -> None:
    rows = scored(GROUPS[0])
    other = replace(rows, trajectories=tuple(replace(row, reward=-row.reward) for row in rows.trajectories))
    found, expected = (trained(tiny_model, [[each]], distill())[0] for each in (rows, other))
    assert_same_weights(found, expected)


@pytest.mark.parametrize("what", ["nothing", "too little"])
def test_a_trajectory_that_the_teacher_has_not_scored_is_never_trained(tiny_model: Path, what: str) -> None:
    rows = finished_group(GROUPS[0])
    if what == "too little":
        short = tuple(replace(row, teacher_log_ratios=np.zeros(1, np.float32)) for row in rows.trajectories)
        rows = replace(rows, trajectories=short)
    with pytest.raises(LearnerError, match=r"has log-probabilities of a teacher for [01] of its \d+ policy tokens"):
        trained(tiny_model, [[rows]], distill())
