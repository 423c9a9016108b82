"""Options that change how a step is computed, and must not change what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from benchmarks.model_check.architectures import write_model
from roll_flash.config.sections.learner import LearnerConfig, LoraConfig
from roll_flash.errors import ConfigError, LearnerError, ModelError
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.model import compiled_layers, lora
from roll_flash.learner.model.activation_offload import offload_activations
from roll_flash.learner.model.policy_model import PolicyModel, load_policy_model
from roll_flash.learner.packing import tree_attention
from roll_flash.learner.packing.flex_tree import attend, tree_mask
from roll_flash.learner.packing.rows import PackedRow, TrainSequence, pack
from roll_flash.learner.ranks.fsdp import FsdpLearner
from tests.learner.conftest import make_tiny_model
from tests.learner.in_process import assert_same_weights, in_process, weights_of
from tests.learner.plain_loop import plain_loop
from tests.learner.samples import make_group, prepare_group, sequences_of

GROUPS = [make_group(seed, prompt=20, turn=(3, 12)) for seed in range(3)]


def rows_of(*seeds: int, prompt: int = 20) -> list[PackedRow]:
    groups = [prepare_group(make_group(seed, prompt=prompt), 0, AdvantageConfig()) for seed in seeds]
    return [row for group in groups for row in pack(sequences_of(group), 4096)]


def loss_and_gradients(policy: PolicyModel, row: PackedRow) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad()
    logprobs, entropies = policy(row)
    loss = (logprobs * torch.tensor(row.advantages)).sum() + 0.1 * entropies.sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


async def two_steps(learner: FsdpLearner) -> dict[str, torch.Tensor]:
    for version in range(2):
        for group in GROUPS:
            await learner.accumulate([group])
        assert (await learner.finish_step()).version == version + 1
    return await weights_of(learner)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dynamo and autograd make of the layers, run as it is: seconds instead of minutes."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")


@pytest.mark.usefixtures("without_inductor")
def test_compiled_layers_compute_the_same_for_rows_of_any_length(tiny_model: Path) -> None:
    plain, compiled = load_policy_model(tiny_model), load_policy_model(tiny_model)
    names = list(compiled.model.state_dict())
    compiled_layers.compile_layers(compiled)
    assert list(compiled.model.state_dict()) == names
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for row in (*rows_of(0, 1), *rows_of(2, prompt=90)):
        loss, gradients = loss_and_gradients(plain, row)
        found, found_gradients = loss_and_gradients(compiled, row)
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_gradients, gradients, rtol=1e-4, atol=1e-5)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8, "not one for each row or layer"


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_learner_with_compiled_layers_takes_the_same_steps(tiny_model: Path, checkpointing: bool) -> None:
    expected = in_process(tiny_model, two_steps)
    assert_same_weights(in_process(tiny_model, two_steps, compile=True, gradient_checkpointing=checkpointing), expected)


def test_compiling_without_a_compiler_is_one_clear_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(LearnerError, match=r"learner\.compile needs a C\+\+ compiler"):
        compiled_layers.compile_layers(load_policy_model(tiny_model))


def test_offload_is_refused_where_it_is_of_no_use(tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match="of no use on a CPU"):
        LearnerConfig(activation_offload=True, gradient_checkpointing=True, device="cpu")
    with pytest.raises(ValidationError, match="set that to true too"):
        LearnerConfig(activation_offload=True)
    with pytest.raises(ConfigError, match=r"learner\.activation_offload is of no use on a CPU"):
        in_process(tiny_model, two_steps, activation_offload=True, gradient_checkpointing=True)


def test_a_model_whose_layers_cannot_be_computed_again_says_so_before_servers_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"JetMoeForCausalLM again; set learner\.gradient_checkpointing=false"):
        in_process(write_model("jetmoe", tmp_path), two_steps, gradient_checkpointing=True)


def test_what_is_offloaded_comes_back_as_it_was(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy_model(tiny_model)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    (row,) = rows_of(0)
    _, gradients = loss_and_gradients(policy, row)
    moved: list[int] = []
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        moved.append(len(args))
        return empty(*args, **kwargs)

    policy.zero_grad()
    with offload_activations("cpu", min_bytes=4 * row.num_tokens * 48):
        monkeypatch.setattr(torch, "empty", counting)
        logprobs, entropies = policy(row)
        monkeypatch.undo()
    ((logprobs * torch.tensor(row.advantages)).sum() + 0.1 * entropies.sum()).backward()
    assert len(moved) >= 2, "the input of each layer"
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, gradients, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_for_gpus_sees_the_same_tree() -> None:
    """Without gradient, as FlexAttention on a CPU has none."""
    (row,) = rows_of(0, prompt=150)
    tree = tree_attention.tree_layout(row.position_ids, row.subtree_end, torch.device("cpu"))
    random = torch.Generator()
    random.manual_seed(0)
    made = [torch.randn(1, heads, row.num_tokens, 16, generator=random) for heads in (4, 2, 2)]
    expected, _ = tree_attention.tree_attention(torch.nn.Module(), made[0], made[1], made[2], None, tree=tree)
    flexible = attend(*made, tree_mask(torch.tensor(row.subtree_end)), 0.25)
    np.testing.assert_allclose(flexible.transpose(1, 2), expected, atol=1e-5)
    dense = tree_attention.TreeLayout((), torch.tensor(tree_attention.attention_mask(row.subtree_end)))
    masked, _ = tree_attention.tree_attention(torch.nn.Module(), made[0], made[1], made[2], None, tree=dense)
    np.testing.assert_allclose(masked, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"), [("phi", {}), ("cohere", {"use_qk_norm": True}), ("llama", {"model_type": "mamba"})]
)
def test_weight_decay_is_for_matrices_and_leaves_norms_and_biases(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Without a gradient, decay is all that a step does. Norms of heads have two dimensions, too."""
    folder = write_model(name, tmp_path, **changes)
    silent = [make_group(0, vocabulary=90, rewards=[1.0] * 4)]

    async def use(learner: FsdpLearner) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        before = await weights_of(learner)
        await learner.accumulate(silent)
        await learner.finish_step()
        return before, await weights_of(learner)

    before, after = in_process(folder, use, weight_decay=0.5, learning_rate=0.1)
    for name, tensor in before.items():
        matrix = tensor.ndim > 1 and "norm" not in name and not name.endswith("A_log")
        expected = tensor * 0.95 if matrix else tensor
        torch.testing.assert_close(after[name], expected, atol=1e-6, rtol=1e-6)


