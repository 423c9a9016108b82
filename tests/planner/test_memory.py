"""The memory arithmetic against known models, and against what a small model allocates by the learner's own code."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.model_check.architectures import VOCABULARY, write_model
from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import make_plan
from roll_flash.config.sections.learner import LearnerConfig, LoraConfig
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ModelError, PlacementError
from roll_flash.learner.model import lora
from roll_flash.learner.ranks.optimizer import trained_parts
from roll_flash.learner.ranks.rank import LearnerRank
from roll_flash.learner.weights import device
from roll_flash.learner.weights.staged import WeightStage
from roll_flash.models import shape as shape_module
from roll_flash.models.prepare import resolve_model
from roll_flash.models.shape import SHAPES, ModelShape, read_shape, shape_of
from roll_flash.planner.machines.memory import (
    GIB,
    cache_bytes_per_token,
    layer_activation_bytes,
    rank_memory,
    server_memory,
    trained_parameters,
)
from roll_flash.planner.machines.memory_check import HostUse, check_gpu_memory, host_uses, require_memory

MIB = 2**20


def config_of(model: str, **sections: Any) -> Config:
    return load_config({"model": {"path": model}, "envs": [{"id": "A-v0"}], **sections})


@pytest.mark.parametrize(
    ("name", "parameters", "states_gib"),
    [
        ("Qwen3-0.6B", 596_049_920, 8.9),
        ("Qwen3-4B", 4_022_468_096, 59.9),
        ("Qwen3-8B", 8_190_735_360, 122),
        ("Qwen3-30B-A3B", 30_532_122_624, 455),
    ],
)
def test_known_models_have_their_known_sizes(name: str, parameters: int, states_gib: float) -> None:
    shape = read_shape(name)
    assert shape.parameters == parameters
    states = rank_memory(config_of(name), shape).parts["states"]
    assert states == 16 * parameters
    assert states / GIB == pytest.approx(states_gib, rel=0.01)


def test_a_mixture_of_experts_computes_only_some_of_its_parameters() -> None:
    shape = read_shape("Qwen3-30B-A3B")
    assert shape.computed == pytest.approx(3.0e9, rel=0.05), "A3B: 3 billion, without the embedding"
    assert read_shape("Qwen3-0.6B").computed == 596_049_920, "a tied head is computed"


def test_a_folder_is_read_before_a_known_shape_and_an_unknown_one_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    small = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    small.save_pretrained(folder)
    assert read_shape(str(folder)).parameters < 100_000
    assert read_shape(str(tmp_path / "elsewhere/Qwen3-0.6B")).parameters == 596_049_920
    with pytest.raises(ModelError, match=r"no config\.json is there; .*Qwen3-0\.6B"):
        read_shape(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="transformers cannot read this model"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(("name", "heads"), [("mamba", 0), ("falcon_h1", 4)])
def test_layers_of_mamba_have_a_size_too(name: str, heads: int, tmp_path: Path) -> None:
    """Their configs hold an infinite number, and those without attention no heads."""
    folder = write_model(name, tmp_path)
    if not heads:
        config = json.loads((folder / "config.json").read_text())
        del config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(folder))
    assert (shape.heads, shape.layers, shape.vocabulary) == (heads, 2, VOCABULARY)


def test_the_shape_on_the_meta_device_is_that_of_the_loaded_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    assert shape_of(model, "tiny") == read_shape("tiny")


def trained_rank(settings: dict[str, Any]) -> LearnerRank:
    """A rank of the learner in this process, after an update (with gradients of 0, which Adam's moments do not see)."""
    rank = LearnerRank(resolve_model("tiny"), LearnerConfig(**settings), rank=0, seed=0, temperature=1.0, run="test")
    forms = rank.check_model()
    rank.start(rank.open_store(None), forms)
    rank.update(1.0, 1e-5, skip=False)
    return rank


def number_of_bytes(tensors: list[Any]) -> int:
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    "settings", [{}, {"lora": {"rank": 4}}, {"proximal_decay": 0.9}, {"advantage": "gae", "critic": {"kind": "model"}}]
)
def test_states_are_what_the_learner_allocates(settings: dict[str, Any]) -> None:
    """Masters, gradients and moments of a real rank; a CPU stands in for the GPU, where their types are the same."""
    rank = trained_rank(settings)
    try:
        trained = [each for part in trained_parts(rank._policy, rank._critic) for each in part]
        head = None if rank._critic is None else rank._critic.value_weight
        moments = [state[name] for state in rank._optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        allocated = 2 * number_of_bytes(trained) + number_of_bytes(moments)  # a gradient is like its parameter
        if rank._average is not None:
            allocated += number_of_bytes(list(rank._average.state()["weights"].values()))
        assert {parameter.dtype for parameter in trained} == {torch.float32}
    finally:
        rank.close()
    config = config_of("tiny", learner=settings)
    counted = rank_memory(config, read_shape("tiny")).parts["states"]
    assert counted == allocated - (0 if head is None else 16 * head.numel()), "a value head is not counted"


def meta_model(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHAPES / f"{name}.json"))


