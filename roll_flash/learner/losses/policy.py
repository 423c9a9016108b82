"""Computes policy losses; each loss is a pure function of tensors and names its source.

Shapes are [T] (packed) or [B, T], natural log. Masked positions may hold anything, NaN included. With
rho = pi_prox / pi_behaviour and r = pi_theta / pi_prox, `decoupled_ppo` minimises -w(rho) * min(r A, clip(r) A).

A loss is the weighted sum over policy tokens divided by `normalizer`, or the mean if `normalizer` is None. A step
passes the same normalizer to all of its micro-batches, so that the gradient does not depend on the split. The weight
1 / (policy tokens of the sequence) and the number of sequences as normalizer give the mean over sequences.

If a step takes one optimizer update, pi_prox is pi_theta at its start: `prox_logprobs = logprobs.detach()` of the same
forward pass is exactly the recomputed proximal policy, without a second pass. The value of r is then 1 (its gradient
is not 0), and rho corrects for staleness. With several updates, `prox_logprobs` are computed before the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll_flash.learner.losses.correction import CorrectionLevel, CorrectionName, correct, log_ratio

RatioLevel = Literal["turn_mean", "sequence_mean"]
SequenceRejects = Literal["all", "negative"]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of `policy_loss`. `loss` is a scalar with a gradient, `metrics` are scalar means over the policy tokens.

    `indicators` are the per-token values of those means: float, shaped like the input, 0 where masked, no gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    indicators: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Result of a loss function: per-token losses and named per-token indicators, shaped like the input."""

    loss: Tensor
    indicators: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Input tensors of every loss, with masked positions set to 0."""

    logprobs: Tensor
    prox_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor | None
    turn_ids: Tensor | None = None

    def ratio(self, denominator: Tensor, level: CorrectionLevel = "token") -> Tensor:
        return log_ratio(self.logprobs, denominator, self.mask, level, self.sequence_ids, self.turn_ids).exp()


LossFunction = Callable[..., TokenLoss | Tensor]
"""A function of `PolicyTokens` and keyword arguments that returns the loss of each token, alone or with indicators."""


def policy_loss(
    name: str | LossFunction,
    *,
    logprobs: Tensor,
    prox_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    normalizer: float | None = None,
    token_weights: Tensor | None = None,
    sequence_floor: float | None = None,
    sequence_cap: float | None = None,
    sequence_rejects: SequenceRejects = "all",
    **params: object,
) -> LossOutput:
    """Compute a loss, by its name or as a function, over the tokens where `mask` is true.

    All tensors have shape [T] or [B, T]; `advantages` may be broadcast ([B, 1]). Sequence-level quantities of packed
    tensors need `sequence_ids` (int64, from 0), those of turns `turn_ids`. `token_weights` default to 1. Sequences
    whose geometric mean of rho is outside [`sequence_floor`, `sequence_cap`] add nothing to the loss, but count in its
    mean; with `sequence_rejects="negative"` only those of their tokens with a negative advantage add nothing. `params`
    go to the loss function.

    Raises ValueError for an unknown name, TypeError for an unknown parameter.
    """
    function = LOSSES.get(name) if isinstance(name, str) else name
    if function is None:
        raise ValueError(f"unknown loss {name!r}: use one of {', '.join(LOSSES)}")
    mask = mask.bool()
    zeros = torch.zeros_like(logprobs)
    tokens = PolicyTokens(
        logprobs=torch.where(mask, logprobs, zeros),
        prox_logprobs=torch.where(mask, prox_logprobs, zeros).detach(),
        behavior_logprobs=torch.where(mask, behavior_logprobs, zeros).detach(),
        advantages=torch.where(mask, advantages, zeros).detach(),
        mask=mask,
        sequence_ids=sequence_ids,
        turn_ids=turn_ids,
    )
    found = function(tokens, **params)
    result = TokenLoss(found, {}) if isinstance(found, Tensor) else found
    indicators, trained = dict(result.indicators), mask
    if sequence_floor is not None or sequence_cap is not None:
        rejected = _rejected(tokens, sequence_floor or 0.0, math.inf if sequence_cap is None else sequence_cap)
        if sequence_rejects == "negative":
            rejected = rejected & (tokens.advantages < 0)
        trained, indicators["rejected_fraction"] = mask & ~rejected, rejected
    count = mask.sum().clamp(min=1)
    loss = weighted_sum(result.loss, trained, token_weights) / (count if normalizer is None else normalizer)
    indicators = {key: torch.where(mask, value, zeros).detach() for key, value in indicators.items()}
    return LossOutput(loss, {key: value.sum() / count for key, value in indicators.items()}, indicators)


def _rejected(tokens: PolicyTokens, floor: float, cap: float) -> Tensor:
    """True for the tokens of sequences whose geometric mean of rho is out of bounds, as verl's sequence rejection."""
    rho = log_ratio(
        tokens.prox_logprobs, tokens.behavior_logprobs, tokens.mask, "sequence_mean", tokens.sequence_ids
    ).exp()
    return tokens.mask & ((rho < floor) | (rho > cap))


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weighted sum of `values` where `mask` is true; other values are ignored."""
    zeros = torch.zeros_like(values)
    kept = torch.where(mask, values, zeros)
    return kept.sum() if weights is None else (kept * torch.where(mask, weights, zeros)).sum()


def ppo(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_theta / pi_behaviour.

    Source: PPO, arXiv 1707.06347, equation 7; unequal bounds as in DAPO, arXiv 2503.14476; `dual_clip` c > 1 caps the
    loss of negative advantages at -c A (Ye et al., arXiv 1912.09729, equation 5).
    """
    return _clipped(tokens, tokens.ratio(tokens.behavior_logprobs), clip_low, clip_high, dual_clip)


