"""New weights for servers on GPUs through shared memory: what happens before the pause, and what in it.

The models and their loaders are vLLM's, here without a GPU: CUDA's calls are stand-ins, and "the GPU" is memory of the
host. So the numbers are checked, and who does what and when; not speed.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.learner.model import lora
from roll_flash.learner.weights import staged
from roll_flash.learner.weights.staged import WeightStage, stored_tensors
from roll_flash.models.prepare import resolve_model
from roll_flash.weight_sync.mapped_file import MappedFile
from roll_flash.weight_sync.page_locked import page_locked_like
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights, merged

from .test_moe_publication import write_mixture
from .vllm_models import build, load, parameters_of, prepare_for_device, tensors_of

pytestmark = pytest.mark.vllm

TIED = ["lm_head.weight"]


class Cuda:
    """Notes what is asked of CUDA, and answers as it does."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False
        self.asked: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % os.sysconf("SC_PAGE_SIZE") == 0
        assert address not in self.locked
        if self.refuses:
            return 712
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    import vllm.utils.torch_utils  # noqa: F401  - it uses some of this while it is imported

    found = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(found.asked.append("device")))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(found.asked.append(stream)))
    yield found
    gc.collect()  # memory is unlocked when it is freed


class Gpu:
    """What a device is used for where no tensor is put on it."""

    type = "cuda"

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def learner_model(folder: Path, *, rank: int = 0, seed: int = 0) -> Any:
    """A learner's model whose weights differ from those in the folder."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    if rank:
        lora.adapt(model, LoraConfig(rank=rank, targets=("q_proj", "o_proj", "up_proj")))
        for layer in lora.adapters(model).values():
            layer.lora_b.data = torch.randn(layer.lora_b.shape, generator=generator) * 0.05
        return model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


class Published:
    """Versions as the learner stages them."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        self._dtype = dtype
        self._stages: list[WeightStage] = []

    def stage(self, model: Any, tied: list[str], *, changed_only: bool = False) -> str:
        """The path of a new version."""
        stage = WeightStage(model, tied, self._dtype, "test", changed_only=changed_only)
        self._stages.append(stage)
        return stage.stage(len(self._stages)).path

    def read(self, path: str, *, dtype: torch.dtype | None = None) -> PublishedWeights:
        return PublishedWeights(path, ModelFolder(self.folder), tied=True, dtype=dtype)

    def close(self) -> None:
        for stage in self._stages:
            stage.close()


@pytest.fixture
def tiny() -> Iterator[Published]:
    published = Published(resolve_model("tiny"))
    yield published
    published.close()


def buffer_of(model: nn.Module, folder: Path) -> Any:
    from roll_flash.weight_sync.double_buffer import PageLockedDoubleBuffer

    return PageLockedDoubleBuffer(model, ModelFolder(folder))


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = parameters_of(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function.overloadpacket))
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapters"])
def test_the_pause_is_one_copy_to_the_same_addresses(tiny: Published, rank: int) -> None:
    model = build(tiny.folder)
    before, addresses = parameters_of(model), {p.data_ptr() for p in model.parameters()}
    new = learner_model(tiny.folder, rank=rank)
    expected = build(tiny.folder)
    load(expected, dict(stored_tensors(new, TIED)))
    buffer = buffer_of(model, tiny.folder)
    with tiny.read(tiny.stage(new, TIED, changed_only=rank > 0)) as weights:
        buffer.prepare(weights)
    assert_same(model, before)
    with Operations() as operations:
        buffer.exchange()
    assert set(operations.names) <= {"aten.copy_", "aten.detach", "aten.alias"}, "work that is no copy"
    assert_same(model, parameters_of(expected))
    assert {p.data_ptr() for p in model.parameters()} == addresses, "CUDA graphs read the old ones"


@pytest.mark.usefixtures("cuda")
def test_the_second_version_of_adapters_is_as_if_it_were_the_first(tiny: Published) -> None:
    model, alone = build(tiny.folder), build(tiny.folder)
    versions = [tiny.stage(learner_model(tiny.folder, rank=4, seed=seed), TIED, changed_only=True) for seed in (1, 2)]
    for target, paths in ((model, versions), (alone, versions[1:])):
        buffer = buffer_of(target, tiny.folder)
        for path in paths:
            with tiny.read(path) as weights:
                buffer.prepare(weights)
            buffer.exchange()
    assert_same(model, parameters_of(alone))


