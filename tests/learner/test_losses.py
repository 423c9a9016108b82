"""Every loss against its closed form and finite differences in float64, and against garbage where masked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll_flash.learner.losses.correction import correct
from roll_flash.learner.losses.policy import LOSSES, policy_loss

LEVELS = ["token", "turn", "turn_mean", "sequence", "sequence_mean"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("reinforce", {"correction": "mask", "correction_level": "sequence_mean"}),
    ("supervised", {}),
    ("ppo", {}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
    *(
        ("decoupled_ppo", {"correction": c, "correction_level": level})
        for c in ("none", "tis", "mask")
        for level in LEVELS
    ),
    ("tis", {}),
    ("cispo", {"clip_low": 0.3}),
    ("topr", {}),
    ("topr", {"correction_level": "sequence"}),
    ("weighted_topr", {"positive_weight": 0.5, "negative_weight": 2.0}),
    ("tis_topr", {"topr_share": 0.3}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1, "ratio_level": "turn_mean"}),
    ("m2po", {}),
    ("sapo", {}),
    ("decoupled_ppo", {"sequence_floor": 0.9, "sequence_cap": 1.1}),
    ("decoupled_ppo", {"sequence_floor": 0.9, "sequence_rejects": "negative"}),
]


def tensors(seed: int = 0, shape: tuple[int, int] = (4, 7)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    logprobs = uniform(-3, -0.2)
    found = {
        "logprobs": logprobs,
        "prox_logprobs": logprobs + uniform(-0.5, 0.5),
        "behavior_logprobs": logprobs + uniform(-1, 1),
        "advantages": uniform(-2, 2),
        "mask": torch.rand(shape, generator=generator) < 0.7,
    }
    return found | {"turn_ids": turns_of(found["mask"])}


def turns_of(mask: Tensor) -> Tensor:
    """The number of each token's turn over all rows, found one token after the other; masked ones have any."""
    ids, turn = torch.zeros(mask.shape, dtype=torch.int64), -1
    for row in range(len(mask)):
        for place in range(mask.shape[1]):
            turn += bool(mask[row, place]) and (place == 0 or not mask[row, place - 1])
            ids[row, place] = max(turn, 0)
    return ids


def log_ratio_of(difference: Tensor, mask: Tensor, level: str) -> Tensor:
    """The log-ratio of each token at a level, by loops in numpy."""
    if level == "token":
        return difference
    parts = turns_of(mask) if level.startswith("turn") else torch.arange(len(mask))[:, None].expand_as(mask)
    found = np.zeros(difference.shape)
    for part in parts[mask].unique():
        inside = (mask & (parts == part)).numpy()
        values = difference.numpy()[inside]
        found[inside] = values.mean() if level.endswith("_mean") else values.sum()
    return torch.from_numpy(found)


def scalar(name: str, theta: float, prox: float, behavior: float, advantage: float, **params: Any) -> float:
    one = {"logprobs": theta, "prox_logprobs": prox, "behavior_logprobs": behavior, "advantages": advantage}
    values = {key: torch.tensor([[value]], dtype=torch.float64) for key, value in one.items()}
    return policy_loss(name, **values, mask=torch.ones(1, 1, dtype=torch.bool), **params).loss.item()