@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_a_rank_is_counted_the_copy_of_the_weights_that_it_stages(
    name: str, transfer: Literal["nccl", "ipc"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's own code stages a model on the meta device; only the CUDA handles of `ipc` cannot be made there."""
    monkeypatch.setattr(device, "_handle", lambda tensor: {})
    model = meta_model(name)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    staged = device.DeviceWeightStage(model, tied, torch.bfloat16, transfer).stage(1)
    config = config_of(name, inference={"weight_transfer": transfer})
    others, first = (rank_memory(config, read_shape(name), is_first=is_first).parts for is_first in (False, True))
    assert first["staged weights"] == staged.num_bytes
    assert ("staged weights" in others) == (transfer == "ipc"), "with nccl only the first rank keeps a copy"
    assert first.get("transfer buffers", 0) == (device.BUFFERS * device.BUFFER_BYTES if transfer == "nccl" else 0)


def test_shared_memory_for_weights_has_the_size_that_the_host_is_counted() -> None:
    model = meta_model("Qwen3-0.6B")
    stage = WeightStage(model, ["lm_head.weight"], torch.bfloat16, "test")
    config = config_of("Qwen3-0.6B", learner={"gradient_checkpointing": True})
    (host,) = hosts(config, [gpu_node(1, 80)])
    assert host.use.parts["published weights"] == pytest.approx(2 * stage._size, rel=1e-3), (
        "and one to start again with"
    )


def test_adapters_have_the_parameters_that_the_learner_adds() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    lora.adapt(model, LoraConfig(rank=4))
    added = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    learner = LearnerConfig(lora=LoraConfig(rank=4))
    assert trained_parameters(learner, read_shape("tiny")) == added


def saved_bytes(model: Any, tokens: int) -> int:
    """Bytes that the decoder layers save for their backward pass, each storage once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    kept: list[torch.Tensor] = []
    hidden = torch.randn(1, tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rope = model.model.rotary_emb(hidden, positions)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=rope)
    return sum(storages.values())


def test_activations_are_what_decoder_layers_save() -> None:
    """bfloat16 on a CPU, in two sizes of rows, so that what does not grow with the row is left out."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    saved = (saved_bytes(model, 512) - saved_bytes(model, 256)) / 256
    assert 3 * layer_activation_bytes(shape_of(model, "small")) == pytest.approx(saved, rel=0.15)


def test_the_cache_is_what_a_model_keeps_of_a_token() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.bfloat16)
    cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    kept = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert cache_bytes_per_token(config_of("tiny"), read_shape("tiny")) == kept / 3


def test_tensor_parallelism_splits_weights_and_the_cache_as_far_as_there_are_heads() -> None:
    shape = read_shape("Qwen3-30B-A3B")
    one, four, eight = (config_of("Qwen3-30B-A3B", inference={"tensor_parallel_size": size}) for size in (1, 4, 8))
    assert server_memory(four, shape).parts["weights"] == server_memory(one, shape).parts["weights"] / 4
    assert cache_bytes_per_token(four, shape) == cache_bytes_per_token(one, shape) / 4
    assert cache_bytes_per_token(eight, shape) == cache_bytes_per_token(four, shape), "4 heads of keys"


def total(**learner: Any) -> float:
    return rank_memory(config_of("Qwen3-8B", learner=learner), read_shape("Qwen3-8B")).total


def test_each_way_to_save_memory_saves_memory() -> None:
    assert total(gradient_checkpointing=True) < total()
    assert total(gradient_checkpointing=True, activation_offload=True) < total(gradient_checkpointing=True)
    assert total(ranks=8) < total(ranks=2) < total()
    assert total(ranks=8) < total(ranks=8, gradient_sync="step")
    assert total(lora={"rank": 8}) < total() / 3
    assert total(micro_batch_tokens=1024) < total(micro_batch_tokens=16384)
    assert total(kl={"coefficient": 0.1}) > total()
    assert total(lora={"rank": 8}, kl={"coefficient": 0.1}) == total(lora={"rank": 8}), "the base is the reference"


def gpu_node(gpus: int, gib: float, *, host_gib: float = 0.0, name: str = "one") -> Node:
    resources = {"CPU": 16.0, "GPU": float(gpus), **({"memory": host_gib * GIB} if host_gib else {})}
    return Node(name, "10.0.0.1", name, resources, resources, {str(n): int(gib * GIB) for n in range(gpus)})


def hosts(config: Config, nodes: list[Node]) -> list[HostUse]:
    plan = make_plan(run_parts(config, nodes, gpu_servers=True), nodes)
    return host_uses(config, read_shape(config.model.path), plan)


def test_a_host_holds_copies_for_servers_and_for_checkpoints() -> None:
    shape = read_shape("Qwen3-8B")
    config = config_of("Qwen3-8B", inference={"servers": 8}, learner={"ranks": 8, "gradient_checkpointing": True})
    first, second = hosts(config, [gpu_node(8, 80, name="one"), gpu_node(8, 80, name="two")])
    assert first.use.parts["checkpoint"] == (12 + 4) * shape.parameters, "weights and moments, and the exported model"
    assert "checkpoint" not in second.use.parts
    assert second.use.parts["published weights"] == 2 * shape.parameters, "one copy for all servers of a node"
    assert second.use.parts["second weights of servers"] == 8 * 2 * shape.parameters, "each server prepares its own"
    nccl = config_of("Qwen3-8B", inference={"servers": 8, "weight_transfer": "nccl"}, learner={"ranks": 8})
    assert set(hosts(nccl, [gpu_node(8, 80, name="one"), gpu_node(8, 80, name="two")])[1].use.parts) == {"processes"}


def test_servers_that_only_serve_need_no_memory_for_new_weights() -> None:
    config, node = config_of("Qwen3-8B", inference={"servers": 2}), gpu_node(2, 80)
    plan = make_plan(run_parts(config, [node], trains=False, gpu_servers=True), [node])
    (host,) = host_uses(config, read_shape("Qwen3-8B"), plan)
    assert set(host.use.parts) == {"processes"}


def test_a_host_that_is_too_small_is_refused_in_one_line() -> None:
    config = config_of("Qwen3-4B", learner={"gradient_checkpointing": True, "micro_batch_tokens": 1024})
    assert any(line.startswith("host ") for line in check(config, gpu_node(2, 80, host_gib=128)))
    with pytest.raises(
        PlacementError, match=r"node one: about .* \(checkpoint 59\.9, .* on the host, and Ray has 64\.0"
    ):
        check(config, gpu_node(2, 80, host_gib=64))


def test_rank_0_has_no_room_for_the_copy_that_nccl_sends() -> None:
    """56.9 GiB beside 50.8: what the other ranks need fits."""
    learner = {"ranks": 16, "gradient_checkpointing": True, "micro_batch_tokens": 16384}
    nodes = [gpu_node(8, 77.6, name=f"node-{number}") for number in range(4)]
    for transfer, message in (
        ("shm", ""),
        ("nccl", r"rank 0: about 108\..*staged weights 56\.9.*weight_transfer=shm keeps"),
    ):
        inference = {"servers": 8, "tensor_parallel_size": 2, "weight_transfer": transfer}
        config = config_of("Qwen3-30B-A3B", inference=inference, learner=learner)
        plan = make_plan(run_parts(config, nodes, gpu_servers=True), nodes)
        with pytest.raises(PlacementError, match=message) if message else nullcontext():
            require_memory(config, read_shape("Qwen3-30B-A3B"), plan)


def check(config: Config, node: Node, shape: ModelShape | None = None) -> list[str]:
    plan = make_plan(run_parts(config, [node], gpu_servers=True), [node])
    return require_memory(config, shape or read_shape(config.model.path), plan)


def test_what_fits_is_said_for_each_use_of_a_gpu() -> None:
    shared = config_of("Qwen3-0.6B", inference={"kv_cache_gib": 4}, learner={"gradient_checkpointing": True})
    line, host = check(shared, gpu_node(1, 23.3))
    assert host.startswith("host ")
    assert line.startswith("rank ")
    assert "+ server" in line
    assert "key-value cache 4.0" in line
    lines = check(config_of("Qwen3-0.6B", inference={"servers": 3}), gpu_node(4, 80))
    assert [line.rpartition(", ")[2] for line in lines] == ["1 GPU(s)", "3 GPU(s)", "1 node(s)"]


@pytest.mark.parametrize(
    ("model", "sections", "gpus", "gib", "message"),
    [
        (
            "Qwen3-4B",
            {},
            1,
            80,
            r"rank 0 and server 0: about .* GiB \(states 59\.9.* on a GPU with 80\.0 GiB; a smaller",
        ),
        ("Qwen3-8B", {}, 2, 80, r"rank 0: about .* on a GPU with 80\.0 GiB; more learner\.ranks"),
        (
            "Qwen3-30B-A3B",
            {"inference": {"servers": 1}, "learner": {"lora": {"rank": 8, "targets": ["q_proj"]}, "ranks": 7}},
            8,
            40,
            r"server 0: about .* a larger inference\.tensor_parallel_size",
        ),
    ],
)
def test_what_cannot_fit_is_refused_in_one_line(
    model: str, sections: dict[str, Any], gpus: int, gib: float, message: str
) -> None:
    with pytest.raises(PlacementError, match=message) as caught:
        check(config_of(model, **sections), gpu_node(gpus, gib))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "options", "helps"),
    [
        (32_768, [], "learner.gradient_checkpointing=true or a smaller model.max_length"),
        (131_072, ["gradient_checkpointing"], "learner.activation_offload=true or a smaller model.max_length"),
        (131_072, ["gradient_checkpointing", "activation_offload"], None),
        (262_144, ["gradient_checkpointing", "activation_offload"], "a smaller model.max_length"),
    ],
)
def test_a_row_that_one_gpu_cannot_hold_is_refused_with_what_helps(
    tokens: int, options: list[str], helps: str | None
) -> None:
    model, learner = {"path": "Qwen3-8B", "max_length": tokens}, {"ranks": 8, **dict.fromkeys(options, True)}
    envs = [{"id": "A-v0"}]
    config = load_config({"model": model, "envs": envs, "inference": {"servers": 4}, "learner": learner})
    if helps is None:
        check(config, gpu_node(12, 80))
        return
    with pytest.raises(PlacementError) as caught:
        check(config, gpu_node(12, 80))
    assert str(caught.value).startswith("rank 0: about")
    assert str(caught.value).endswith(
        f"a row of model.max_length={tokens} tokens is not split over GPUs: {helps} helps"
    )