def decoupled_ppo(
    tokens: PolicyTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    correction: CorrectionName = "tis",
    correction_level: CorrectionLevel = "token",
    correction_cap: float = 2.0,
    correction_floor: float = 0.5,
) -> TokenLoss:
    """-w(rho) min(r A, clip(r) A) with r = pi_theta / pi_prox and rho = pi_prox / pi_behaviour.

    Source: Hilton et al., arXiv 2110.00641, equation 4; AReaL, arXiv 2505.24298, equation 5. The trust region is
    around a recent policy; w corrects for the staleness of the sample (see `correction.correct`).
    """
    clipped = _clipped(tokens, tokens.ratio(tokens.prox_logprobs), clip_low, clip_high, dual_clip)
    return _corrected(tokens, clipped, correction, correction_level, correction_cap, correction_floor)


def reinforce(
    tokens: PolicyTokens,
    *,
    correction: CorrectionName = "none",
    correction_level: CorrectionLevel = "token",
    correction_cap: float = 2.0,
    correction_floor: float = 0.5,
) -> TokenLoss:
    """-w(rho) A log pi_theta (Williams 1992). With `correction="none"`, w = 1: correct only on-policy."""
    plain = TokenLoss(-tokens.advantages * tokens.logprobs, {})
    return _corrected(tokens, plain, correction, correction_level, correction_cap, correction_floor)


def tis(tokens: PolicyTokens, *, correction_cap: float = 1.0, correction_level: CorrectionLevel = "token") -> TokenLoss:
    """-sg(min(rho, cap)) A log pi_theta with rho = pi_theta / pi_behaviour.

    Source: truncated importance sampling as a loss, used in ROLL Flash, arXiv 2510.11345, section 3.4.
    """
    ratio = tokens.ratio(tokens.behavior_logprobs, correction_level).detach()
    loss = -ratio.clamp(max=correction_cap) * tokens.advantages * tokens.logprobs
    return TokenLoss(loss, {"correction_fraction": ratio > correction_cap})