@pytest.mark.parametrize(("ratio", "advantage"), [(r, a) for r in (0.3, 0.9, 1.1, 4.0) for a in (-1.5, 2.0)])
def test_single_token_losses_are_their_formulas(ratio: float, advantage: float) -> None:
    theta = -1.0
    behavior = theta - math.log(ratio)
    clipped = min(max(ratio, 0.8), 1.2)
    surrogate = -min(ratio * advantage, clipped * advantage)
    assert scalar("ppo", theta, 9.0, behavior, advantage) == pytest.approx(surrogate)
    capped = min(surrogate, -1.5 * advantage) if advantage < 0 else surrogate
    assert scalar("ppo", theta, 9.0, behavior, advantage, dual_clip=1.5) == pytest.approx(capped)
    prox = theta - 0.05
    near = -min(math.exp(0.05) * advantage, min(math.exp(0.05), 1.2) * advantage)
    rho = math.exp(prox - behavior)
    weights = {"none": 1.0, "tis": min(rho, 2.0), "mask": rho if 0.5 <= rho <= 2.0 else 0.0}
    for correction, weight in weights.items():
        found = scalar("decoupled_ppo", theta, prox, behavior, advantage, correction=correction)
        assert found == pytest.approx(weight * near)
    plain = -advantage * theta
    assert scalar("reinforce", theta, prox, behavior, advantage) == pytest.approx(plain)
    assert scalar("tis", theta, prox, behavior, advantage) == pytest.approx(min(ratio, 1.0) * plain)
    assert scalar("cispo", theta, prox, behavior, advantage) == pytest.approx(min(ratio, 1.2) * plain)
    tapered = 1.0 if advantage > 0 else min(ratio, 1.0)
    assert scalar("topr", theta, prox, behavior, advantage) == pytest.approx(tapered * plain)
    weight = 3.0 if advantage > 0 else 0.5 * min(ratio, 1.0)
    found = scalar("weighted_topr", theta, prox, behavior, advantage, positive_weight=3.0, negative_weight=0.5)
    assert found == pytest.approx(weight * plain)
    blended = 0.7 * scalar("tis", theta, prox, behavior, advantage) + 0.3 * tapered * plain
    assert scalar("tis_topr", theta, prox, behavior, advantage, topr_share=0.3) == pytest.approx(blended)
    steepness = 1.0 if advantage > 0 else 1.05
    assert scalar("m2po", theta, prox, behavior, advantage) == pytest.approx(-ratio * advantage)
    gate = 4 / steepness / (1 + math.exp(-steepness * (ratio - 1)))
    assert scalar("sapo", theta, 9.0, behavior, advantage) == pytest.approx(-gate * advantage, rel=1e-12)
    assert scalar("supervised", theta, prox, behavior, advantage) == pytest.approx(-theta)


def test_sapo_has_the_gradient_of_ppo_where_the_policies_are_equal() -> None:
    data = tensors()
    data |= {"behavior_logprobs": data["logprobs"], "prox_logprobs": data["logprobs"]}
    gradients = []
    for name in ("sapo", "ppo"):
        logprobs = data["logprobs"].clone().requires_grad_()
        gradients += torch.autograd.grad(policy_loss(name, **data | {"logprobs": logprobs}).loss, logprobs)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["decoupled_ppo", "tis", "topr"])
def test_sequences_that_are_too_far_away_add_nothing_but_count_in_the_mean(name: str) -> None:
    data = tensors()
    mask = data["mask"]
    rho = torch.stack(
        [
            ((p - b)[m].mean()).exp()
            for p, b, m in zip(data["prox_logprobs"], data["behavior_logprobs"], mask, strict=True)
        ]
    )
    floor, cap = (float(each) for each in rho.sort().values[[1, 2]])  # the bounds themselves are inside
    kept = ((rho >= floor) & (rho <= cap))[:, None] & mask
    found = policy_loss(name, **data, sequence_floor=floor - 1e-12, sequence_cap=cap + 1e-12)
    expected = policy_loss(name, **data | {"mask": kept}, normalizer=float(mask.sum()))
    assert found.loss.item() == pytest.approx(expected.loss.item())
    assert found.metrics["rejected_fraction"].item() == pytest.approx(1 - kept.sum().item() / mask.sum().item())
    only_cap = policy_loss(name, **data, sequence_cap=cap + 1e-12).metrics["rejected_fraction"]
    assert only_cap.item() == pytest.approx(((rho > cap)[:, None] & mask).sum().item() / mask.sum().item())


def test_gspo_uses_the_geometric_mean_over_the_sequence() -> None:
    data = tensors()
    mask = data["mask"]
    ratio = torch.stack(
        [((t - b)[m].mean()).exp() for t, b, m in zip(data["logprobs"], data["behavior_logprobs"], mask, strict=True)]
    )[:, None]
    advantages = data["advantages"]
    expected = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)[mask].mean()
    assert policy_loss("gspo", **data, clip_low=0.1, clip_high=0.1).loss.item() == pytest.approx(expected.item())


