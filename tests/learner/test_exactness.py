"""Every model that is accepted computes what plain transformers computes for each sequence alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.model_check.__main__ import main
from benchmarks.model_check.architectures import ALONE, SHARED, VOCABULARY, write_model
from benchmarks.model_check.check import one_thread
from benchmarks.model_check.comparison import (
    TOLERANCE,
    branching_texts,
    compare_model,
    gradient_difference,
    learner,
    plain_transformers,
)
from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.errors import ModelError
from roll_flash.learner.losses.objective import Objective
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.weights.staged import check_can_be_staged


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", [*SHARED, *ALONE])
def test_logprobs_and_gradients_are_those_of_plain_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(name, tmp_path)
    with caplog.at_level(logging.WARNING, "roll_flash"):
        result = compare_model(folder, name)
    assert result.layout == ("shared prefixes" if name in SHARED else "one by one")
    said = [record.getMessage() for record in caplog.records if "computed alone" in record.getMessage()]
    assert len(said) == (name in ALONE)
    assert all(result.reason in line for line in said)
    assert result.is_ok, result


@pytest.mark.parametrize("name", ["llama with attention dropout", "xglm", "falcon"])
def test_layers_that_are_computed_again_drop_nothing(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path, hidden_dropout=0.5)
    policy = load_policy_model(folder)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    data = branching_texts(VOCABULARY)
    _, gradients = learner(policy, data)
    _, expected = plain_transformers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), data)
    assert gradient_difference(gradients, expected) <= TOLERANCE


def test_a_rank_without_a_row_adds_nothing_where_the_padding_is_zeros(tmp_path: Path) -> None:
    more = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
    policy = load_policy_model(write_model("gemma3_text", tmp_path, model_type="gemma3n_text", **more))
    assert not policy.model.get_input_embeddings().weight[0].any()
    Objective(LearnerConfig(), policy, None).idle_pass()
    gradients = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
    assert not [name for name, gradient in gradients.items() if gradient.any()]


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
    result = compare_model(folder, "llama")
    assert result.is_ok, result


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


def test_a_model_whose_folder_joins_its_tensors_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path, model_type="hrm_text")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ModelError, match=r"stores tensors of HrmTextForCausalLM joined; .* cannot be published"):
        check_can_be_staged(model, folder)


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


def test_a_mistake_that_the_test_at_the_start_lets_pass_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = PolicyModel.forward

    def forward(self: PolicyModel, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropies = own(self, *args, **kwargs)
        return logprobs * 1.00001, entropies

    monkeypatch.setattr(PolicyModel, "forward", forward)
    assert main(["llama"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("WRONG: llama: shared prefixes; log-probabilities differ by ")
    assert said.endswith("0 of 1 are exact; not: llama\n")