def cispo(tokens: PolicyTokens, *, clip_low: float = 1.0, clip_high: float = 0.2) -> TokenLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi_theta with rho = pi_theta / pi_behaviour.

    Source: MiniMax-M1, arXiv 2506.13585, equation 4: the ratio is clipped, but every token keeps its gradient.
    """
    ratio = tokens.ratio(tokens.behavior_logprobs).detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-clipped * tokens.advantages * tokens.logprobs, {"clip_fraction": clipped != ratio})


def weighted_topr(
    tokens: PolicyTokens,
    *,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    correction_cap: float = 1.0,
    correction_level: CorrectionLevel = "token",
) -> TokenLoss:
    """-w+ A log pi for A > 0; -w- sg(min(rho, cap)) A log pi for A <= 0, rho = pi_theta / pi_behaviour.

    Source: tapered off-policy REINFORCE, arXiv 2503.14286, equation 8; weights as in ROLL Flash, arXiv 2510.11345.
    Good samples are imitated at any age; bad samples lose weight as the policy stops producing them.
    """
    ratio = tokens.ratio(tokens.behavior_logprobs, correction_level).detach()
    positive = tokens.advantages > 0
    weight = torch.where(positive, positive_weight, negative_weight * ratio.clamp(max=correction_cap))
    loss = -weight * tokens.advantages * tokens.logprobs
    return TokenLoss(loss, {"correction_fraction": ~positive & (ratio > correction_cap)})


def topr(
    tokens: PolicyTokens, *, correction_cap: float = 1.0, correction_level: CorrectionLevel = "token"
) -> TokenLoss:
    """`weighted_topr` with both weights 1."""
    return weighted_topr(tokens, correction_cap=correction_cap, correction_level=correction_level)


def tis_topr(
    tokens: PolicyTokens,
    *,
    topr_share: float = 0.1,
    correction_cap: float = 1.0,
    correction_level: CorrectionLevel = "token",
) -> TokenLoss:
    """(1 - topr_share) times the loss of `tis` plus `topr_share` times that of `topr`.

    A good sample weighs at least `topr_share`: what has become rarer since it was sampled comes back, which holds the
    policy near the one that sampled. With a small share that costs little where the policy must move far. Measured in
    benchmarks/staleness.py.
    """
    ratio = tokens.ratio(tokens.behavior_logprobs, correction_level).detach()
    truncated = ratio.clamp(max=correction_cap)
    weight = torch.where(tokens.advantages > 0, topr_share + (1 - topr_share) * truncated, truncated)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, {"correction_fraction": ratio > correction_cap})


def gspo(
    tokens: PolicyTokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio_level: RatioLevel = "sequence_mean",
) -> TokenLoss:
    """PPO with the ratio s(t) = sg(s) pi_theta / sg(pi_theta), s the geometric mean of the sequence's ratios.

    Source: GSPO-token, arXiv 2507.18071, equations 13 and 14 if the step is normalised by sequences, as in verl. The
    value equals that of GSPO (equation 5), and so does the gradient if all tokens of a sequence share one advantage;
    with per-turn advantages, each token's gradient uses the advantage of its turn. With `turn_mean`, s is the geometric
    mean of the turn's ratios, as ROLL's `ratio_type: segment`.
    """
    shared = log_ratio(
        tokens.logprobs.detach(),
        tokens.behavior_logprobs,
        tokens.mask,
        ratio_level,
        tokens.sequence_ids,
        tokens.turn_ids,
    )
    own = tokens.logprobs - tokens.logprobs.detach()
    return _clipped(tokens, (shared + own).exp(), clip_low, clip_high, None)


def m2po(tokens: PolicyTokens) -> TokenLoss:
    """-r A with r = pi_theta / pi_behaviour: a policy gradient with importance weights, without a clip.

    Source: second-moment trust policy optimisation, arXiv 2510.01161. What takes the place of the clip is a rule over
    all tokens of a step, see `second_moment.py`: it sets the advantages of some of them to 0 before this function.
    """
    return TokenLoss(-tokens.ratio(tokens.behavior_logprobs) * tokens.advantages, {})


def sapo(tokens: PolicyTokens, *, positive_temperature: float = 1.0, negative_temperature: float = 1.05) -> TokenLoss:
    """-(4 / t) sigmoid(t (r - 1)) A with r = pi_theta / pi_behaviour and a temperature t for each sign of A.

    Source: soft adaptive policy optimisation, arXiv 2511.20347: in the place of a clip, a gradient that fades smoothly
    as the ratio leaves 1. At r = 1 the gradient is that of PPO.
    """
    ratio = tokens.ratio(tokens.behavior_logprobs)
    negative = torch.full_like(ratio, negative_temperature)  # of two plain numbers torch.where would make float32
    temperature = torch.where(tokens.advantages > 0, positive_temperature, negative)
    return TokenLoss(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * tokens.advantages, {})


def supervised(tokens: PolicyTokens) -> TokenLoss:
    """-log pi_theta: cross-entropy on the policy tokens; advantages are ignored."""
    return TokenLoss(-tokens.logprobs, {})


def _corrected(
    tokens: PolicyTokens,
    plain: TokenLoss,
    correction: CorrectionName,
    level: CorrectionLevel,
    cap: float,
    floor: float,
) -> TokenLoss:
    """Multiply the token losses of `plain` by the weights that `correction.correct` computes from rho."""
    weight = correct(
        correction,
        prox_logprobs=tokens.prox_logprobs,
        behavior_logprobs=tokens.behavior_logprobs,
        mask=tokens.mask,
        level=level,
        cap=cap,
        floor=floor,
        sequence_ids=tokens.sequence_ids,
        turn_ids=tokens.turn_ids,
    )
    indicators = {**plain.indicators, "correction_fraction": weight.changed, "correction_weight": weight.weights}
    return TokenLoss(weight.weights * plain.loss, indicators)


def _clipped(
    tokens: PolicyTokens, ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    plain = -ratio * tokens.advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages
    loss = torch.maximum(plain, clipped)
    indicators = {"clip_fraction": (clipped > plain).detach()}
    if dual_clip is not None:
        bound = -dual_clip * tokens.advantages
        capped = (tokens.advantages < 0) & (loss > bound)
        loss = torch.where(capped, bound, loss)
        indicators["dual_clip_fraction"] = capped.detach()
    return TokenLoss(loss, indicators)


LOSSES: dict[str, LossFunction] = {
    "decoupled_ppo": decoupled_ppo,
    "ppo": ppo,
    "reinforce": reinforce,
    "tis": tis,
    "cispo": cispo,
    "topr": topr,
    "weighted_topr": weighted_topr,
    "tis_topr": tis_topr,
    "gspo": gspo,
    "m2po": m2po,
    "sapo": sapo,
    "supervised": supervised,
}
