"""Computes the objective of a packed row: policy loss, divergence from the reference, entropy bonus.

All sums are over the row's policy tokens and not normalised: a step divides once, by the total of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from roll_flash.config.sections.learner import LearnerConfig, is_own
from roll_flash.config.user_code import load_function
from roll_flash.engines.learner import SampleName
from roll_flash.learner.losses.correction import MAX_ABS_LOG_RATIO
from roll_flash.learner.losses.critic import value_loss
from roll_flash.learner.losses.load_balancing import load_balancing_loss
from roll_flash.learner.losses.policy import LossFunction, policy_loss, weighted_sum
from roll_flash.learner.model import lora
from roll_flash.learner.model.policy_model import CriticModel, PolicyModel
from roll_flash.learner.packing.rows import PackedRow

Floats = NDArray[np.float32]
SHARED_VALUE_COEFFICIENT = 0.1
"""Default weight of the loss of values in the gradient of the policy's weights, as in TRL."""


@dataclass(frozen=True, slots=True, eq=False)
class RowRecord:
    """Results of the passes of one row: arrays [policy tokens] in the row's order, sums and means over them."""

    loss: float
    """Weighted sum over the policy tokens."""
    means: dict[str, float]
    logprobs: Floats
    """Log-probabilities under the policy of the start of the step; with `proximal_decay`, of the minibatch."""
    entropies: Floats
    behavior_logprobs: Floats
    versions: NDArray[np.int32]
    after_updates: NDArray[np.bool_]
    """See `PackedRow.after_updates`."""
    computed_tokens: int
    """Number of nodes of the row."""
    padded_tokens: int
    """Number of tokens of its sequences without sharing."""
    indicators: dict[str, Floats]
    """1 for each token that a clip or a correction changed, else 0."""
    by_sample: Mapping[SampleName, Floats] = field(default_factory=dict)
    """`logprobs` by sample, with `learner.log_logprobs`."""
    values: Floats | None = None
    returns: Floats | None = None
    """Values at the step's start, and what they should have been; None without a critic."""


class Objective:
    """The configured loss of a (sharded) policy, with a frozen reference if `kl.coefficient` is not 0, and the loss of
    the values of a critic, which is a value head of the policy or a (sharded) model."""

    def __init__(
        self,
        config: LearnerConfig,
        policy: PolicyModel,
        reference: PolicyModel | None,
        critic: CriticModel | None = None,
    ) -> None:
        """If `reference` is None and the KL coefficient is not 0, the policy without adapters is the reference."""
        self._loss = config.loss
        self._loss_function: str | LossFunction = (
            load_function(config.loss.name, "learner.loss.name") if is_own(config.loss.name) else config.loss.name
        )
        self._kl = config.kl
        self.entropy_bonus = config.entropy_bonus
        self._averages = config.proximal_decay is not None
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._value_clip = config.critic.clip
        detached = critic is not None or config.critic.detach
        self._value_coefficient = 1.0 if detached else config.critic.coefficient or SHARED_VALUE_COEFFICIENT
        self._router_aux_loss = config.router_aux_loss
        if self._router_aux_loss:
            policy.keep_router_logits()

    def add_gradient(self, row: PackedRow, *, supervised: bool = False) -> RowRecord:
        """Run forward and backward passes of one row. A collective."""
        reference = self.reference_logprobs(row) if self._kl.in_loss and not supervised else None
        logprobs, entropies = self._policy(row)
        prox = logprobs.detach() if row.prox_logprobs is None else self._tensor(row.prox_logprobs)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        weights = self._tensor(row.token_weights)
        output = policy_loss(
            "supervised" if supervised else self._loss_function,
            logprobs=logprobs,
            prox_logprobs=prox,
            behavior_logprobs=self._tensor(row.behavior_logprobs),
            advantages=self._tensor(row.advantages),
            mask=mask,
            sequence_ids=self._tensor(row.sequence_ids),
            turn_ids=self._tensor(row.turn_ids()),
            normalizer=1.0,
            token_weights=weights,
            **({} if supervised else self._loss.parameters()),
        )
        loss, means = output.loss, {name: float(value) for name, value in output.metrics.items()}
        if reference is not None:
            penalty = kl_penalty(self._kl.estimator, logprobs=logprobs, ref_logprobs=reference, mask=mask)
            loss = loss + self._kl.coefficient * weighted_sum(penalty, mask, weights)
            means["kl_reference"] = float(penalty.detach().mean())
        if self.entropy_bonus and not supervised:
            loss = loss - self.entropy_bonus * weighted_sum(entropies, mask, weights)
        if self._policy.router_logits is not None:
            balance = load_balancing_loss(self._policy.router_logits, row, self._policy.experts_per_token)
            loss = loss + self._router_aux_loss * balance
            means["router_aux_loss"] = float(balance.detach()) / float(row.token_weights.sum())
        total = loss
        if self._policy.values is not None:
            total = loss + self._value_coefficient * self._value_loss(self._policy.values, row, means)
        total.backward()
        if self._critic is not None and not supervised:
            # Only now, so that the activations of two models are never in memory together.
            self._value_loss(self._critic(_without_experts(row))[0], row, means).backward()
        return RowRecord(
            loss=loss.item(),
            means=means,
            logprobs=(logprobs.detach() if self._averages else prox).cpu().numpy(),
            entropies=entropies.detach().cpu().numpy(),
            behavior_logprobs=row.behavior_logprobs,
            versions=row.versions,
            after_updates=row.after_updates(),
            computed_tokens=row.num_tokens,
            padded_tokens=row.padded_tokens,
            indicators={
                name: value.float().cpu().numpy() for name, value in output.indicators.items() if "fraction" in name
            },
            values=row.values,
            returns=row.returns,
        )

    def _value_loss(self, values: Tensor, row: PackedRow, means: dict[str, float]) -> Tensor:
        """Return the weighted sum of the loss of `values`, with its metrics in `means`; 0 for rows without returns."""
        if row.returns is None or row.values is None:
            return values.sum() * 0.0
        returns, old_values = self._tensor(row.returns), self._tensor(row.values)
        losses, clipped = value_loss(values, old_values=old_values, returns=returns, clip=self._value_clip)
        means["value_loss"] = float(losses.detach().mean())
        means["value_clip_fraction"] = float(clipped.float().mean())
        return (losses * self._tensor(row.token_weights)).sum()

    def idle_pass(self, *, supervised: bool = False) -> None:
        """Take part in the collectives of `add_gradient` on a rank that has no row."""
        if self._kl.in_loss and not supervised:
            self.reference_logprobs(SINGLE_TOKEN)
        logprobs, _ = self._policy(SINGLE_TOKEN)
        (logprobs.sum() * 0.0).backward()
        if self._critic is not None and not supervised:
            (self._critic(SINGLE_TOKEN)[0].sum() * 0.0).backward()

    @torch.no_grad()
    def logprobs(self, row: PackedRow, temperature: float | None = None) -> Tensor:
        """Return the log-probabilities of the row's policy tokens under the current weights. A collective."""
        return _without_backward(self._policy, row, temperature)

    @torch.no_grad()
    def predict(self, row: PackedRow) -> dict[str, Tensor]:
        """Return the `prox_logprobs` of the row's policy tokens, with a critic also their `values`. A collective."""
        found = {"prox_logprobs": self.logprobs(row)}
        values = self._policy.values
        if self._critic is not None:
            values = _without_backward(self._critic, _without_experts(row), None)
        return found if values is None else found | {"values": values}

    def reference_logprobs(self, row: PackedRow) -> Tensor:
        """Return the log-probabilities of the row's policy tokens under the reference. A collective."""
        row = _without_experts(row)
        with torch.no_grad():
            if self._reference is not None:
                return _without_backward(self._reference, row, None)
            with lora.switched_off(self._policy):
                return _without_backward(self._policy, row, None)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.tensor(
            array, device=self._policy.head.device
        )  # a copy, because arrays received through Ray are read-only