@pytest.mark.usefixtures("cuda")
def test_adapters_are_merged_in_float32_and_rounded_once_one_layer_at_a_time(tiny: Published) -> None:
    model = build(tiny.folder, dtype="bfloat16")
    new = learner_model(tiny.folder, rank=4)
    name, layer = next((name, layer) for name, layer in lora.adapters(new).items() if "o_proj" in name)
    exact = layer.weight.double() + layer.scale * layer.lora_b.double() @ layer.lora_a.double()
    buffer = buffer_of(model, tiny.folder)
    with tiny.read(tiny.stage(new, TIED, changed_only=True), dtype=torch.bfloat16) as weights:
        assert {weights.tensor(each).dtype for each in weights.changed} == {torch.bfloat16}, (
            "a float32 copy of the model"
        )
        buffer.prepare(weights)
    buffer.exchange()
    merged_here = dict(model.named_parameters())[name]
    torch.testing.assert_close(merged_here, exact.bfloat16(), rtol=2**-7, atol=0)  # the last bit
    # A sum in float32 may lie on the other side of a number between two of bfloat16, but seldom.
    assert (merged_here != exact.bfloat16()).float().mean() < 0.01


def test_a_merge_leaves_its_inputs_alone_and_keeps_their_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, down, up = torch.randn(6, 5).to(dtype), torch.randn(2, 5), torch.randn(6, 2)
        before = weight.clone()
        found = merged(weight, down, up, 0.5)
        assert found.dtype == dtype
        assert torch.equal(weight, before)
        torch.testing.assert_close(found, (weight.double() + 0.5 * up.double() @ down.double()).to(dtype))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", ["dense", "qwen3_moe", "mixtral"])
def test_each_of_two_gpus_takes_its_part_of_every_tensor(kind: str, tmp_path: Path) -> None:
    """Put together again, they are the learner's weights. vLLM's loaders split, in a group of two."""
    folder = resolve_model("tiny") if kind == "dense" else write_mixture(kind, tmp_path / "model")
    published = Published(folder)
    new = learner_model(folder, seed=3)
    tied = TIED if kind == "dense" else []
    path = published.stage(new, tied)
    parts = []
    for rank in range(2):
        model = build(folder, size=2, rank=rank)
        buffer = buffer_of(model, folder)
        with published.read(path) as weights:
            buffer.prepare(weights)
            rest = buffer.left_over
            load(model, {name: weights.tensor(name) for name in rest.names})  # as vLLM's reload does in the pause
        buffer.exchange()
        parts.append(parameters_of(model))
    assert_put_together(parts, dict(stored_tensors(new, tied)), new.config)
    published.close()


