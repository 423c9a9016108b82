from __future__ import annotations

import pytest
import torch

from roll_flash.learner import token_logprobs as module
from roll_flash.learner.token_logprobs import token_logprobs


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_bytes", [1, 200 * 4 * 3, 1 << 30])
def test_chunks_give_the_values_and_gradients_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, keep_bytes: int, temperature: float, chunk_bytes: int, with_entropy: bool
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden = torch.randn(7, 16, requires_grad=True)
    head = torch.randn(200, 16, requires_grad=True)
    source = torch.tensor([0, 0, 1, 3, 3, 3, 6])
    target = torch.randint(0, 200, (7,))
    weights = torch.randn(7)

    distribution = ((hidden @ head.T) / temperature).log_softmax(-1)
    expected = distribution[source, target]
    expected_entropy = -(distribution.exp() * distribution).sum(-1)[source]
    entropy_weights = torch.randn(7) if with_entropy else torch.zeros(7)
    objective = (expected * weights).sum() + (expected_entropy * entropy_weights).sum()
    expected_gradients = torch.autograd.grad(objective, (hidden, head))

    found, entropy = token_logprobs(hidden, head, source, target, temperature=temperature, keep_bytes=keep_bytes)
    objective = (found * weights).sum()
    if with_entropy:
        objective = objective + (entropy * entropy_weights).sum()
    gradients = torch.autograd.grad(objective, (hidden, head))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    for mine, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
