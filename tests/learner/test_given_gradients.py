"""Gradients of a named loss over given sequences, and updates with given settings: as in plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll_flash.engines.learner import AdamSettings, NamedLoss
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.learner.ranks.fsdp import FsdpLearner
from tests.learner.in_process import in_process, weights_of

ADAM = {"betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.05}
"""A large eps: else Adam divides the rounding of gradients that are next to nothing by itself."""
TEXTS = ([5, 6, 7, 8, 9], [5, 6, 7, 20], [30, 31])
TARGETS = ([6, 0, 8, 9, 11], [6, 7, 20, 4], [31, 2])
"""Not always the next token: a prompt may have any, with the weight 0."""


def sequences() -> list[TrainSequence]:
    return [
        TrainSequence(
            token_ids=np.array([*text, targets[-1]], np.int32),
            policy_mask=np.arange(len(text) + 1) > 0,
            behavior_logprobs=np.full(len(text) + 1, -3, np.float32),
            versions=np.zeros(len(text) + 1, np.int32),
            advantages=np.array([0.0, *wanted(len(text))], np.float32),
            targets=np.array([0, *targets]),
        )
        for text, targets in zip(TEXTS, TARGETS, strict=True)
    ]


def wanted(count: int) -> list[float]:
    return [(-1.0) ** place * (place + 1) / 4 for place in range(count)]


@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_updates_equal_those_of_plain_pytorch(tiny_model: Path, max_norm: float) -> None:
    async def use(learner: FsdpLearner) -> tuple[list[np.ndarray], float, dict[str, torch.Tensor]]:
        given = sequences()
        first, loss = await learner.add_gradient(given[:1], NamedLoss("m2po"))
        seen = await learner.sequence_logprobs(given)  # between the two, and no part of the gradient
        others, more = await learner.add_gradient(given[1:], NamedLoss("m2po"))
        for one, other in zip([*first, *others], seen, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        for rate in (1e-2, 2e-2):
            await learner.adam_step(AdamSettings(learning_rate=rate, max_grad_norm=max_norm, **ADAM))
        assert learner.version == 2
        return [*first, *others], loss + more, await weights_of(learner)

    logprobs, loss, weights = in_process(tiny_model, use, log_logprobs=True, micro_batch_tokens=6)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **ADAM)
    total = torch.zeros(())
    for text, targets, found in zip(TEXTS, TARGETS, logprobs, strict=True):
        plain = model(torch.tensor([text])).logits[0].log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
        np.testing.assert_allclose(found, plain.detach().numpy(), atol=1e-5)
        total = total - ((plain + 3).exp() * torch.tensor(wanted(len(text)))).sum()
    assert loss == pytest.approx(total.item(), abs=1e-4)
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.param_groups[0]["lr"] = 2e-2
    optimizer.step()
    state = model.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, state[name], atol=1e-5, rtol=0)


def test_an_optimizer_that_begins_again_keeps_the_weights(tiny_model: Path) -> None:
    adam = AdamSettings(learning_rate=1e-2, max_grad_norm=math.inf, **ADAM)

    async def use(learner: FsdpLearner) -> list[dict[str, torch.Tensor]]:
        await learner.add_gradient(sequences(), NamedLoss("m2po"))
        await learner.adam_step(adam)
        before = await weights_of(learner)
        await learner.forget_moments()
        after = await weights_of(learner)
        await learner.adam_step(AdamSettings(1e-2, (0.8, 0.9), 0.1, 0.0, math.inf))
        return [before, after, await weights_of(learner)]

    before, after, without_momentum = in_process(tiny_model, use, log_logprobs=True)
    torch.testing.assert_close(before, after, atol=0, rtol=0)
    torch.testing.assert_close(before, without_momentum, atol=0, rtol=0)