def assert_put_together(parts: list[dict[str, Tensor]], learner: dict[str, Tensor], config: Any) -> None:
    checked = set()

    def check(name: str, *found: Tensor) -> None:
        assert torch.equal(torch.cat(found, dim=1 if name.endswith(BY_COLUMNS) else 0), learner[name]), name
        checked.add(name)

    for name in parts[0]:
        halves = [part[name] for part in parts]
        if ".qkv_proj." in name:
            sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
            split = [half.split([size * config.head_dim // 2 for size in sizes]) for half in halves]
            for place, own in enumerate(("q_proj", "k_proj", "v_proj")):
                check(name.replace("qkv_proj", own), *(part[place] for part in split))
        elif ".gate_up_proj." in name:
            for place, own in enumerate(("gate_proj", "up_proj")):
                check(name.replace("gate_up_proj", own), *(half.chunk(2)[place] for half in halves))
        elif "w13_weight" in name or "w2_weight" in name:
            check_experts(name, halves, learner, checked)
        elif halves[0].shape == learner[name].shape:
            assert torch.equal(halves[0], learner[name]), name
            assert torch.equal(halves[1], learner[name]), name
            checked.add(name)
        else:
            check(name, *halves)
    assert checked == learner.keys()


BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")


def check_experts(name: str, halves: list[Tensor], learner: dict[str, Tensor], checked: set[str]) -> None:
    layer = name.split(".experts.")[0] + ".experts"
    names = ("gate_proj", "up_proj", "down_proj")
    if f"{layer}.0.gate_proj.weight" not in learner:
        names = ("w1", "w3", "w2")
    for expert in range(len(halves[0])):
        first, second, last = (f"{layer}.{expert}.{each}.weight" for each in names)
        if "w13" in name:
            pairs = [half[expert].chunk(2) for half in halves]
            for place, own in enumerate((first, second)):
                rows = learner[own].shape[0] // 2  # vLLM may pad
                assert torch.equal(torch.cat([pair[place][:rows] for pair in pairs]), learner[own]), own
                checked.add(own)
        else:
            columns = learner[last].shape[1] // 2
            assert torch.equal(torch.cat([half[expert][:, :columns] for half in halves], 1), learner[last]), last
            checked.add(last)


@pytest.mark.usefixtures("cuda")
def test_only_experts_that_changed_are_left_to_the_pause(tmp_path: Path) -> None:
    folder = write_mixture("qwen3_moe", tmp_path / "model")
    published = Published(folder)
    buffer = buffer_of(build(folder), folder)
    adapters = learner_model(folder)
    lora.adapt(adapters, LoraConfig(rank=2, targets=("q_proj",)))
    with published.read(published.stage(adapters, [], changed_only=True)) as weights:
        buffer.prepare(weights)
        assert not buffer.left_over.names
        assert not weights.is_page_locked
    with published.read(published.stage(learner_model(folder), [])) as weights:
        buffer.prepare(weights)
        left = buffer.left_over
        assert left.names
        assert all(".experts." in name for name in left.names)
        assert len(left.modules) == 2
        assert weights.is_page_locked, "the pause would copy from memory that is not locked"
    published.close()


def engine_on(model: nn.Module, folder: Path, device: Any) -> Any:
    """vLLM's side of a publication, as its worker makes it."""
    from roll_flash.weight_sync.shared_memory import SharedMemoryInitInfo, SharedMemoryWeightTransferEngine

    config = SimpleNamespace(
        model=str(folder), hf_config=SimpleNamespace(tie_word_embeddings=False), dtype=torch.float32
    )
    vllm_config: Any = SimpleNamespace(parallel_config=None, model_config=config)
    engine = SharedMemoryWeightTransferEngine(None, vllm_config, device, model)  # type: ignore[arg-type]
    engine.init_transfer_engine(SharedMemoryInitInfo())
    return engine


@pytest.mark.parametrize("beside", [True, False], ids=["prepared", "at once"])
def test_a_mixture_is_published_on_a_gpu(
    beside: bool, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Experts are packed as on a CPU here, by the same calls of vLLM."""
    from roll_flash.inference.vllm.patches import patch_expert_reload
    from roll_flash.weight_sync import shared_memory
    from roll_flash.weight_sync.shared_memory import SharedMemoryUpdateInfo

    devices: list[Any] = []

    def on_the_host(*arguments: Any, device: Any, **keywords: Any) -> PublishedWeights:
        devices.append(device)
        return PublishedWeights(*arguments, **keywords)

    monkeypatch.setattr(shared_memory, "PublishedWeights", on_the_host)
    patch_expert_reload()
    folder = write_mixture("qwen3_moe", tmp_path / "model")
    published = Published(folder)
    model, expected = build(folder), build(folder)
    experts = [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]
    for module in experts:
        prepare_for_device(module)
    gpu = Gpu()
    engine = engine_on(model, folder, gpu)
    for seed in (1, 2):
        new = learner_model(folder, seed=seed)
        path = published.stage(new, [])
        engine.start_weight_update()
        if beside:
            reading, writing = os.pipe()
            engine.receive_weights(SharedMemoryUpdateInfo(path, ready_pipe=f"/proc/self/fd/{writing}"))
            os.close(writing)
            assert os.read(reading, 1) == b"", "it is ready when the pipe is closed"
            os.close(reading)
            assert "a stream" in cuda.asked, "the preparation would wait for the model's work"
        engine.receive_weights(SharedMemoryUpdateInfo(path))
        engine.finish_weight_update()
    assert devices == [gpu] * len(devices)
    load(expected, dict(stored_tensors(new, [])))
    for module in expected.modules():
        if type(module).__name__ == "RoutedExperts":
            prepare_for_device(module)
    assert_same(model, parameters_of(expected))
    published.close()
    engine.shutdown()
    held = sum(tensor.untyped_storage().nbytes() for tensor in engine._double_buffer._memory.values())
    assert sum(cuda.locked.values()) == held, "locked memory of a version that is done"


@pytest.mark.usefixtures("cuda")
def test_what_is_loaded_layer_by_layer_on_a_gpu_comes_from_locked_memory(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tiny: Published
) -> None:
    """The model is one that loads weights in a way of its own."""
    from roll_flash.weight_sync import shared_memory
    from roll_flash.weight_sync.double_buffer import UnknownModelError
    from roll_flash.weight_sync.shared_memory import SharedMemoryUpdateInfo

    def unknown(*_: Any) -> Any:
        raise UnknownModelError("it is quantised")

    monkeypatch.setattr(shared_memory, "PageLockedDoubleBuffer", unknown)
    monkeypatch.setattr(
        shared_memory,
        "PublishedWeights",
        lambda *arguments, device, **keywords: PublishedWeights(*arguments, **keywords),
    )
    model, expected = build(tiny.folder), build(tiny.folder)
    engine = engine_on(model, tiny.folder, Gpu())
    engine._tied = True
    new = learner_model(tiny.folder)
    path = tiny.stage(new, TIED)
    read: list[bool] = []
    tensor = PublishedWeights.tensor
    monkeypatch.setattr(
        PublishedWeights, "tensor", lambda self, name: [read.append(self.is_page_locked), tensor(self, name)][1]
    )
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):  # which do nothing on a GPU
        monkeypatch.setattr(method, "process_weights_after_loading", lambda self, layer: None)
    engine.receive_weights(SharedMemoryUpdateInfo(path))
    load(expected, dict(stored_tensors(new, TIED)))
    assert_same(model, parameters_of(expected))
    assert read
    assert all(read)
    assert not cuda.locked


def test_models_whose_weights_are_not_copies_of_those_in_the_folder_are_refused(tiny: Published) -> None:
    from roll_flash.weight_sync.double_buffer import UnknownModelError, WeightDoubleBuffer

    model: Any = build(tiny.folder)
    layer = model.model.layers[0]
    layer.mlp.register_parameter("W_UV", nn.Parameter(torch.zeros(1)))
    with pytest.raises(UnknownModelError, match="derives W_UV from other weights"):
        WeightDoubleBuffer(model, ModelFolder(tiny.folder))
    del layer.mlp.W_UV
    impl = layer.self_attn.attn.impl
    impl.sinks = layer.self_attn.o_proj.weight
    WeightDoubleBuffer(model, ModelFolder(tiny.folder))
    impl.sinks = torch.zeros(2)  # as where a kernel needs another dtype
    with pytest.raises(UnknownModelError, match="keeps a copy of its sinks"):
        WeightDoubleBuffer(model, ModelFolder(tiny.folder))
    impl.sinks = None
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.T
    with pytest.raises(UnknownModelError, match="another layout"):
        buffer_of(model, tiny.folder)


@pytest.mark.usefixtures("cuda")
def test_parameters_that_no_checkpoint_has_stay_as_they_are(tiny: Published) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model: Any = build(tiny.folder)
    layer = model.model.layers[0].self_attn.o_proj
    layer.register_parameter("sinks", nn.Parameter(torch.arange(3.0), requires_grad=False))
    record_metadata_for_reloading(model)
    buffer = buffer_of(model, tiny.folder)
    with tiny.read(tiny.stage(learner_model(tiny.folder), TIED)) as weights:
        buffer.prepare(weights)
    buffer.exchange()
    assert layer.sinks.tolist() == [0, 1, 2]


def test_a_head_that_the_folder_has_though_it_is_tied_follows_the_embedding(tmp_path: Path) -> None:
    """vLLM on a CPU computes with a packed copy of it."""
    from safetensors.torch import save_file

    from roll_flash.weight_sync.double_buffer import WeightDoubleBuffer

    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model: Any = build(folder)
    model.lm_head.weight = model.model.embed_tokens.weight  # as vLLM ties it again
    prepare_for_device(model)
    held_elsewhere = model.model.norm.weight
    new = learner_model(resolve_model("tiny"))
    published = Published(folder)
    buffer = WeightDoubleBuffer(model, ModelFolder(folder))
    with published.read(published.stage(new, TIED)) as weights:
        buffer.prepare(weights)
    buffer.exchange()
    assert torch.equal(held_elsewhere, new.model.norm.weight), "routers and attention hold some weights too"
    hidden = torch.randn(2, new.config.hidden_size)
    logits = model.lm_head.quant_method.apply(model.lm_head, hidden)[:, : new.config.vocab_size]
    torch.testing.assert_close(logits, hidden @ new.lm_head.weight.T)
    published.close()


def test_a_router_that_vllm_has_joined_with_another_gate_is_joined_again_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the shared-memory engine after each load, and by a patch after the reloads of vLLM's own engines."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.model_loader import reload

    from roll_flash.inference.vllm.patches import patch_copied_weights

    model = nn.Module()
    runner: Any = nn.Module()
    runner.gate, runner.shared_expert_gate = nn.Linear(4, 3), nn.Linear(4, 1)
    runner._combined_gate_weight = None
    model.add_module("experts", runner)
    with torch.inference_mode():  # as in vLLM's first forward pass
        MoERunner._maybe_fuse_gate_weights(runner)
    joined = runner._combined_gate_weight
    with torch.no_grad():
        runner.gate.weight.add_(1)
        runner.shared_expert_gate.weight.add_(2)
    assert not torch.equal(joined[:3], runner.gate.weight)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    patch_copied_weights()
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # as the engines import it

    finalize_layerwise_reload(model, None)
    assert torch.equal(joined, torch.cat([runner.gate.weight, runner.shared_expert_gate.weight]))
    assert runner._combined_gate_weight is joined


def test_a_file_in_locked_memory_reads_as_itself(cuda: Cuda, tiny: Published) -> None:
    path = tiny.stage(learner_model(tiny.folder), TIED)
    file = MappedFile(path, locked=True)
    assert list(cuda.locked.values()) == [os.stat(path).st_size]
    with tiny.read(path) as weights:
        for name in weights.changed:
            assert torch.equal(file.tensor(name), weights.tensor(name)), name
    file.close()
    assert not cuda.locked


def test_memory_that_cuda_cannot_lock_serves_all_the_same(
    cuda: Cuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reports_the_last_error(*_: Any, device: str) -> Tensor:
        cuda.asked.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    cuda.refuses = True
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", reports_the_last_error)
        tensor = page_locked_like(torch.empty(3, 4, dtype=torch.bfloat16, device="meta").T)
    assert "cannot lock" in caplog.text
    assert cuda.asked == ["cuda"], "the error would come up in the model's work"
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 3), (1, 4), torch.bfloat16)
    tensor.fill_(2)
    assert tensor.float().sum() == 24


def test_the_learner_stages_into_locked_memory_when_it_is_on_a_gpu(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tiny: Published
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(staged, "is_on_gpu", lambda model: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waited.append(1)))
    new = learner_model(tiny.folder)
    stage = WeightStage(new, TIED, torch.float32, "test")
    stage.reserve()
    assert len(cuda.locked) == 1, "it is locked before the first step"
    weights = stage.stage(1)
    assert waited, "copies of the GPU may not be there yet"
    with tiny.read(weights.path) as published:
        assert torch.equal(published.tensor("model.norm.weight"), new.model.norm.weight)
    other = stage.stage(2)
    assert len(cuda.locked) == 2
    stage.release(weights)
    stage.release(other)
    stage.close()
    assert not cuda.locked
