"""The rule of M2PO against the loop of its paper, and a step with it against one without any machinery."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.learner.losses.policy import policy_loss
from roll_flash.learner.losses.second_moment import leave_out, limit_second_moment, outward_log_ratios
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.types import Group, Trajectory
from tests.learner.in_process import assert_same_weights
from tests.learner.plain_loop import logprobs_of, plain_step, with_advantages
from tests.learner.samples import make_group, replace_trajectory
from tests.learner.test_steps import SILENT, trained

LIMIT = 0.04


def left_by_the_loop(log_ratios: list[float], limit: float) -> list[float]:
    """Algorithm 1 of arXiv 2510.01161 as it is written: the largest goes, until the mean is small enough."""
    left = sorted(log_ratios, key=abs)
    while left and np.mean(np.square(left)) > limit:
        left.pop()
    return left


@given(st.lists(st.floats(-3, 3, width=32).filter(bool), max_size=40, unique_by=abs), st.floats(1e-3, 2))
def test_what_is_kept_is_what_the_papers_loop_keeps(log_ratios: list[float], limit: float) -> None:
    moment = limit_second_moment(np.array(log_ratios, np.float32), limit)
    left = left_by_the_loop(log_ratios, limit)
    kept = [value for value in log_ratios if abs(value) <= moment.bound]
    assert sorted(kept) == sorted(left)
    assert moment.left_out == len(log_ratios) - len(left)
    assert moment.after == pytest.approx(np.mean(np.square(left)) if left else 0.0)
    assert moment.before == pytest.approx(np.mean(np.square(log_ratios)) if log_ratios else 0.0)


def test_equal_ratios_are_kept_or_left_out_together() -> None:
    found = limit_second_moment(np.array([0.1, 0.5, -0.5, 0.5], np.float32), 0.1)
    assert (found.bound, found.left_out) == (np.float32(0.1), 3)  # one 0.5 would fit, which of them is not said
    assert limit_second_moment(np.array([0.5, 0.6], np.float32), 0.01).left_out == 2
    assert limit_second_moment(np.empty(0, np.float32), 0.01).left_out == 0


def sequence_of(log_rho: list[float], advantages: list[float]) -> TrainSequence:
    """A prompt token with garbage, then policy tokens."""
    count = len(log_rho) + 1
    return TrainSequence(
        token_ids=np.arange(count, dtype=np.int32),
        policy_mask=np.arange(count) > 0,
        behavior_logprobs=np.array([np.nan, *(-1.0 for _ in log_rho)], np.float32),
        versions=np.zeros(count, np.int32),
        advantages=np.array([np.nan, *advantages], np.float32),
        prox_logprobs=np.array([7.0, *(value - 1.0 for value in log_rho)], np.float32),
    )


def test_only_tokens_that_move_further_away_count_and_can_be_left_out() -> None:
    sequence = sequence_of([0.5, -0.5, 0.5, -0.5, 0.25, 0.0], [1.0, 1.0, -1.0, -1.0, 2.0, 1.0])
    assert outward_log_ratios(sequence).tolist() == [0.5, 0.0, 0.0, -0.5, 0.25, 0.0]
    assert leave_out(sequence, 0.25).advantages[1:].tolist() == [0.0, 1.0, -1.0, 0.0, 2.0, 1.0]


def test_the_loss_of_what_is_left_is_the_papers_and_so_is_its_gradient() -> None:
    random = np.random.default_rng(0)
    log_rho, advantages = random.normal(size=50) * 0.4, random.normal(size=50)
    sequence = sequence_of(log_rho.tolist(), advantages.tolist())
    outward = outward_log_ratios(sequence)
    bound = limit_second_moment(outward[outward != 0], LIMIT).bound
    assert sequence.prox_logprobs is not None
    logprobs = torch.tensor(sequence.prox_logprobs[1:], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor(sequence.behavior_logprobs[1:], dtype=torch.float64)
    loss = policy_loss(
        "m2po",
        logprobs=logprobs,
        prox_logprobs=logprobs.detach(),
        behavior_logprobs=behavior,
        advantages=torch.tensor(leave_out(sequence, bound).advantages[1:], dtype=torch.float64),
        mask=torch.ones(50, dtype=torch.bool),
    ).loss
    ratio = np.exp(logprobs.detach().numpy() - behavior.numpy())
    given = sequence.advantages[1:].astype(np.float64)
    moves_away = (given > 0) & (ratio > 1) | (given < 0) & (ratio < 1)
    left = set(left_by_the_loop(outward[moves_away].tolist(), LIMIT))
    mask = np.array([not away or value in left for away, value in zip(moves_away, outward.tolist(), strict=True)])
    assert 0 < mask.sum() < 50
    assert loss.item() == pytest.approx(-(mask * ratio * given).mean(), abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(gradient.numpy(), -(mask * ratio * given) / 50, atol=1e-12)


def resampled(folder: Path, group: Group, seed: int) -> Group:
    """The group as if a policy near the model had sampled it: most ratios are small, some are large."""
    random = np.random.default_rng(seed)
    for number, trajectory in enumerate(group.trajectories):
        logprobs = np.zeros(len(trajectory.token_ids), np.float32)
        logprobs[trajectory.policy_mask] = logprobs_of(folder, trajectory).numpy()
        logprobs -= random.standard_t(3, len(logprobs)).astype(np.float32) * 0.3
        found = np.where(trajectory.policy_mask, logprobs, 0)
        group = replace_trajectory(group, number, dataclasses.replace(trajectory, logprobs=found))
    return group


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[Group]:
    return [resampled(tiny_model, make_group(seed, prompt=20, turn=(3, 12)), seed) for seed in range(3)]


def test_a_step_limits_the_moment_of_all_its_tokens(tiny_model: Path, groups: list[Group]) -> None:
    """A group without signal counts in the mean of the loss, as ever, and in no moment."""
    samples = [sample for group in groups for sample in with_advantages(group)]
    advantages = {trajectory.episode_id: advantage for trajectory, advantage in samples}
    gaps = {each.episode_id: (logprobs_of(tiny_model, each), each.logprobs[each.policy_mask]) for each, _ in samples}
    log_rho = {name: prox.numpy() - behavior for name, (prox, behavior) in gaps.items()}
    outward = {name: np.sign(values) == np.sign(advantages[name]) for name, values in log_rho.items()}
    every = np.concatenate([log_rho[name][outward[name]] for name in log_rho]).tolist()
    left = left_by_the_loop(every, LIMIT)
    bound = max(abs(value) for value in left)
    tokens = sum(group.policy_tokens for group in [*groups, SILENT])

    def loss_of(trajectory: Trajectory, logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        name = trajectory.episode_id
        kept = torch.tensor(~(outward[name] & (np.abs(log_rho[name]) > bound)))
        ratio = (logprobs - torch.tensor(gaps[name][1])).exp()
        return -(kept * ratio * advantages[name]).sum() / tokens

    expected = plain_step(tiny_model, [trajectory for trajectory, _ in samples], loss_of)
    found, result = trained(tiny_model, [[*groups, SILENT]], loss={"name": "m2po"})
    assert_same_weights(found, expected)
    assert result.metrics["second_moment"] == pytest.approx(np.mean(np.square(every)), rel=1e-4)
    assert result.metrics["second_moment_kept"] == pytest.approx(np.mean(np.square(left)), rel=1e-4)
    computed = sum(group.policy_tokens for group in groups)
    assert result.metrics["left_out_fraction"] == pytest.approx((len(every) - len(left)) / computed)
    assert 0 < len(left) < len(every)


@pytest.mark.parametrize("settings", [{"name": "m2po"}, {"second_moment": LIMIT}])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_order_and_split_change_nothing(
    tiny_model: Path, groups: list[Group], settings: dict[str, Any], minibatches: int
) -> None:
    expected, first = trained(tiny_model, [groups], loss=settings, minibatches=minibatches)
    streamed = [[groups[2]], groups[:2]]
    found, second = trained(tiny_model, streamed, loss=settings, minibatches=minibatches, micro_batch_tokens=70)
    assert_same_weights(found, expected)
    assert first.metrics["left_out_fraction"] == second.metrics["left_out_fraction"] > 0


def test_a_limit_that_nothing_reaches_is_the_same_step_as_none(tiny_model: Path, groups: list[Group]) -> None:
    expected, _ = trained(tiny_model, [groups])
    found, result = trained(tiny_model, [groups], loss={"second_moment": 1e6})
    assert_same_weights(found, expected)
    assert result.metrics["left_out_fraction"] == 0
