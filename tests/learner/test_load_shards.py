"""Ranks that read only their shards have the very weights and buffers that transformers loads."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.load import load_as_rank
from benchmarks.model_check.architectures import write_model
from roll_flash.config.sections.learner import LoraConfig
from roll_flash.errors import ModelError
from roll_flash.learner.model import lora
from roll_flash.learner.model.policy_model import (
    ExactSettings,
    check_weight_files,
    load_policy_model,
    open_policy_model,
)
from roll_flash.learner.model.weight_files import halve_frozen, one_at_a_time
from roll_flash.models.prepare import resolve_model
from tests.learner.conftest import make_tiny_model
from tests.learner.in_process import in_process
from tests.learner.rank_processes import run_ranks

FORM = ExactSettings(shares_prefixes=False, logit_transform=None, vocabulary=99)
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
Kind = tuple[Callable[[Any], PreTrainedModel], PreTrainedConfig]


def kind_of(name: str) -> Kind:
    if name.startswith("llama"):
        return LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=name == "llama-tied")
    if name == "gemma":
        return Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, tie_word_embeddings=True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **experts)


def make(folder: Path, name: str, **options: Any) -> Path:
    torch.manual_seed(0)
    model_class, config = kind_of(name)
    model_class(config).save_pretrained(folder, **options)
    return folder


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_rank(rank: int, ranks: int, folders: Sequence[Path], store: str, report: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for folder in folders:
        compare_on_rank(ranks, folder, mesh, report)
    dist.destroy_process_group()


def compare_on_rank(ranks: int, folder: Path, mesh: DeviceMesh, report: str) -> None:
    with open_policy_model(folder, FORM) as (policy, files):
        assert (files is None) == (report == "whole")
        on_meta = files is not None
        assert all(parameter.is_meta == on_meta for parameter in policy.parameters())
        for layer in policy.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        created = files.fill(policy, "model.", torch.device("cpu")) if files is not None else 0
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert [name for name, _ in policy.model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for name, tensor in expected.state_dict().items():
        found = whole(policy.model.state_dict()[name])
        torch.testing.assert_close(found, tensor, atol=0, rtol=0)
    assert dict(policy.model.named_buffers()).keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(policy.model.get_buffer(name), buffer), name
    if on_meta:
        all_bytes = sum(parameter.nbytes for parameter in expected.parameters())
        assert created <= 1.1 * all_bytes / ranks
    tokens = torch.arange(12)[None]
    hidden = policy.model.base_model
    # As the root, the policy gathers embedding and head; the hidden states go through every layer.
    policy.unshard()
    found, wanted = hidden(input_ids=tokens), expected.base_model(input_ids=tokens)
    assert torch.equal(found.last_hidden_state, wanted.last_hidden_state)


def compare(folders: Path | Sequence[Path], tmp_path: Path, report: str = "shards") -> None:
    folders = [folders] if isinstance(folders, Path) else folders
    run_ranks(on_rank, (2, folders, str(tmp_path / "store"), report), ranks=2)


@pytest.mark.parametrize("name", ["falcon_h1", "gptj"])
def test_buffers_are_those_of_transformers_whichever_module_computes_them(tmp_path: Path, name: str) -> None:
    folder = write_model(name, tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with open_policy_model(folder, FORM) as (policy, files):
        assert files is not None
        buffers = dict(expected.named_non_persistent_buffers())
        assert buffers
        for name, buffer in buffers.items():
            assert torch.equal(policy.model.get_buffer(name), buffer), name


def test_smollm2_is_read_by_shards(tmp_path: Path) -> None:
    compare(resolve_model("smollm2-135m"), tmp_path)


CONVERTED = (
    "qwen3_moe",  # experts joined from two tensors each, and from one
    "mixtral",  # the same, and a router under another name
    "deepseek_v3",  # a dense layer first, a correction bias
    "ernie4_5_moe",
    "granitemoe",  # other names, nothing joined
    "nemotron_h",
    "olmo_hybrid",  # convolutions one after the other
)
"""Architectures whose files hold other tensors than the model in memory, each with another kind of conversion."""


def test_two_ranks_have_the_weights_and_buffers_of_transformers(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, name) for name in ("llama", "llama-tied", "gemma")]
    several = make(tmp_path / "several files", "llama", max_shard_size="20KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    joined = [write_model(name, tmp_path / name) for name in CONVERTED]
    compare([*folders, several, *joined], tmp_path)


@pytest.mark.parametrize("name", ["gpt_neox", "phimoe", "jamba", "minimax", "lfm2_moe", "mimo_v2_flash", "hy_v3"])
def test_tensors_under_other_names_are_found(tmp_path: Path, name: str) -> None:
    folder = write_model(name, tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    with open_policy_model(folder, FORM) as (policy, files):
        assert files is not None
        files.fill(policy, "model.", torch.device("cpu"))
    torch.testing.assert_close(policy.model.state_dict(), expected, atol=0, rtol=0)


def test_a_rank_never_holds_more_of_its_experts_than_its_shard_and_one_joined_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 8, "num_hidden_layers": 8}
    torch.manual_seed(0)
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | sizes, num_experts_per_tok=2))
    joined = max(parameter.nbytes for parameter in experts.parameters())
    experts.save_pretrained(tmp_path / "model")
    results = mp.get_context("spawn").SimpleQueue()
    warm = make(tmp_path / "tiny", "moe")  # imports, and everything else that is allocated once
    mp.spawn(measure_on_rank, (2, (warm, tmp_path / "model"), str(tmp_path / "store"), results), nprocs=2)
    for peak, shard in (results.get(), results.get()):
        assert peak <= 1.1 * shard + joined, f"{peak / shard:.2f} of the shard"


def measure_on_rank(rank: int, ranks: int, folders: Sequence[Path], store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for folder in folders:
        dist.barrier()
        peak, shard, _ = load_as_rank("shards", folder, init_device_mesh("cpu", (ranks,)))
    results.put((peak, shard))
    dist.destroy_process_group()


def test_an_own_head_beside_a_tied_config_is_not_lost(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    compare(folder, tmp_path, "whole")


def test_whole_models_of_ranks_on_one_machine_are_in_memory_one_after_the_other(tmp_path: Path) -> None:
    ready, entered = mp.get_context("fork").Event(), mp.get_context("fork").Event()

    def load() -> None:
        ready.set()
        with one_at_a_time():
            entered.set()

    other = mp.get_context("fork").Process(target=load)
    with one_at_a_time():
        other.start()
        assert ready.wait(60)
        assert not entered.wait(0.2)
    assert entered.wait(60)
    other.join(60)
    assert other.exitcode == 0


def test_no_other_user_can_hold_up_the_loading_of_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path))
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # as every user can
        with one_at_a_time():
            (lock,) = tmp_path.iterdir()
            assert lock.stat().st_mode & 0o077 == 0
    finally:
        os.close(folder)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_tensor_that_does_not_fit_is_one_line(tmp_path: Path, damage: str) -> None:
    folder = make(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        check_weight_files(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert damage == "shape" or name in str(caught.value)


def test_frozen_weights_are_halved_and_adapters_stay_float32(tiny_model: Path) -> None:
    form = load_policy_model(tiny_model).form
    with open_policy_model(tiny_model, form) as (policy, files):
        lora.adapt(policy.model, LoraConfig(rank=4))
        halve_frozen(policy)
        assert files is not None
        files.fill(policy, "model.", torch.device("cpu"))
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    for name, parameter in expected.named_parameters():
        assert torch.equal(policy.model.get_parameter(name), parameter), name


def test_a_run_with_a_damaged_folder_ends_before_it_starts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})

    async def use(_: Any) -> None:
        raise AssertionError("it started")

    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        in_process(copy, use)
