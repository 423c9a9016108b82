"""Routing replay: the learner uses the experts that a server used, and computes the rest as the model does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.model_check.architectures import ALONE, SHARED, write_model
from benchmarks.model_check.check import one_thread
from benchmarks.model_check.comparison import branching_texts
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing.rows import TrainSequence, pack
from roll_flash.models.folder import read_object
from roll_flash.models.routing import Routing, expert_blocks, why_not_replayed
from roll_flash.models.shape import expert_sizes

REPLAYED = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "granitemoe", "ernie4_5_moe", "gpt_oss", "minimax_m2", "jamba")
"""Architectures whose experts choose in different ways: softmax before or after, sigmoid, biases, groups."""


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def policy_of(name: str, folder: Path) -> PolicyModel:
    return load_policy_model(write_model(name, folder))


def recorded(policy: PolicyModel, data: list[TrainSequence]) -> list[TrainSequence]:
    """`data` with the experts that the model chooses itself, each sequence alone."""
    routing = Routing(policy.model)
    shares = policy.shares_prefixes
    policy.share_prefixes(False)
    found = []
    for sequence in data:
        routing.start_recording()
        with torch.no_grad():
            policy.model(input_ids=torch.tensor(sequence.token_ids, dtype=torch.int64)[None], use_cache=False)
        found.append(replace(sequence, routed_experts=routing.recorded().numpy()))
    policy.share_prefixes(shares)
    return found


def passes(policy: PolicyModel, data: list[TrainSequence]) -> tuple[list[Tensor], dict[str, Tensor]]:
    policy.zero_grad()
    found = []
    for row in pack(data, 1_000_000 if policy.shares_prefixes else 1):
        logprobs, _ = policy(row)
        (logprobs * torch.tensor(row.advantages)).sum().backward()
        found.append(logprobs.detach())
    gradients = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return found, gradients


@pytest.mark.parametrize("name", REPLAYED)
def test_replay_of_its_own_choice_changes_no_bit(name: str, tmp_path: Path) -> None:
    assert why_not_replayed(write_model(name, tmp_path)) is None
    policy = load_policy_model(tmp_path)
    # Without shared tokens, whose sequences might differ in their choices.
    data = [replace(each, token_ids=(each.token_ids + n) % 125 + 3) for n, each in enumerate(branching_texts(128)[:2])]
    expected, expected_gradients = passes(policy, data)
    policy.eval()
    with_experts = recorded(policy, data)
    policy.train()
    layers, per_token, count = expert_sizes(read_object(tmp_path / "config.json"))
    assert with_experts[0].routed_experts is not None
    assert with_experts[0].routed_experts.shape[1:] == (layers, per_token)
    assert count == 1 + max(int(each.routed_experts.max()) for each in with_experts if each.routed_experts is not None)
    found, gradients = passes(policy, with_experts)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[each], expected_gradients[each]) for each in gradients)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_experts_give_loss_and_gradients_of_a_computation_by_hand(checkpointing: bool, tmp_path: Path) -> None:
    policy = policy_of("qwen3_moe", tmp_path)
    if checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    (sequence, *_) = branching_texts(128)
    experts = other_experts(len(sequence.token_ids))
    found, gradients = passes(policy, [replace(sequence, routed_experts=experts)])

    plain = policy_of("qwen3_moe", tmp_path)
    for layer, block in expert_blocks(plain.model).items():
        block.gate.forward = by_hand(block.gate, torch.tensor(experts[:, layer], dtype=torch.int64))
    expected, expected_gradients = passes(plain, [sequence])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)
    routers = [gradient for name, gradient in gradients.items() if name.endswith("gate.weight")]
    assert [bool(gradient.abs().max() > 0) for gradient in routers] == [True, True]
    free, _ = passes(policy, [sequence])
    assert (free[0] - found[0]).abs().max() > 1e-3, "the other experts changed nothing"


def by_hand(router: Any, experts: Tensor) -> Any:
    """The router of a Qwen3-MoE whose config does not normalise weights, with given experts."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ router.weight.T
        return logits, logits.softmax(-1)[torch.arange(len(experts))[:, None], experts], experts

    return forward


def other_experts(tokens: int) -> NDArray[np.int16]:
    """Two different experts for each token of each of two layers."""
    random = np.random.default_rng(1)
    return np.stack([[random.permutation(4)[:2] for _ in range(2)] for _ in range(tokens)]).astype(np.int16)


def test_tokens_without_experts_choose_freely_and_shared_tokens_use_those_of_the_first_sequence(tmp_path: Path) -> None:
    policy = policy_of("qwen3_moe", tmp_path)
    first, *_ = branching_texts(128)
    second = replace(first, token_ids=np.concatenate([first.token_ids[:60], (first.token_ids[60:] + 1) % 125 + 3]))
    first, second = sorted((first, second), key=lambda each: each.token_ids.tolist())
    experts = other_experts(len(first.token_ids))
    unknown = np.full_like(experts, -1)
    free, _ = passes(policy, [first, second])
    (found,), _ = passes(policy, [replace(first, routed_experts=unknown), replace(second, routed_experts=unknown)])
    assert torch.equal(found, free[0])
    (row,) = pack([second, replace(first, routed_experts=experts)], 1_000_000)
    assert row.routed_experts is not None
    assert (row.routed_experts[: len(experts)] == experts).all()
    assert (row.routed_experts[len(experts) :] == -1).all()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3", "no experts"),
        ("phimoe", "0 choices of the k best"),
        ("longcat_flash", "0 choices"),
        ("jetmoe", "attention chooses experts"),
    ],
)
def test_a_model_whose_choice_cannot_be_replayed_says_why(name: str, reason: str, tmp_path: Path) -> None:
    assert reason in str(why_not_replayed(write_model(name, tmp_path)))


def test_experts_of_another_model_are_an_error(tmp_path: Path) -> None:
    policy = policy_of("qwen3_moe", tmp_path)
    (sequence, *_) = branching_texts(128)
    with pytest.raises(ValueError, match="2 layers"):
        passes(policy, [replace(sequence, routed_experts=np.zeros((len(sequence.token_ids), 3, 2), np.int16))])


def test_the_list_of_architectures_has_those_of_this_test() -> None:
    assert set(REPLAYED) <= SHARED.keys() | ALONE.keys()
