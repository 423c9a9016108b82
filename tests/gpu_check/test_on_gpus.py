"""What only happens on a machine with GPUs, as far as it can be tried without one: made-up GPUs, made-up times."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll_flash.cluster.nodes import own_node
from roll_flash.cluster.parts import run_parts
from roll_flash.cluster.plan import Plan, make_plan
from roll_flash.config.tree import RayConfig
from roll_flash.engines.inference import ServerUpdate, StagedWeights
from roll_flash.engines.learner import StepResult
from roll_flash.errors import ParityError
from roll_flash.gpu_check import machine, runner, servers, settings, training
from roll_flash.gpu_check.check import Bench, CheckFailedError
from roll_flash.gpu_check.groups import all_groups
from roll_flash.gpu_check.servers import Models
from roll_flash.gpu_check.settings import CONFIGS, Settings, create_folder, make_settings
from roll_flash.models.folder import check_model_folder
from roll_flash.models.tiny import CHARACTERS
from roll_flash.processes.nvml import Driver, Gpu
from roll_flash.weight_sync.parity import Probe, load_probe
from roll_flash.weight_sync.publication import Publication, Publisher
from tests.gpu_check.conftest import Reported

GIB = 2**30
RECIPES = sorted(path for path in (CONFIGS / "gpu").glob("*.yaml") if path.stem != "base")


def driver(*processes: dict[int, int | None], memory_gib: float = 79.6) -> Driver:
    gpus = (
        Gpu(f"GPU-{number}", "NVIDIA H100 80GB HBM3", int(memory_gib * GIB), GIB, running, {})
        for number, running in enumerate(processes)
    )
    return Driver("580.1", (13, 0), tuple(gpus))


@pytest.fixture
def make_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(count: int) -> None:
        found = driver(*({} for _ in range(count)))
        for module in (settings, machine):
            monkeypatch.setattr(module, "read_driver", lambda: found)
        monkeypatch.setattr(settings, "is_cpu_installation", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


def settings_on(gpus: int, tmp_path: Path, make_gpus: Any, recipe: Path | None = None) -> Settings:
    make_gpus(gpus)
    settings = make_settings(tmp_path / "report", None if recipe is None else str(recipe), ())
    create_folder(settings.output)
    return settings


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=lambda path: "none" if path is None else path.stem)
def test_every_group_has_a_valid_config_for_every_recipe(tmp_path: Path, make_gpus: Any, recipe: Path | None) -> None:
    found = settings_on(8, tmp_path, make_gpus, recipe)
    assert not found.rehearsal
    assert found.shape is not None, "no model folder is there, so its weights are random"
    assert found.config_with().ray == RayConfig()
    for group in all_groups(found):
        if group.opens is not None:
            config = found.config_with(*servers.CHANGING, *group.opens.arguments["overrides"])
            assert config.envs[0].id == "Dataset-v0"
    assert not [group.name for group in all_groups(found) if group.not_possible]
    assert found == Settings.of(found.to_json())


def test_with_one_gpu_what_needs_two_says_so(tmp_path: Path, make_gpus: Any) -> None:
    reasons = {group.name: group.not_possible for group in all_groups(settings_on(1, tmp_path, make_gpus))}
    assert {name for name, reason in reasons.items() if reason} == {
        "weights by nccl",
        "two ranks",
        "two servers",
        "a server on two GPUs",
    }
    assert reasons["weights by nccl"].startswith("nccl needs 2 GPUs")


def test_without_a_recipe_the_plan_fits_on_one_gpu_of_24_gib(
    tmp_path: Path, make_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, events = settings_on(1, tmp_path, make_gpus), []
    monkeypatch.setattr(machine, "own_gpus", lambda _: {"0": int(23.5 * GIB)})
    monkeypatch.setattr(machine, "computes_on_gpus", lambda _: True)
    machine.plan(Bench(found, events.append))
    assert any("server" in event["text"] and "24" not in event["text"] for event in events if event["kind"] == "fits")
    machine.recipes(Bench(found, events.append))
    lines = [event["text"] for event in events if event["kind"] == "fits"]
    assert any(line.startswith("qwen3-0.6b-1x24gb.yaml: fits") for line in lines)
    assert any(line.startswith("qwen3-8b-8x80gb.yaml: does not fit: the run needs") for line in lines)
    assert any(line.startswith("qwen3-30b-a3b-4x8x80gb.yaml: is for a cluster") for line in lines)


def test_random_weights_in_a_shape_are_a_model_with_a_tokenizer(tmp_path: Path) -> None:
    shape = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 3000,
        "tie_word_embeddings": True,
    }
    machine.write_random_model(tmp_path / "model", shape)
    check_model_folder(tmp_path / "model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == 3000
    assert next(model.parameters()).dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS
    assert tokenizer.decode([2999])
    assert load_probe(tmp_path / "model", "The quick brown fox", 128).texts


def test_where_the_package_is_only_a_folder_vllm_finds_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(runner.metadata, "distribution", missing)
    environment = runner._environment(tmp_path)
    monkeypatch.undo()
    first, root, *_ = environment["PYTHONPATH"].split(os.pathsep)
    points = [point for found in metadata.distributions(path=[first]) for point in found.entry_points]
    (plug_in,) = [point for point in points if point.group == "vllm.general_plugins"]
    assert plug_in.name == "roll_flash"
    assert callable(plug_in.load())
    assert (Path(root) / "roll_flash").is_dir()


def on_gpu(reported: Reported, **speed: float) -> Bench:
    return Bench(replace(reported.bench.settings, gpus=1, earlier={"speed": speed}), reported.events.append)


def test_a_step_far_below_the_published_figure_is_slow_and_the_page_says_where_its_time_went(
    reported: Reported,
) -> None:
    result = StepResult(1, 1, False, {"forward_backward_s": 3.0, "optimizer_s": 0.5})
    training._judge_speed(on_gpu(reported, published_tflops=989, matmul_tflops=700), result, 300.0)
    assert reported.figures["mfu"] == pytest.approx(300 / 989)
    assert "3.00 s are forward and backward, 0.50 s the optimizer" in reported.texts("slow")[0]
    reported.events.clear()
    training._judge_speed(on_gpu(reported, published_tflops=989, matmul_tflops=700), result, 600.0)
    assert not reported.texts("slow")


@pytest.mark.parametrize(("pause_s", "slow"), [(0.25, False), (1.0, True)])
def test_a_pause_is_slow_beside_a_plain_copy(
    reported: Reported, pause_s: float, slow: bool, settings: Settings
) -> None:
    published = Publication(1, None, pause_s, 2.0, 10**9)  # type: ignore[arg-type]
    models = _models(settings, None)
    servers._compare_with_copy(on_gpu(reported, copy_from_host_gb_s=10.0), models, published)
    assert reported.figures["pause_in_copies"] == pytest.approx(pause_s / 0.1)
    assert bool(reported.texts("slow")) == slow


class _Learner:
    """Gives log-probabilities that depend on its version."""

    def __init__(self) -> None:
        self.version = 0

    async def logprobs_of(self, texts: Any) -> list[np.ndarray]:
        return [np.full(len(text) - 1, -1.0 - self.version, np.float32) for text in texts]

    async def stage_weights(self) -> StagedWeights:
        return StagedWeights(self.version, "", 1, 1)

    async def release_weights(self, weights: StagedWeights) -> None:
        pass


class _Engine:
    """Answers with the weights of the last publication; if `stale`, always with the first."""

    dtype = "bfloat16"

    def __init__(self, stale: bool) -> None:
        self.stale, self.version = stale, 0

    async def publish(self, weights: StagedWeights, **_: Any) -> list[ServerUpdate]:
        if not self.stale:
            self.version = weights.version
        return [ServerUpdate("here", weights.version, 0.1, 0.2)]

    async def score(self, text: Any) -> list[np.ndarray]:
        return [np.full(len(text) - 1, -1.0 - self.version, np.float32)]


def _models(settings: Settings, engine: Any, learner: Any = None, plan: Plan | None = None) -> Models:
    probe, config = Probe([list(range(100)), list(range(100))]), settings.config_with()
    publisher = None
    if engine is not None:
        publisher = Publisher(
            learner, engine, config.weights, probe=probe, threshold=0.25, on_published=lambda version: None
        )
    return Models(config, Path(), learner, plan or Plan(()), probe, 0.25, engine, publisher)


@pytest.mark.parametrize("stale", [False, True])
def test_a_server_that_answers_with_old_weights_fails(reported: Reported, settings: Settings, stale: bool) -> None:
    async def publish() -> None:
        learner = _Learner()
        models = _models(settings, _Engine(stale), learner)
        before = await learner.logprobs_of(models.probe.texts)
        learner.version = 1
        try:
            await servers.publish(models)
        except ParityError:
            assert stale
        await servers.check_new_weights(reported.bench, models, before)

    if stale:
        with pytest.raises(CheckFailedError, match="answers with old weights"):
            asyncio.run(publish())
        assert reported.figures["parity_mean"] == 1.0
    else:
        asyncio.run(publish())
        assert reported.figures["parity_mean"] == 0.0


def test_a_part_on_another_gpu_than_planned_fails(
    reported: Reported, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings.config_with("learner.device=cuda", "learner.ranks=1", "inference.servers=1")
    node = own_node({"CPU": 8.0, "GPU": 2.0}, {"0": 80 * GIB, "1": 80 * GIB})
    plan = make_plan(run_parts(config, [node], gpu_servers=True), [node])
    models = _models(settings, None, plan=plan)
    places = {"ranks": {"0"}, "server 0": {"1"}}
    monkeypatch.setattr(servers, "_found_places", lambda models, driver: places)
    asyncio.run(servers.placed(reported.bench, models))
    assert reported.figures["found"] == "ranks on GPU 0, server 0 on GPU 1"
    places["server 0"] = {"0"}
    with pytest.raises(CheckFailedError, match=r"planned: .* server 0 on GPU 1; found: .* server 0 on GPU 0"):
        asyncio.run(servers.placed(reported.bench, models))


def test_processes_are_found_on_the_gpus_that_the_driver_shows_them_on(settings: Settings) -> None:
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = servers._found_places(_models(settings, None), driver({}, {child.pid: None, 1: None}))
        assert found == {"ranks": {"1"}}
    finally:
        child.communicate(b"\n")


def test_a_step_needs_as_many_operations_as_by_hand(settings: Settings) -> None:
    from roll_flash.models.shape import read_shape

    config, shape = settings.config_with("scheduler.group_size=2"), read_shape("Qwen3-0.6B")
    groups = training.made_groups(config, settings.model_folder, 0, 1, length=400)
    tokens, answers = 100 + 2 * 300, 600
    pairs = 100**2 / 2 + 2 * (300 * 100 + 300**2 / 2)
    expected = 6 * (440_467_456 * tokens + 151_936 * 1024 * answers) + 12 * 28 * 2048 * pairs
    assert training._operations(config, shape, groups) == pytest.approx(expected, rel=1e-3)