def test_a_model_that_shares_no_prefixes_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    """Windows and softcaps; minibatches, the proximal pass and the parity probe's texts included."""
    folder = write_model("gemma2", tmp_path)
    groups = [make_group(seed, vocabulary=90, prompt=20) for seed in range(2)]
    texts = [[3, 4, 5, 6], [3, 4, 5, 7, 8]]

    async def use(learner: FsdpLearner) -> tuple[dict[str, torch.Tensor], list[Any]]:
        said = await learner.logprobs_of(texts)
        await learner.accumulate(groups)
        await learner.finish_step()
        return await weights_of(learner), said

    found, said = in_process(folder, use)
    assert_same_weights(found, plain_loop(folder, [[groups]]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text, values in zip(texts, said, strict=True):
        tokens = torch.tensor(text)
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(values, expected, atol=1e-4)


def test_an_adapter_of_the_output_head_is_refused(tiny_model: Path) -> None:
    policy = load_policy_model(tiny_model)
    with pytest.raises(ModelError, match="names the output head"):
        lora.adapt(policy.model, LoraConfig(rank=2, targets=("q_proj", "lm_head")))


def test_a_linear_layer_with_a_forward_of_its_own_is_refused_an_adapter(tiny_model: Path) -> None:
    """An adapter would take the place of that forward, and the model would be another from the first step on."""

    class Rounded(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.round())

    policy = load_policy_model(tiny_model)
    policy.layers[0].get_submodule("self_attn.q_proj").__class__ = Rounded
    with pytest.raises(ModelError, match=r"q_proj is a Rounded"):
        lora.adapt(policy.model, LoraConfig(rank=2))


def test_bfloat16_keeps_the_gradient_of_a_confident_token_through_the_whole_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=False)
    tokens = np.random.default_rng(0).integers(3, 128, 60)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.from_numpy(tokens)[None]
        ).logits
    sharp = next(f for f in np.arange(1, 50, 0.25) if float((f * logits[0, -1]).softmax(-1).max()) > 0.99)
    tokens = np.append(tokens, int(logits[0, -1].argmax())).astype(np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    last = np.arange(len(tokens)) == len(tokens) - 1
    (row,) = pack([TrainSequence(tokens, last, zeros, zeros.astype(np.int32), zeros + 1)], 1000)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = load_policy_model(folder)
        policy.head.data.mul_(float(sharp))
        policy.model.to(dtype)
        logprobs, _ = policy(row)
        logprobs.sum().backward()
        assert float(logprobs.detach().exp()) > 0.98
        gradients.append(torch.cat([p.grad.double().flatten() for p in policy.parameters() if p.grad is not None]))
    cosine = gradients[0] @ gradients[1] / (gradients[0].norm() * gradients[1].norm())
    assert float(cosine) > 0.99