def test_gspo_gives_every_turn_the_gradient_of_its_own_advantage() -> None:
    """As verl does; differentiating the sequence's ratio would give every token that of the mean advantage."""
    logprobs = torch.full((1, 8), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0] * 4 + [-2.0] * 4], dtype=torch.float64)
    same = logprobs.detach().clone()
    found = policy_loss(
        "gspo",
        logprobs=logprobs,
        prox_logprobs=same,
        behavior_logprobs=same,
        advantages=advantages,
        mask=torch.ones(1, 8, dtype=torch.bool),
    )
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    torch.testing.assert_close(gradient, -advantages / 8)


def test_gspo_is_its_own_paper_where_a_sequence_has_one_advantage() -> None:
    """Equation 5, differentiated through the geometric mean, with some ratios beyond the clip."""
    data = tensors(5) | {"advantages": torch.tensor([[1.0], [-1.0], [0.5], [-2.0]], dtype=torch.float64)}
    mask, logprobs = data["mask"], data["logprobs"].clone().requires_grad_()
    lengths = mask.sum(-1, keepdim=True)
    ratio = (torch.where(mask, logprobs - data["behavior_logprobs"], 0.0).sum(-1, keepdim=True) / lengths).exp()
    surrogate = torch.minimum(ratio * data["advantages"], ratio.clamp(0.9, 1.1) * data["advantages"])
    (expected,) = torch.autograd.grad(-surrogate.mean(), logprobs)
    weights = (1.0 / lengths).expand_as(logprobs)
    loss = policy_loss(
        "gspo",
        **data | {"logprobs": logprobs},
        clip_low=0.1,
        clip_high=0.1,
        normalizer=4.0,
        token_weights=weights,
    ).loss
    assert loss.item() == pytest.approx(-surrogate.mean().item())
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@pytest.mark.parametrize("far", [-9999.0, 500.0])
def test_a_logprob_far_away_never_makes_a_loss_infinite(name: str, params: dict[str, Any], far: float) -> None:
    given = tensors(2)
    data = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
    data["behavior_logprobs"][:, :3] = far
    logprobs = data["logprobs"].clone().requires_grad_()
    output = policy_loss(name, **data | {"logprobs": logprobs}, **params)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert output.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())


@pytest.mark.parametrize("level", LEVELS)
def test_corrections_bound_the_ratio_itself_at_every_level(level: str) -> None:
    data = tensors(3)
    mask = data["mask"]
    ratio = log_ratio_of(data["prox_logprobs"] - data["behavior_logprobs"], mask, level).exp()
    arguments: dict[str, Any] = {
        "prox_logprobs": data["prox_logprobs"],
        "behavior_logprobs": data["behavior_logprobs"],
        "mask": mask,
        "turn_ids": data["turn_ids"],
        "level": level,
        "cap": 1.3,
        "floor": 0.8,
    }
    truncated = correct("tis", **arguments)
    torch.testing.assert_close(truncated.weights, torch.where(mask, ratio.clamp(max=1.3), 0.0))
    assert torch.equal(truncated.changed, mask & (ratio > 1.3))
    inside = (ratio >= 0.8) & (ratio <= 1.3)
    dropped = correct("mask", **arguments)
    torch.testing.assert_close(dropped.weights, torch.where(mask & inside, ratio, 0.0))
    assert torch.equal(dropped.changed, mask & ~inside)
    assert torch.equal(correct("none", **arguments).weights, mask.double())


STOPPED = ("tis", "cispo", "topr", "weighted_topr", "tis_topr")
"""Losses whose weight is a function of pi_theta that is not differentiated."""


