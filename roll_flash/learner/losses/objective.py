"""What a packed row adds to the gradient: policy loss, divergence from the reference, entropy.

All sums are over the row's policy tokens, not yet divided by anything: a step divides once, by all of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from roll_flash.config.learner import LearnerConfig
from roll_flash.learner.losses.policy import policy_loss, weighted_sum
from roll_flash.learner.losses.regularizers import kl_penalty
from roll_flash.learner.model import lora
from roll_flash.learner.model.policy_model import PolicyModel
from roll_flash.learner.packing.rows import PackedRow

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class RowRecord:
    """What the passes of a row showed: arrays [policy tokens] in the row's order, sums and means over them."""

    loss: float
    """Weighted sum over the policy tokens."""
    means: dict[str, float]
    logprobs: Floats
    """Those of the proximal policy."""
    entropies: Floats
    behavior_logprobs: Floats
    versions: NDArray[np.int32]
    indicators: dict[str, Floats]
    """Where a clip or a correction acted: 0 or 1 for each token."""


class Objective:
    """The loss that a config describes, on a (sharded) policy and, where it has a coefficient, a frozen reference."""

    def __init__(self, config: LearnerConfig, policy: PolicyModel, reference: PolicyModel | None) -> None:
        """`reference` None with a coefficient: the policy without its adapters is the reference."""
        self._loss = config.loss
        self._kl = config.kl
        self._entropy_bonus = config.entropy_bonus
        self._policy = policy
        self._reference = reference

    def add_gradient(self, row: PackedRow, *, supervised: bool = False) -> RowRecord:
        """Forward and backward. A collective."""
        reference = None if supervised else self._reference_logprobs(row)
        logprobs, entropies = self._policy(row)
        prox = logprobs.detach() if row.prox_logprobs is None else self._tensor(row.prox_logprobs)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        weights = self._tensor(row.token_weights)
        output = policy_loss(
            "supervised" if supervised else self._loss.name,
            logprobs=logprobs,
            prox_logprobs=prox,
            behavior_logprobs=self._tensor(row.behavior_logprobs),
            advantages=self._tensor(row.advantages),
            mask=mask,
            sequence_ids=self._tensor(row.sequence_ids),
            normalizer=1.0,
            token_weights=weights,
            **({} if supervised else self._loss.parameters()),
        )
        loss, means = output.loss, {name: float(value) for name, value in output.metrics.items()}
        if reference is not None:
            penalty = kl_penalty(self._kl.estimator, logprobs=logprobs, ref_logprobs=reference, mask=mask)
            loss = loss + self._kl.coefficient * weighted_sum(penalty, mask, weights)
            means["kl_reference"] = float(penalty.detach().mean())
        if self._entropy_bonus and not supervised:
            loss = loss - self._entropy_bonus * weighted_sum(entropies, mask, weights)
        loss.backward()
        return RowRecord(
            loss=loss.item(),
            means=means,
            logprobs=prox.cpu().numpy(),
            entropies=entropies.detach().cpu().numpy(),
            behavior_logprobs=row.behavior_logprobs,
            versions=row.versions,
            indicators={
                name: value.float().cpu().numpy() for name, value in output.indicators.items() if "fraction" in name
            },
        )

    def add_nothing(self, *, supervised: bool = False) -> None:
        """The part of a rank that has no row: takes part in the collectives of `add_gradient`."""
        if not supervised:
            self._reference_logprobs(SINGLE_TOKEN)
        logprobs, _ = self._policy(SINGLE_TOKEN)
        (logprobs.sum() * 0.0).backward()

    @torch.no_grad()
    def logprobs(self, row: PackedRow, temperature: float | None = None) -> Tensor:
        """Those of the row's policy tokens under the current weights. A collective."""
        return _without_backward(self._policy, row, temperature)

    def _reference_logprobs(self, row: PackedRow) -> Tensor | None:
        if not self._kl.coefficient:
            return None
        with torch.no_grad():
            if self._reference is not None:
                return _without_backward(self._reference, row, None)
            with lora.switched_off(self._policy):
                return _without_backward(self._policy, row, None)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.tensor(
            array, device=self._policy.head.device
        )  # a copy: arrays that came through Ray are read-only


def _without_backward(model: PolicyModel, row: PackedRow, temperature: float | None) -> Tensor:
    with _evaluating(model):
        logprobs: Tensor = model(row, temperature)[0]
    # FSDP gathers the root's parameters for a backward pass, and none comes to shard them again.
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
