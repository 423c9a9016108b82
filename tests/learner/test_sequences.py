from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from roll_flash.errors import LearnerError
from roll_flash.learner.losses.records import by_staleness, off_policy_metrics, staleness_metrics
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.sequences import check_staleness, prepare_demonstrations
from roll_flash.stream import finished_group
from roll_flash.stream.episodes import NO_LOGPROB
from roll_flash.types import Trajectory
from tests.learner.samples import make_group, make_trajectory, prepare_group, replace_trajectory, sequences_of


def broken(trajectory: Trajectory, fault: str) -> Trajectory:
    match fault:
        case "reward_not_finite":
            return dataclasses.replace(trajectory, reward=float("nan"))
        case "reward_too_large":
            return dataclasses.replace(trajectory, reward=-1e39)
        case "logprobs_not_finite":
            logprobs = trajectory.logprobs.copy()
            logprobs[trajectory.policy_mask.argmax()] = np.nan
            return dataclasses.replace(trajectory, logprobs=logprobs)
        case "no_policy_tokens":
            return dataclasses.replace(trajectory, policy_mask=np.zeros_like(trajectory.policy_mask))
        case "no_prompt":
            return dataclasses.replace(trajectory, policy_mask=np.ones_like(trajectory.policy_mask))
    raise AssertionError(fault)


@pytest.mark.parametrize(
    "fault", ["reward_not_finite", "reward_too_large", "logprobs_not_finite", "no_policy_tokens", "no_prompt"]
)
def test_a_broken_trajectory_is_left_out_and_counted_and_the_rest_trains(fault: str) -> None:
    group = make_group(0, replicas=4, rewards=[0.0, 1.0, 0.0, 1.0])
    without = dataclasses.replace(group, trajectories=group.trajectories[:3])
    group = replace_trajectory(group, 3, broken(group.trajectories[3], fault))
    prepared = prepare_group(group, 0, AdvantageConfig())
    expected = prepare_group(without, 0, AdvantageConfig())
    assert prepared.counts[f"dropped_{fault}"] == 1
    assert prepared.policy_tokens == expected.policy_tokens
    for found, wanted in zip(sequences_of(prepared), sequences_of(expected), strict=True):
        np.testing.assert_array_equal(found.advantages, wanted.advantages)


def test_a_group_whose_replicas_earned_the_same_counts_into_the_mean_but_is_not_computed() -> None:
    group = make_group(0, rewards=[0.5] * 4)
    prepared = prepare_group(group, 0, AdvantageConfig())
    assert sequences_of(prepared) == []
    assert prepared.policy_tokens == group.policy_tokens
    assert prepared.counts["groups_without_signal"] == 1


def test_garbage_outside_the_policy_tokens_is_never_read() -> None:
    group = make_group(0)
    first = group.trajectories[0]
    dirty = dataclasses.replace(first, logprobs=np.where(first.policy_mask, first.logprobs, np.nan))
    prepared = prepare_group(replace_trajectory(group, 0, dirty), 0, AdvantageConfig())
    assert len(sequences_of(prepared)) == 4


@pytest.mark.parametrize(("ratio", "version", "allowed"), [(0, 3, True), (0, 4, False), (1, 4, True), (1.5, 5, False)])
def test_no_token_older_than_the_asynchronous_ratio_allows_is_trained(
    ratio: float, version: int, allowed: bool
) -> None:
    group = make_group(0, version=3)
    if allowed:
        check_staleness([finished_group(group)], version, ratio)
        return
    with pytest.raises(LearnerError, match=r"version 3, older than version \d - async_ratio"):
        check_staleness([finished_group(group)], version, ratio)


def test_one_old_token_in_a_trajectory_is_enough_to_refuse_it() -> None:
    group = make_group(0, version=3)
    last = group.trajectories[-1]
    versions = last.versions.copy()
    versions[np.flatnonzero(last.policy_mask)[-1]] = 1
    stale = replace_trajectory(group, 3, dataclasses.replace(last, versions=versions))
    with pytest.raises(LearnerError, match="version 1"):
        check_staleness([finished_group(stale)], 3, 1)


def test_a_token_from_the_future_is_refused() -> None:
    with pytest.raises(LearnerError, match="another run"):
        check_staleness([finished_group(make_group(0, version=3))], 2, 1)


def test_a_demonstration_without_anything_to_imitate_is_an_error() -> None:
    with pytest.raises(LearnerError, match="nothing to imitate"):
        prepare_demonstrations([make_trajectory([1, 2, 3], [False] * 3, reward=1.0)])


@pytest.mark.parametrize("said", [NO_LOGPROB, np.nan])
def test_a_demonstration_is_imitated_whatever_its_sampler_said(said: float) -> None:
    shown = make_trajectory([1, 2, 3, 4], [False, True, True, False], reward=1.0, logprobs=[said] * 4)
    [sequence] = prepare_demonstrations([shown])
    assert sequence.policy_mask.tolist() == [False, True, True, False]


def test_diagnostics_of_on_policy_tokens_are_neutral() -> None:
    logprobs = np.linspace(-3, -0.1, 50, dtype=np.float32)
    metrics = off_policy_metrics(logprobs, logprobs, np.full(50, 1.5, np.float32))
    assert metrics["kl_k1"] == metrics["kl_k3"] == metrics["logprob_gap_max"] == 0
    assert metrics["effective_sample_size"] == metrics["rho_mean"] == metrics["rho_max"] == 1
    assert metrics["entropy"] == 1.5


