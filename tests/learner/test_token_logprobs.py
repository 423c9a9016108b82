from __future__ import annotations

import pytest
import torch

from roll_flash.learner.model import token_logprobs as module
from roll_flash.learner.model.exact_settings import LogitTransform
from roll_flash.learner.model.token_logprobs import token_logprobs

FORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=2.0, softcap=5.0)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_bytes", [1, 200 * 4 * 3, 1 << 30])
def test_chunks_give_the_values_and_gradients_of_full_logits(
    monkeypatch: pytest.MonkeyPatch,
    keep_bytes: int,
    temperature: float,
    chunk_bytes: int,
    with_entropy: bool,
    form: LogitTransform,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, requires_grad=True)
    head = torch.randn(200, 16, requires_grad=True)
    bias = torch.randn(200, requires_grad=True)
    source = torch.tensor([0, 0, 1, 3, 3, 3, 6])
    target = torch.randint(0, 200, (7,))
    target[4] = target[3]  # replicas that sampled alike
    weights = torch.randn(7)

    logits = (hidden @ head.T + bias) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    distribution = (logits / temperature).log_softmax(-1)
    expected = distribution[source, target]
    expected_entropy = -(distribution.exp() * distribution).sum(-1)[source]
    entropy_weights = torch.randn(7) if with_entropy else torch.zeros(7)
    objective = (expected * weights).sum() + (expected_entropy * entropy_weights).sum()
    expected_gradients = torch.autograd.grad(objective, (hidden, head, bias))

    found, entropy = token_logprobs(
        hidden, head, source, target, bias=bias, form=form, temperature=temperature, keep_bytes=keep_bytes
    )
    objective = (found * weights).sum()
    if with_entropy:
        objective = objective + (entropy * entropy_weights).sum()
    gradients = torch.autograd.grad(objective, (hidden, head, bias))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    for mine, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99, 0.999, 0.9999])
def test_bfloat16_gives_confident_tokens_the_gradient_of_float64(
    probability: float, advantage: float, keep_bytes: int, with_entropy: bool
) -> None:
    """Values and gradients against float64 on the same rounded hidden states and head."""
    torch.manual_seed(0)
    rows, size, vocabulary = 32, 64, 500
    head = torch.randn(vocabulary, size).bfloat16()
    target = torch.randint(0, vocabulary, (rows,))
    hidden = _confident(torch.randn(rows, size), head, target, probability).bfloat16().requires_grad_()
    source = torch.arange(rows)

    wide = hidden.detach().double().requires_grad_()
    distribution = (wide @ head.double().T).log_softmax(-1)
    expected = distribution[source, target]
    entropy = -(distribution.exp() * distribution).sum(-1)
    objective = advantage * expected.sum() + (0.01 * entropy.sum() if with_entropy else 0.0)
    (expected_gradient,) = torch.autograd.grad(objective, wide)

    found, entropies = token_logprobs(hidden, head, source, target, keep_bytes=keep_bytes)
    objective = advantage * found.sum() + (0.01 * entropies.sum() if with_entropy else 0.0)
    (gradient,) = torch.autograd.grad(objective, hidden)
    assert float((found.detach().double() - expected.detach()).abs().max()) < 2e-5
    error = (gradient.double() - expected_gradient).norm(dim=-1) / expected_gradient.norm(dim=-1)
    assert float(error.max()) < 0.02, f"relative error {error.max():.3f} at p = {probability}"
    assert float(error.mean()) < 0.01, f"mean relative error {error.mean():.3f} at p = {probability}"


def _confident(hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor, probability: float) -> torch.Tensor:
    """Hidden states that give each target about `probability`, by bisection along its row of the head."""
    direction = head[target].float() / head[target].float().norm(dim=-1, keepdim=True)
    low, high = torch.full((len(target), 1), -20.0), torch.full((len(target), 1), 40.0)
    for _ in range(40):
        middle = (low + high) / 2
        reached = ((hidden + middle * direction) @ head.float().T).softmax(-1)[torch.arange(len(target)), target]
        above = (reached > probability)[:, None]
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return hidden + high * direction


def test_opposite_advantages_of_replicas_that_sampled_alike_cancel_in_bfloat16() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 16).bfloat16().requires_grad_(), torch.randn(50, 16).bfloat16()
    found, _ = token_logprobs(hidden, head, torch.tensor([0, 0]), torch.tensor([3, 3]))
    (gradient,) = torch.autograd.grad((found * torch.tensor([1.7, -1.7])).sum(), hidden)
    assert not gradient.any()
