"""Computes weights that correct for samples of an older (behaviour) policy, with pure functions of tensors.

rho = pi_prox / pi_behaviour is the importance ratio of the policy at the step's start to the sampling policy. A weight
multiplies a token's loss and is never differentiated. At sequence level all policy tokens of a sequence share one
ratio: the product of the token ratios, or their geometric mean (`_mean`). At turn level those of a turn do, which is an
unbroken run of policy tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from roll_flash.learner.losses.records import MAX_ABS_LOG_RATIO

CorrectionName = Literal["none", "tis", "mask"]
CorrectionLevel = Literal["token", "turn", "turn_mean", "sequence", "sequence_mean"]


@dataclass(frozen=True, slots=True)
class Correction:
    """`weights` and `changed` (true if a bound acted), shaped like the logprobs; 0 and false where masked."""

    weights: Tensor
    changed: Tensor


def sequence_sum(values: Tensor, mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Sum `values` over the tokens of each sequence where `mask` is true; broadcast back to the shape of `values`.

    With shape [B, T] and no `sequence_ids`, each row is a sequence; shape [T] needs `sequence_ids` (int64, from 0).
    """
    masked = torch.where(mask, values, torch.zeros_like(values))
    if sequence_ids is None:
        if values.ndim != 2:
            raise ValueError("packed tensors [T] need sequence_ids at sequence level")
        return masked.sum(-1, keepdim=True).expand_as(values)
    flat_ids = sequence_ids.reshape(-1)
    sums = torch.zeros(int(flat_ids.max()) + 1 if flat_ids.numel() else 0, dtype=values.dtype, device=values.device)
    return sums.index_add(0, flat_ids, masked.reshape(-1))[flat_ids].reshape(values.shape)


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Like `sequence_sum`, but the mean."""
    counts = sequence_sum(torch.ones_like(values), mask, sequence_ids)
    return sequence_sum(values, mask, sequence_ids) / counts.clamp(min=1)


def log_ratio(
    numerator: Tensor,
    denominator: Tensor,
    mask: Tensor,
    level: CorrectionLevel,
    sequence_ids: Tensor | None,
    turn_ids: Tensor | None = None,
) -> Tensor:
    """Return the log-ratio at the given level, within +-MAX_ABS_LOG_RATIO; 0 where masked, even if inputs are NaN.
    Turn levels need `turn_ids` (int64, from 0, over all sequences)."""
    if level not in get_args(CorrectionLevel):
        raise ValueError(f"unknown correction level {level!r}: use one of {', '.join(get_args(CorrectionLevel))}")
    ratio = torch.where(mask, numerator, 0.0) - torch.where(mask, denominator, 0.0)
    if level != "token":
        part, _, mean = level.partition("_")
        if part == "turn" and turn_ids is None:
            raise ValueError("turn levels need turn_ids")
        ids = sequence_ids if part == "sequence" else turn_ids
        combine = sequence_mean if mean else sequence_sum
        ratio = torch.where(mask, combine(ratio, mask, ids), 0.0)
    return ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


@torch.no_grad()
def correct(
    name: CorrectionName,
    *,
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    level: CorrectionLevel = "token",
    cap: float = 2.0,
    floor: float = 0.5,
    sequence_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
) -> Correction:
    """Return the weight of every token.

    `none`: 1. `tis`: min(rho, cap), truncated importance sampling (Espeholt et al., arXiv 1802.01561, section 4.1; for
    language models Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    `mask`: rho inside [floor, cap], else 0 (IcePop, arXiv 2510.18855). The bounds apply to rho, not to 1 / rho.

    Shapes [T] or [B, T], natural log.
    """
    ratio = log_ratio(prox_logprobs, behavior_logprobs, mask, level, sequence_ids, turn_ids).exp()
    zeros = torch.zeros_like(ratio)
    match name:
        case "none":
            return Correction(torch.where(mask, torch.ones_like(ratio), zeros), torch.zeros_like(mask))
        case "tis":
            return Correction(torch.where(mask, ratio.clamp(max=cap), zeros), mask & (ratio > cap))
        case "mask":
            kept = mask & (ratio >= floor) & (ratio <= cap)
            return Correction(torch.where(kept, ratio, zeros), mask & ~kept)
    raise ValueError(f"unknown correction {name!r}: use none, tis or mask")
