"""Computes the objective of a packed row: policy loss, divergence from the reference, entropy bonus, load of experts.

All sums are over the row's policy tokens and not normalised: a step divides once, by the total of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from roll_flash.config.sections.learner import LearnerConfig, is_own
from roll_flash.config.user_code import load_function
from roll_flash.engines.learner import NamedLoss
from roll_flash.learner.losses.critic import value_loss
from roll_flash.learner.losses.policy import LossFunction, policy_loss, weighted_sum
from roll_flash.learner.losses.records import MAX_ABS_LOG_RATIO, RowRecord
from roll_flash.learner.model import lora
from roll_flash.learner.model.policy_model import CriticModel, PolicyModel
from roll_flash.learner.packing.rows import PackedRow

SHARED_VALUE_COEFFICIENT = 0.1
"""Default weight of the loss of values in the gradient of the policy's weights, as in TRL."""


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

    def add_gradient(self, row: PackedRow, loss: NamedLoss | None = None) -> RowRecord:
        """Run forward and backward passes of one row. A collective. With `loss`, without divergence, entropy bonus and
        critic."""
        named = loss is not None
        reference = self.reference_logprobs(row) if self._kl.in_loss and not named else None
        logprobs, entropies = self._policy(row)
        prox = logprobs.detach() if row.prox_logprobs is None else self._tensor(row.prox_logprobs)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        weights = self._tensor(row.token_weights)
        output = policy_loss(
            self._loss_function if loss is None else loss.name,
            logprobs=logprobs,
            prox_logprobs=prox,
            behavior_logprobs=self._tensor(row.behavior_logprobs),
            advantages=self._tensor(row.advantages),
            mask=mask,
            sequence_ids=self._tensor(row.sequence_ids),
            turn_ids=self._tensor(row.turn_ids()),
            normalizer=1.0,
            token_weights=weights,
            **(self._loss.parameters() if loss is None else loss.parameters),
        )
        summed, means = output.loss, {name: float(value) for name, value in output.metrics.items()}
        if reference is not None:
            penalty = kl_penalty(self._kl.estimator, logprobs=logprobs, ref_logprobs=reference, mask=mask)
            summed = summed + self._kl.coefficient * weighted_sum(penalty, mask, weights)
            means["kl_reference"] = float(penalty.detach().mean())
        if self.entropy_bonus and not named:
            summed = summed - self.entropy_bonus * weighted_sum(entropies, mask, weights)
        if self._policy.router_logits is not None:
            losses = load_balancing_losses(self._policy.router_logits, row, self._policy.experts_per_token)
            summed = summed + self._router_aux_loss * (losses * self._of_sequences(row, row.token_weights)).sum()
            means["router_aux_loss"] = float((losses.detach() * self._of_sequences(row)).sum()) / len(row.sequence_ids)
        total = summed
        if self._policy.values is not None:
            total = summed + self._value_coefficient * self._value_loss(self._policy.values, row, means)
        total.backward()
        if self._critic is not None and not named:
            # Only now, so that the activations of two models are never in memory together.
            self._value_loss(self._critic(_without_experts(row))[0], row, means).backward()
        return RowRecord(
            loss=summed.item(),
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

    def _of_sequences(self, row: PackedRow, weights: NDArray[np.float32] | None = None) -> Tensor:
        """Return the sum of the weights of each sequence's policy tokens, or their number."""
        return self._tensor(np.bincount(row.sequence_ids, weights, len(row.members)).astype(np.float32))

    def _value_loss(self, values: Tensor, row: PackedRow, means: dict[str, float]) -> Tensor:
        """Return the weighted sum of the loss of `values`, with its metrics in `means`; 0 for rows without returns."""
        if row.returns is None or row.values is None:
            return values.sum() * 0.0
        returns, old_values = self._tensor(row.returns), self._tensor(row.values)
        losses, clipped = value_loss(values, old_values=old_values, returns=returns, clip=self._value_clip)
        means["value_loss"] = float(losses.detach().mean())
        means["value_clip_fraction"] = float(clipped.float().mean())
        return (losses * self._tensor(row.token_weights)).sum()

    def idle_pass(self, loss: NamedLoss | None = None) -> None:
        """Take part in the collectives of `add_gradient` on a rank that has no row."""
        if self._kl.in_loss and loss is None:
            self.reference_logprobs(SINGLE_TOKEN)
        logprobs, _ = self._policy(SINGLE_TOKEN)
        (logprobs.sum() * 0.0).backward()
        if self._critic is not None and loss is None:
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
    # Not 0: that is often padding, with an embedding of zeros, where gemma3n has a gradient of NaN, and 0 * NaN is NaN.
    token_ids=np.full(1, 3, np.int64),
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


def load_balancing_losses(router_logits: Sequence[Tensor], row: PackedRow, top_k: int) -> Tensor:
    """Return the loss of each of the row's sequences; a step adds them up, each weighted like its policy tokens.

    The loss of a sequence is that of transformers (`load_balancing_loss_func`) on its tokens before the last policy
    token: experts * sum over experts of (share of the choices) * (mean probability), over all tokens and layers. It is
    `top_k` if all experts are used alike. `router_logits`: [N, experts] for each layer with experts. The choices are
    those that the router makes now, not replayed ones: it is the router that the loss trains.

    The usual loss (Switch Transformer, arXiv 2101.03961, equations 4-6) multiplies two means over all tokens of a
    batch, so that its value depends on how tokens are split into batches. For each sequence (as in DeepSeek-V3, arXiv
    2412.19437, equations 17-20) it is a sum over sequences, the same for any micro-batches and ranks.
    """
    device, num_experts = router_logits[0].device, router_logits[0].shape[-1]
    tokens = torch.tensor(_tokens_of_sequences(row), device=device, dtype=torch.float32)
    chosen = torch.zeros(row.num_tokens, num_experts, device=device)
    probabilities = torch.zeros_like(chosen)
    for logits in router_logits:
        of_layer = logits.float().softmax(-1)
        chosen.scatter_add_(1, of_layer.detach().topk(top_k).indices, torch.ones_like(chosen))
        probabilities = probabilities + of_layer
    tokens = tokens / (tokens.sum(-1, keepdim=True) * len(router_logits))  # a mean over tokens and layers
    return num_experts * ((tokens @ chosen) * (tokens @ probabilities)).sum(-1)


def _tokens_of_sequences(row: PackedRow) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return [sequences, N]: true for the nodes of each sequence up to that which predicts its last policy token."""
    last = np.zeros(len(row.members), np.int64)
    np.maximum.at(last, row.sequence_ids, row.source)
    nodes = np.arange(row.num_tokens)
    return (nodes <= last[:, None]) & (last[:, None] < row.subtree_end)
