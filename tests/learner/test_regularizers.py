from __future__ import annotations

import math

import pytest
import torch

from roll_flash.learner.losses.objective import kl_penalty
from roll_flash.learner.losses.policy import policy_loss, weighted_sum
from tests.learner.test_losses import VARIANTS, tensors


@pytest.mark.parametrize("difference", [-15.0, -1.2, -0.1, 0.0, 0.3, 2.0, 25.0])
def test_estimators_and_their_gradients_are_their_formulas(difference: float) -> None:
    values = {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) - 1 + difference}
    slopes = {"k1": difference, "k2": difference, "k3": 1 - math.exp(-difference)}
    mask = torch.ones(1, dtype=torch.bool)
    for name, value in values.items():
        logprobs = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
        ref = torch.tensor([-2.0 - difference], dtype=torch.float64)
        penalty = kl_penalty(name, logprobs=logprobs, ref_logprobs=ref, mask=mask)  # type: ignore[arg-type]
        assert penalty.item() == pytest.approx(value)
        penalty.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(slopes[name])


@pytest.mark.parametrize("name", ["k1", "k2"])
def test_the_gradient_of_k1_and_k2_is_that_of_the_reverse_divergence(name: str) -> None:
    """Expectation over the policy's own samples, against automatic differentiation of KL(pi || ref) itself."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)
    policy = logits.log_softmax(-1)
    penalty = kl_penalty(name, logprobs=policy, ref_logprobs=ref, mask=torch.ones(5, dtype=torch.bool))  # type: ignore[arg-type]
    (found,) = torch.autograd.grad((policy.exp().detach() * penalty).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_gradients_match_finite_differences(name: str) -> None:
    data = tensors(3)

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return kl_penalty(name, logprobs=logprobs, ref_logprobs=data["prox_logprobs"], mask=data["mask"]).sum()  # type: ignore[arg-type]

    logprobs = data["logprobs"].clone().requires_grad_()
    (found,) = torch.autograd.grad(total(logprobs), logprobs)
    for index in range(found.numel()):
        shift = torch.zeros_like(found)
        shift.view(-1)[index] = 1e-6
        numeric = (total(data["logprobs"] + shift) - total(data["logprobs"] - shift)) / 2e-6
        assert found.view(-1)[index].item() == pytest.approx(numeric.item(), abs=1e-6)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_garbage_where_masked_changes_nothing_in_any_normalisation(garbage: float) -> None:
    clean = tensors(4)
    weights = torch.rand(clean["mask"].shape, dtype=torch.float64)
    dirty = {key: value.clone() for key, value in clean.items()}
    for key in ("logprobs", "prox_logprobs", "behavior_logprobs", "advantages"):
        dirty[key][~clean["mask"]] = garbage
    dirty_weights = torch.where(clean["mask"], weights, garbage)
    for estimator in ("k1", "k2", "k3"):
        parts = []
        for data, token_weights in ((clean, weights), (dirty, dirty_weights)):
            penalty = kl_penalty(
                estimator,  # type: ignore[arg-type]
                logprobs=data["logprobs"],
                ref_logprobs=data["prox_logprobs"],
                mask=data["mask"],
            )
            parts.append(weighted_sum(penalty, data["mask"], token_weights).item())
        assert parts[0] == parts[1]
    for name, params in VARIANTS:
        expected = policy_loss(name, **clean, token_weights=weights, normalizer=3.0, **params).loss
        found = policy_loss(name, **dirty, token_weights=dirty_weights, normalizer=3.0, **params).loss
        assert found.item() == expected.item()


@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_weights_by_sequence_give_the_mean_over_sequences_of_their_means(name: str, params: dict[str, object]) -> None:
    data = tensors(5)
    counts = data["mask"].sum(-1, keepdim=True)
    weights = (1 / counts).expand(data["mask"].shape).double()
    found = policy_loss(name, **data, token_weights=weights, normalizer=4.0, **params).loss
    rows = [policy_loss(name, **{key: value[[i]] for key, value in data.items()}, **params).loss for i in range(4)]
    assert found.item() == pytest.approx(torch.stack(rows).mean().item())


def test_an_unknown_estimator_is_an_error() -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match="unknown estimator 'k4'"):
        kl_penalty("k4", logprobs=ones, ref_logprobs=ones, mask=ones.bool())  # type: ignore[arg-type]
