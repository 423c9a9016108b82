"""Every model that is accepted computes what plain transformers computes for each sequence alone."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from roll_flash.errors import ModelError
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing.rows import TrainSequence, pack
from tests.learner.architectures import ALONE, SHARED, VOCABULARY, write_model


def _tree(lengths: tuple[int, ...] = (70, 25, 45)) -> list[TrainSequence]:
    """Sequences of unequal length with one prompt, and advantages of both signs."""
    random = np.random.default_rng(0)
    prompt = random.integers(3, VOCABULARY, 12)
    found = []
    for number, length in enumerate(lengths):
        tokens = np.concatenate([prompt, random.integers(3, VOCABULARY, length - 12)]).astype(np.int32)
        zeros, advantages = np.zeros(length, np.float32), np.full(length, (-1) ** number, np.float32)
        found.append(TrainSequence(tokens, np.arange(length) >= 12, zeros, np.zeros(length, np.int32), advantages))
    return found


def _packed(policy: PolicyModel, data: list[TrainSequence]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Log-probabilities of each sequence, and the gradient of their weighted sum."""
    policy.train()
    logprobs: dict[int, Tensor] = {}
    for row in pack(data, 10_000 if policy.shares_prefixes else 1):
        found, _ = policy(row)
        (found * torch.tensor(row.advantages)).sum().backward()
        for number, member in enumerate(row.members):
            logprobs[member] = found.detach()[torch.tensor(row.sequence_ids == number)]
    return logprobs, _gradients(policy.model)


def _plain(folder: Path, data: list[TrainSequence]) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """As `_packed`, each sequence in a model that has seen no other."""
    logprobs: dict[int, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    untouched = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for index, sequence in enumerate(data):
        model = copy.deepcopy(untouched)
        tokens = torch.tensor(sequence.token_ids, dtype=torch.int64)
        distribution = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = distribution.gather(-1, tokens[1:, None])[:, 0][torch.tensor(sequence.policy_mask[1:])]
        (chosen * float(sequence.advantages[0])).sum().backward()
        logprobs[index] = chosen.detach()
        for name, gradient in _gradients(model).items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    return logprobs, gradients


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*SHARED, *ALONE])
def test_logprobs_and_gradients_are_those_of_plain_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(name, tmp_path)
    with caplog.at_level(logging.WARNING, "roll_flash"):
        policy = load_policy_model(folder)
    assert policy.shares_prefixes == (name in SHARED)
    said = [record.getMessage() for record in caplog.records if "computed alone" in record.getMessage()]
    assert len(said) == (name in ALONE)
    data = _tree()
    found, gradients = _packed(policy, data)
    expected, expected_gradients = _plain(folder, data)
    for index, logprobs in expected.items():
        torch.testing.assert_close(found[index], logprobs, atol=2e-4, rtol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    whole, wanted = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (gradients, expected_gradients))
    assert float((whole - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("name", ["llama with attention dropout", "xglm"])
def test_layers_that_are_computed_again_drop_nothing(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    policy = load_policy_model(folder)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    _, gradients = _packed(policy, _tree())
    _, expected = _plain(folder, _tree())
    whole, wanted = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (gradients, expected))
    assert float((whole - wanted).norm() / wanted.norm()) < 1e-3


def test_a_head_that_nobody_can_describe_is_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, own = write_model("llama", tmp_path), LlamaForCausalLM.forward

    def squared(self: LlamaForCausalLM, *args: object, **kwargs: object) -> object:
        output = own(self, *args, **kwargs)  # type: ignore[arg-type]
        output.logits = output.logits * output.logits.abs().sqrt()
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", squared)
    policy = load_policy_model(folder)
    assert policy.logit_transform is None
    assert policy.shares_prefixes
    found, _ = _packed(policy, _tree())
    expected, _ = _plain(folder, _tree())
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_model_that_cannot_be_exact_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, own = write_model("llama", tmp_path), LlamaForCausalLM.forward
    calls = iter(range(1_000_000))

    def drifts(self: LlamaForCausalLM, *args: object, **kwargs: object) -> object:
        """A state that outlives a text, as a cache that is never reset."""
        output = own(self, *args, **kwargs)  # type: ignore[arg-type]
        output.logits = output.logits * (1 + 0.01 * next(calls))
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", drifts)
    with pytest.raises(ModelError, match="cannot be trained: log-probabilities differ"):
        load_policy_model(folder)


def test_weights_that_are_not_finite_are_told_from_a_model_that_cannot_be_computed(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"not finite .* its weights are damaged"):
        load_policy_model(folder)


def test_a_model_that_sees_later_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    """It would predict each token from that token itself, and the loss would look splendid."""
    folder = write_model("gemma3_text", tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match=r"differ by .* tokens see what comes later"):
        load_policy_model(folder)


@pytest.mark.parametrize(("name", "size"), [("gpt_neox_japanese", 0.002), ("xglm", 0.002), ("xglm", 0.01)])
def test_a_model_that_has_not_learned_is_not_taken_for_one_that_can_share(
    name: str, size: float, tmp_path: Path
) -> None:
    """Where all tokens are about as likely, what is wrong hardly shows; it would once the model has learned."""
    policy = load_policy_model(write_model(name, tmp_path, initializer_range=size, init_std=size))
    assert not policy.shares_prefixes


def test_a_softcap_is_found_where_logits_are_small(tmp_path: Path) -> None:
    """A head that begins at nothing shows no softcap on any text, until it has learned."""
    policy = load_policy_model(write_model("nanochat", tmp_path, initializer_range=1e-4))
    assert policy.logit_transform is not None
    assert policy.logit_transform.softcap == 15.0


def test_the_docs_list_what_is_tried() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text().splitlines()
    for outcome, tried in (("prefixes are shared", SHARED), ("each sequence is computed alone", ALONE)):
        row = next(row for row in rows if row.startswith(f"| {outcome}"))
        names = [name.removesuffix("_text") for name in tried if " " not in name]  # the others are described
        assert [name for name in names if name not in row] == []