def test_only_what_has_a_negative_advantage_is_rejected_as_by_trl() -> None:
    """The off-policy sequence mask of DeepSeek-V3.2: negative, and mean of log mu - log pi above a threshold."""
    data = tensors(7) | {"advantages": torch.tensor([[1.0], [-1.0], [-0.5], [2.0]], dtype=torch.float64)}
    mask = data["mask"]
    gap = torch.where(mask, data["behavior_logprobs"] - data["prox_logprobs"], 0.0).sum(1) / mask.sum(1)
    threshold = float(gap[1] + gap[2]) / 2  # one of the two negative sequences is beyond it
    keeps = ((data["advantages"] >= 0) | (gap[:, None] <= threshold)) & mask
    assert 0 < keeps.sum() < mask.sum()
    found = policy_loss("ppo", **data, sequence_floor=math.exp(-threshold), sequence_rejects="negative")
    expected = policy_loss("ppo", **data | {"mask": keeps}, normalizer=float(mask.sum()))
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
    assert found.metrics["rejected_fraction"].item() == pytest.approx(1 - keeps.sum().item() / mask.sum().item())


def test_a_ratio_of_turns_is_rolls_segment_ratio_in_value_and_gradient() -> None:
    """ROLL differentiates exp(mean of a turn's log-ratios); each turn has one advantage."""
    data = tensors(8)
    mask, turns = data["mask"], turns_of(data["mask"])
    data["advantages"] = torch.linspace(-2, 2, int(turns.max()) + 1, dtype=torch.float64)[turns]
    logprobs = data["logprobs"].clone().requires_grad_()
    losses = []
    for turn in turns[mask].unique():
        inside = mask & (turns == turn)
        ratio = (logprobs - data["behavior_logprobs"])[inside].mean().exp()
        advantage = data["advantages"][inside][0]
        losses += [-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)] * int(inside.sum())
    expected = torch.stack(losses).mean()
    found = policy_loss(
        "gspo", **data | {"logprobs": logprobs}, clip_low=0.1, clip_high=0.1, ratio_level="turn_mean"
    ).loss
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logprobs)[0] for loss in (found, expected)))


def test_packed_tokens_at_turn_level_must_say_which_turn_they_are_of() -> None:
    packed = {key: value.reshape(-1) for key, value in tensors().items() if key != "turn_ids"}
    with pytest.raises(ValueError, match="turn levels need turn_ids"):
        policy_loss("tis", **packed, correction_level="turn")


@pytest.mark.parametrize(("name", "params"), [variant for variant in VARIANTS if variant[0] not in (*STOPPED, "gspo")])
def test_gradients_match_finite_differences(name: str, params: dict[str, Any]) -> None:
    data = tensors(1)

    def loss(logprobs: Tensor) -> Tensor:
        return policy_loss(name, **{**data, "logprobs": logprobs}, **params).loss

    logprobs = data["logprobs"].clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(logprobs), logprobs)
    step = 1e-6
    for index in range(found.numel()):
        shift = torch.zeros_like(found)
        shift.view(-1)[index] = step
        numeric = (loss(data["logprobs"] + shift) - loss(data["logprobs"] - shift)) / (2 * step)
        assert found.view(-1)[index].item() == pytest.approx(numeric.item(), abs=1e-6)