def test_a_cache_that_holds_no_episode_is_refused() -> None:
    config = config_of("Qwen3-0.6B", inference={"kv_cache_gib": 0.05}, learner={"gradient_checkpointing": True})
    with pytest.raises(PlacementError, match=r"one episode of model\.max_length=1024 needs 0\.1 GiB; raise"):
        check(config, gpu_node(1, 80))


def test_nothing_is_checked_without_gpus_or_where_their_memory_is_unknown() -> None:
    config = config_of("Qwen3-30B-A3B")
    cpu = Node("id", "10.0.0.1", "one", {"CPU": 16.0}, {"CPU": 16.0})
    plan = make_plan(run_parts(config, [cpu]), [cpu])
    assert check_gpu_memory(config, plan) == []
    unknown = Node("id", "10.0.0.1", "one", {"CPU": 16.0, "GPU": 2.0}, {"CPU": 16.0, "GPU": 2.0})
    assert [line.partition(" ")[0] for line in check(config, unknown)] == ["host"]
    *_, line = check_gpu_memory(config, make_plan(run_parts(config, [unknown]), [unknown]))
    assert line.startswith("not checked for 2 part(s) on one: ")


def test_a_model_of_unknown_size_is_not_checked_and_the_line_says_so(tmp_path: Path) -> None:
    config, node = config_of(str(tmp_path)), gpu_node(2, 80)
    plan = make_plan(run_parts(config, [node], gpu_servers=True), [node])
    (line,) = check_gpu_memory(config, plan)
    assert line.startswith("not checked: ")


def test_the_shape_of_a_model_is_kept_until_its_config_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "config.json"
    file.write_text((SHAPES / "Qwen3-0.6B.json").read_text())
    first = read_shape(str(tmp_path))

    def again() -> ModelShape:
        shape_module._read_shape.cache_clear()  # as in a new process
        return read_shape(str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(shape_module, "model_on_meta", lambda _: pytest.fail("it was built again"))
        assert again() == first
    (kept,) = (tmp_path / "cache" / "shapes").iterdir()
    kept.write_text(kept.read_text()[:-9])
    assert again() == first
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 2}))
    assert again().layers == 2
