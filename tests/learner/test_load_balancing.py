"""The load-balancing loss is that of transformers for each sequence, however sequences are packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from benchmarks.model_check.architectures import write_model
from benchmarks.model_check.check import one_thread
from benchmarks.model_check.comparison import branching_texts
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.errors import ModelError
from roll_flash.learner.losses.objective import Objective, load_balancing_losses
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing.rows import TrainSequence, pack


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_moe", tmp_path_factory.mktemp("moe"))


def texts() -> list[TrainSequence]:
    """Texts that end with a policy token and share beginnings; the second counts half."""
    found = []
    for number, text in enumerate(branching_texts(128)[:3]):
        end = int(np.flatnonzero(text.policy_mask)[-1]) + 1
        arrays = {name: getattr(text, name)[:end] for name in ("token_ids", "policy_mask", "behavior_logprobs")}
        cut = replace(text, **arrays, versions=text.versions[:end], advantages=text.advantages[:end])
        found.append(replace(cut, token_weight=0.5 if number == 1 else 1.0))
    return found


def of_transformers(policy: PolicyModel, data: list[TrainSequence]) -> tuple[float, dict[str, torch.Tensor]]:
    """Each text alone in plain transformers, weighted by its policy tokens: value and gradients."""
    policy.share_prefixes(False)
    policy.zero_grad()
    total = 0.0
    for text in data:
        tokens = torch.tensor(text.token_ids[:-1], dtype=torch.int64)
        logits = policy.model(input_ids=tokens[None], use_cache=False, output_router_logits=True).router_logits
        loss = load_balancing_loss_func(logits, 4, 2) * text.token_weight * int(text.policy_mask.sum())
        loss.backward()
        total += loss.item()
    policy.share_prefixes(True)
    return total, gradients(policy)


def gradients(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("max_tokens", [1, 1000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_that_of_transformers_whether_texts_share_a_row_or_not(
    folder: Path, max_tokens: int, checkpointing: bool
) -> None:
    policy = load_policy_model(folder)
    if checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, expected_gradients = of_transformers(policy, texts())
    policy.train()
    policy.zero_grad()
    policy.keep_router_logits()
    total = 0.0
    for row in pack(texts(), max_tokens):
        policy(row)
        assert policy.router_logits is not None
        losses = load_balancing_losses(policy.router_logits, row, policy.experts_per_token)
        loss = (losses * torch.tensor(np.bincount(row.sequence_ids, row.token_weights, len(losses)))).sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected, rel=1e-5)
    found = gradients(policy)
    assert all(name in found for name in expected_gradients)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


def test_it_is_added_to_the_loss_with_its_weight(folder: Path) -> None:
    policy = load_policy_model(folder)
    (row,) = pack(texts(), 1000)

    def loss_with(weight: float) -> tuple[float, dict[str, float]]:
        record = Objective(LearnerConfig(router_aux_loss=weight), policy, None).add_gradient(row)
        return record.loss, record.means

    without, means = loss_with(0.0)
    assert "router_aux_loss" not in means
    whole, means = loss_with(0.5)
    expected, _ = of_transformers(policy, texts())
    assert whole - without == pytest.approx(0.5 * expected, rel=1e-4)
    even, _ = of_transformers(policy, [replace(text, token_weight=1.0) for text in texts()])
    tokens = sum(int(text.policy_mask.sum()) for text in texts())
    assert means["router_aux_loss"] == pytest.approx(even / tokens, rel=1e-4), "the same however rows are split"
    assert 2.0 <= means["router_aux_loss"] < 4.0, "2 if all experts are used alike, 4 if the same two always"


@pytest.mark.parametrize(("name", "kind"), [("qwen3", "Qwen3"), ("deepseek_v3", "DeepseekV3")])
def test_a_model_without_such_a_loss_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    policy = load_policy_model(write_model(name, tmp_path))
    with pytest.raises(ModelError, match=f"router_aux_loss: {kind}ForCausalLM has no load-balancing loss; set it to 0"):
        Objective(LearnerConfig(router_aux_loss=0.01), policy, None)