@pytest.mark.parametrize("name", STOPPED)
def test_stopped_weights_scale_the_score_function(name: str) -> None:
    """d loss / d log pi of a token is -weight A / n, with no term from the weight's own derivative."""
    data = tensors(2)
    ratio = (data["logprobs"] - data["behavior_logprobs"]).exp()
    positive = data["advantages"] > 0
    weight = {
        "tis": ratio.clamp(max=1.0),
        "cispo": ratio.clamp(max=1.2),
        "topr": torch.where(positive, 1.0, ratio.clamp(max=1.0)),
        "weighted_topr": torch.where(positive, 3.0, 0.5 * ratio.clamp(max=1.0)),
        "tis_topr": torch.where(positive, 0.1 + 0.9 * ratio.clamp(max=1.0), ratio.clamp(max=1.0)),
    }[name]
    params = {"positive_weight": 3.0, "negative_weight": 0.5} if name == "weighted_topr" else {}
    logprobs = data["logprobs"].clone().requires_grad_()
    policy_loss(name, **{**data, "logprobs": logprobs}, **params).loss.backward()
    expected = torch.where(data["mask"], -weight * data["advantages"] / data["mask"].sum(), 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@pytest.mark.parametrize("normalizer", [None, 5.0])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_garbage_in_masked_positions_changes_nothing(
    name: str, params: dict[str, Any], normalizer: float | None, garbage: float
) -> None:
    clean = tensors(4)
    dirty = {key: value.clone() for key, value in clean.items()}
    for key in ("logprobs", "prox_logprobs", "behavior_logprobs", "advantages"):
        dirty[key][~clean["mask"]] = garbage
    results = []
    for data in (clean, dirty):
        logprobs = data["logprobs"].requires_grad_()
        output = policy_loss(name, **data, normalizer=normalizer, **params)
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
        results.append((output.loss, gradient, output.metrics))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][2] == results[1][2]
    assert not results[1][1][~clean["mask"]].any()


@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_packing_and_splitting_do_not_change_the_loss(name: str, params: dict[str, Any]) -> None:
    data = tensors(5)
    count = float(data["mask"].sum())
    whole = policy_loss(name, **data, **params).loss
    packed = {key: value.reshape(-1) for key, value in data.items()}
    packed["sequence_ids"] = torch.arange(4).repeat_interleave(7)
    assert policy_loss(name, **packed, **params).loss.item() == pytest.approx(whole.item())
    dense = {key: value[packed["mask"]] for key, value in packed.items()}
    mixed = torch.randperm(len(dense["mask"]), generator=torch.Generator().manual_seed(0))
    dense = {key: value[mixed] for key, value in dense.items()}  # as tokens of several sequences lie in a row
    assert policy_loss(name, **dense, **params).loss.item() == pytest.approx(whole.item())
    parts = [{key: value[rows] for key, value in data.items()} for rows in ([2, 0], [1], [3])]
    total = sum(policy_loss(name, **part, normalizer=count, **params).loss.item() for part in parts)
    assert total == pytest.approx(whole.item())


def test_clip_and_correction_fractions_count_policy_tokens_only() -> None:
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    rho = torch.tensor([[math.log(3.0), math.log(3.0), 0.0, math.log(3.0)]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    output = policy_loss(
        "decoupled_ppo", logprobs=zeros, prox_logprobs=zeros, behavior_logprobs=-rho, advantages=zeros + 1, mask=mask
    )
    assert output.metrics["correction_fraction"].item() == pytest.approx(2 / 3)
    assert output.metrics["correction_weight"].item() == pytest.approx((2 + 2 + 1) / 3)
    assert output.metrics["clip_fraction"].item() == 0


def test_a_step_at_its_start_is_the_corrected_policy_gradient() -> None:
    """With one update per step r is 1 in value, and the gradient is -w(rho) A: the correction is what acts."""
    data = tensors(6)
    logprobs = data["logprobs"].clone().requires_grad_()
    output = policy_loss("decoupled_ppo", **{**data, "logprobs": logprobs, "prox_logprobs": logprobs.detach()})
    output.loss.backward()
    rho = (data["logprobs"] - data["behavior_logprobs"]).exp().clamp(max=2.0)
    expected = torch.where(data["mask"], -rho * data["advantages"] / data["mask"].sum(), 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


def test_unknown_names_and_parameters_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown loss 'pp0'"):
        policy_loss("pp0", **tensors())
    with pytest.raises(TypeError):
        policy_loss("ppo", **tensors(), clip=0.1)
    with pytest.raises(ValueError, match="unknown correction"):
        policy_loss("decoupled_ppo", **tensors(), correction="tiss")
    packed = {key: value.reshape(-1) for key, value in tensors().items()}
    with pytest.raises(ValueError, match="sequence_ids"):
        policy_loss("gspo", **packed)


def test_every_loss_is_covered_here() -> None:
    assert {name for name, _ in VARIANTS} == set(LOSSES)