def test_diagnostics_are_their_formulas() -> None:
    rho = np.array([0.5, 1.0, 3.0])
    metrics = off_policy_metrics(np.log(rho).astype(np.float32), np.zeros(3, np.float32), np.zeros(3, np.float32))
    assert metrics["kl_k1"] == pytest.approx(-np.log(rho).mean(), abs=1e-6)
    assert metrics["kl_k3"] == pytest.approx((rho - 1 - np.log(rho)).mean(), abs=1e-6)
    assert metrics["effective_sample_size"] == pytest.approx(rho.sum() ** 2 / (3 * (rho**2).sum()), abs=1e-6)


def test_staleness_is_a_histogram_of_tokens() -> None:
    metrics = staleness_metrics([(0, 6), (1, 3), (9, 1)])
    assert metrics["staleness_mean"] == pytest.approx(1.2)
    assert metrics["staleness_max"] == 9
    assert (metrics["staleness_0"], metrics["staleness_1"], metrics["staleness_4_or_more"]) == (0.6, 0.3, 0.1)


def test_diagnostics_stay_finite_whatever_a_sampler_said() -> None:
    behavior = np.array([-1.0, NO_LOGPROB, -500.0], np.float32)
    metrics = off_policy_metrics(np.full(3, -1.0, np.float32), behavior, np.zeros(3, np.float32))
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["effective_sample_size"] < 0.7
    assert metrics["logprob_gap_max"] == 9998
    ages = by_staleness(np.full(3, 9998.0, np.float32), np.array([0, 1, 2], np.int32), np.zeros(3, np.bool_), {})
    assert all(np.isfinite(value) for value in ages.values())


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_diagnostics_leave_out_and_count_what_is_no_number(value: float) -> None:
    """Of two minus infinities the difference is NaN, and so was every mean."""
    prox, behavior = np.array([-1.0, value, -2.0], np.float32), np.array([-1.5, value, -2.0], np.float32)
    entropies = np.array([0.5, value, 1.0], np.float32)
    metrics = off_policy_metrics(prox, behavior, entropies)
    assert metrics.pop("not_finite_tokens") == 1
    assert metrics == off_policy_metrics(prox[::2], behavior[::2], entropies[::2])
    for one_is_bad in ((prox, behavior[[0, 2, 2]]), (prox[[0, 2, 2]], behavior)):
        assert off_policy_metrics(*one_is_bad, entropies[[0, 2, 2]])["not_finite_tokens"] == 1
    with np.errstate(invalid="ignore"):
        log_rho = prox - behavior
    ages, updates = np.array([0, 0, 1], np.int32), np.zeros(3, np.bool_)
    found = by_staleness(log_rho, ages, updates, {"clip_fraction": np.array([1, 1, 0], np.float32)})
    assert found == by_staleness(log_rho[::2], ages[::2], updates[::2], {"clip_fraction": np.array([1, 0], np.float32)})


def test_without_any_number_the_effective_sample_size_is_unknown_and_not_that_of_on_policy_tokens() -> None:
    bad = np.full(4, np.nan, np.float32)
    metrics = off_policy_metrics(bad, bad, bad)
    assert metrics.keys() == {"not_finite_tokens", "effective_sample_size"}
    assert (metrics["not_finite_tokens"], np.isnan(metrics["effective_sample_size"])) == (4, True)
    assert by_staleness(bad, np.zeros(4, np.int32), np.zeros(4, np.bool_), {"clip_fraction": bad}) == {}


def test_a_token_after_an_update_within_its_turn_says_nothing_of_the_implementations() -> None:
    log_rho, ages = np.array([0.0, 0.5, 0.2], np.float32), np.array([0, 0, 1], np.int32)
    metrics = by_staleness(log_rho, ages, np.array([False, True, False]), {})
    assert metrics["mismatch_kl_k3"] == metrics["mismatch_gap_max"] == 0
    assert metrics["lag_kl_k3"] == pytest.approx(np.mean(np.expm1([0.5, 0.2]) - [0.5, 0.2]), abs=1e-6)


def test_a_token_without_a_logprob_is_not_trained_and_counted() -> None:
    """vLLM says -9999 where it has nan or minus infinity; read as a logprob it would weigh most of all."""
    group = make_group(0, replicas=3, rewards=[1.0, 0.0, 0.0])
    broken = group.trajectories[0]
    logprobs = broken.logprobs.copy()
    missing = np.flatnonzero(broken.policy_mask)[:2]
    logprobs[missing] = NO_LOGPROB
    prepared = prepare_group(
        replace_trajectory(group, 0, dataclasses.replace(broken, logprobs=logprobs)), 0, AdvantageConfig()
    )
    assert prepared.counts["tokens_without_logprob"] == 2
    assert prepared.policy_tokens == sum(t.policy_tokens for t in group.trajectories) - 2
    found = next(s for s in sequences_of(prepared) if np.array_equal(s.token_ids, broken.token_ids))
    assert not found.policy_mask[missing].any()
    assert found.policy_mask.sum() == broken.policy_tokens - 2


def test_a_trajectory_without_any_logprob_is_dropped_with_the_reason() -> None:
    group = make_group(0, replicas=3, rewards=[1.0, 0.5, 0.0])
    broken = dataclasses.replace(group.trajectories[0], logprobs=np.full_like(group.trajectories[0].logprobs, -9999))
    prepared = prepare_group(replace_trajectory(group, 0, broken), 0, AdvantageConfig())
    assert prepared.counts["dropped_no_logprobs"] == 1
    assert len(sequences_of(prepared)) == 2