def _without_experts(row: PackedRow) -> PackedRow:
    """Return the row for another model than the policy, which chooses its experts itself."""
    return replace(row, routed_experts=None)


def _without_backward(model: PolicyModel, row: PackedRow, temperature: float | None) -> Tensor:
    with _evaluating(model):
        logprobs: Tensor = model(row, temperature)[0]
    # FSDP keeps the root's parameters gathered for a backward pass; without one, reshard here.
    cast(FSDPModule, model).reshard()
    return logprobs


@contextmanager
def _evaluating(model: PolicyModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


SINGLE_TOKEN = PackedRow(
    token_ids=np.zeros(1, np.int64),
    position_ids=np.zeros(1, np.int64),
    subtree_end=np.ones(1, np.int64),
    source=np.zeros(1, np.int64),
    target=np.zeros(1, np.int64),
    sequence_ids=np.zeros(1, np.int64),
    behavior_logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    advantages=np.zeros(1, np.float32),
    token_weights=np.zeros(1, np.float32),
    prox_logprobs=None,
    members=(0,),
    padded_tokens=1,
)


KlEstimator = Literal["k1", "k2", "k3"]


def kl_penalty(estimator: KlEstimator, *, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the per-token KL estimate, with the gradient that minimises the divergence; 0 where masked.

    `k1` has the value d and the gradient sg(d) grad log pi_theta (k1 in the reward); `k2` and `k3` (as in GRPO,
    arXiv 2402.03300, equation 4) are differentiated directly. The exponent of k3 is clamped against overflow.
    """
    zeros = torch.zeros_like(logprobs)
    difference = torch.where(mask, logprobs, zeros) - torch.where(mask, ref_logprobs, zeros).detach()
    match estimator:
        case "k1":
            value = difference.detach()
            return value * (1 + difference - value)
        case "k2":
            return difference.square() / 2
        case "k3":
            bounded = difference.clamp(min=-MAX_ABS_LOG_RATIO)
            return torch.expm1(-bounded) + bounded
    raise ValueError(f"unknown estimator {estimator!r}: use k1, k2 or k3")


_STALENESS_BUCKETS = 5
"""Number of staleness buckets: ages 0, 1, 2, 3, and one for all older tokens."""


def off_policy_metrics(
    prox_logprobs: NDArray[np.float32], behavior_logprobs: NDArray[np.float32], entropies: NDArray[np.float32]
) -> dict[str, float]:
    """Measure the divergence between sampler and learner over a step's policy tokens; shapes [tokens], natural log.

    `behavior_entropy` = mean(-log mu) estimates the entropy of the sampler, `entropy` is that of the learner.
    `kl_k1` = mean(log mu - log pi), `kl_k3` = mean(rho - 1 - log rho), both estimates of KL(mu || pi)
    (J. Schulman, "Approximating KL divergence", 2020). `effective_sample_size` = (sum rho)^2 / (n sum rho^2), Kish; NaN
    if it is unknown. Tokens with a value that is not finite are left out and counted as `not_finite_tokens`.
    """
    if prox_logprobs.size == 0:
        return {}
    known = np.isfinite(prox_logprobs) & np.isfinite(behavior_logprobs) & np.isfinite(entropies)
    if not known.all():
        left_out = {"not_finite_tokens": float((~known).sum()), "effective_sample_size": math.nan}
        return left_out | off_policy_metrics(prox_logprobs[known], behavior_logprobs[known], entropies[known])
    difference = prox_logprobs.astype(np.float64) - behavior_logprobs.astype(np.float64)
    log_rho = bounded_log_ratio(difference)
    rho = np.exp(log_rho)
    return {
        "kl_k1": float(-log_rho.mean()),
        "kl_k3": float((rho - 1 - log_rho).mean()),
        "effective_sample_size": float(rho.sum() ** 2 / (rho.size * (rho**2).sum())),
        "rho_mean": float(rho.mean()),
        "rho_max": float(rho.max()),
        **{f"rho_p{percent:02d}": float(np.percentile(rho, percent)) for percent in (1, 10, 50, 90, 99)},
        "logprob_gap_max": float(np.abs(difference).max()),
        "entropy": float(entropies.mean()),
        "behavior_entropy": -float(behavior_logprobs.mean(dtype=np.float64)),
    }


def bounded_log_ratio(log_rho: NDArray[Any]) -> NDArray[np.float64]:
    """Clamp log-ratios as the losses do (`correction.MAX_ABS_LOG_RATIO`); float64."""
    return np.clip(log_rho.astype(np.float64), -MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


def by_staleness(
    log_rho: NDArray[np.float32],
    ages: NDArray[np.int32],
    after_updates: NDArray[np.bool_],
    indicators: Mapping[str, NDArray[np.float32]],
) -> dict[str, float]:
    """Return divergence and clip and correction fractions per age in versions; all arrays [tokens].

    Fresh tokens have age 0, in a turn that began with the weights that now train on them: their divergence comes from
    the two implementations, not from policy lag (`mismatch_*`). `lag_kl_k3` is the additional divergence of the others.
    Tokens whose `log_rho` is not finite are left out.
    """
    known = np.isfinite(log_rho)
    log_rho, ages, after_updates = log_rho[known], ages[known], after_updates[known]
    indicators = {name: values[known] for name, values in indicators.items()}
    metrics: dict[str, float] = {}
    bounded = bounded_log_ratio(log_rho)
    k3 = np.expm1(bounded) - bounded
    for label, chosen in _buckets(ages):
        metrics[f"kl_k3/age_{label}"] = float(k3[chosen].mean())
        for name, values in indicators.items():
            metrics[f"{name}/age_{label}"] = float(values[chosen].mean())
    fresh = (ages <= 0) & ~after_updates
    if fresh.any():
        metrics["mismatch_kl_k3"] = float(k3[fresh].mean())
        metrics["mismatch_gap_max"] = float(np.abs(log_rho[fresh]).max())
        metrics["mismatch_gap_mean"] = float(np.abs(log_rho[fresh]).mean())
    if not fresh.all():
        metrics["lag_kl_k3"] = float(k3[~fresh].mean()) - metrics.get("mismatch_kl_k3", 0.0)
    return metrics


def _buckets(ages: NDArray[np.int32]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    last = _STALENESS_BUCKETS - 1
    for age in range(_STALENESS_BUCKETS):
        chosen = ages == age if age < last else ages >= last
        if chosen.any():
            yield (str(age) if age < last else f"{last}_or_more"), chosen


def staleness_metrics(ages: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Return mean, maximum and histogram of the pairs (age in versions, policy tokens of that age)."""
    pairs = list(ages)
    tokens = sum(number for _, number in pairs)
    if tokens == 0:
        return {}
    buckets = [0] * _STALENESS_BUCKETS
    for age, number in pairs:
        buckets[min(age, _STALENESS_BUCKETS - 1)] += number
    labels = [*map(str, range(_STALENESS_BUCKETS - 1)), f"{_STALENESS_BUCKETS - 1}_or_more"]
    return {
        "staleness_mean": sum(age * number for age, number in pairs) / tokens,
        "staleness_max": float(max(age for age, _ in pairs)),
        **{f"staleness_{label}": number / tokens for label, number in zip(labels, buckets, strict=True)},
    }
