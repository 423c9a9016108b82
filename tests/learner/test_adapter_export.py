"""A run's adapter alone: with its model it is what the run exports as a whole, and a next run can start with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll_flash.errors import CheckpointError, ConfigError, ModelError
from roll_flash.learner.ranks.checkpoint import export_adapter
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.models.prepare import resolve_model
from roll_flash.models.shape import read_shape
from tests.learner.in_process import in_process
from tests.learner.samples import make_group

ALPHA, RANK = 16.0, 2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint after one step that trained adapters of the tiny model."""
    folder = tmp_path / "runs" / "mine"
    checkpoint = folder / "checkpoints" / "step_1"

    async def use(learner: FsdpLearner) -> None:
        await learner.accumulate([make_group(seed, prompt=20, turn=(3, 12)) for seed in range(2)])
        await learner.finish_step()
        checkpoint.mkdir(parents=True)
        await (await learner.begin_save(checkpoint / "state"))
        await (await learner.begin_export(checkpoint / "hf"))

    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["q_proj", "down_proj"]}
    in_process(resolve_model("tiny"), use, lora=lora, learning_rate=1e-2)
    (checkpoint / "COMPLETE").touch()
    write_config(folder, {"lora": lora})
    return folder


def write_config(folder: Path, learner: dict[str, object]) -> None:
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "counting:Counting-v0"}], "learner": learner}
    (folder / "config.yaml").write_text(json.dumps(tree))


@pytest.fixture
def adapter(run: Path, tmp_path: Path) -> Path:
    checkpoint, folder = export_adapter(str(run), str(tmp_path / "adapter"))
    assert checkpoint.step == 1
    return folder


def test_an_adapter_is_a_folder_of_peft(adapter: Path) -> None:
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert (config["base_model_name_or_path"], config["target_modules"]) == ("tiny", ["down_proj", "q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert (tensors[name.format("A")].shape, tensors[name.format("B")].shape) == ((RANK, 128), (128, RANK))


def test_an_adapter_and_its_model_are_the_model_that_the_run_exports(run: Path, adapter: Path) -> None:
    exported = load_file(run / "checkpoints" / "step_1" / "hf" / "model.safetensors")
    base = load_file(resolve_model("tiny") / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    changed = 0
    for name, weight in exported.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name]
        if f"{layer}.lora_A.weight" in factors:
            changed += 1
            expected = expected + ALPHA / RANK * factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]
            assert not torch.equal(weight, base[name])
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    assert changed == 6


def test_a_run_can_start_with_an_adapter(
    run: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_model("tiny")
    exported = load_file(run / "checkpoints" / "step_1" / "hf" / "model.safetensors")
    capsys.readouterr()
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "cache"))
    folder = resolve_model(adapter)
    assert f"adding {adapter} to " in capsys.readouterr().err
    merged = load_file(folder / "model.safetensors")
    assert merged.keys() == exported.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)
    assert resolve_model(adapter) == folder
    assert not capsys.readouterr().err, "merged once"
    assert read_shape(str(adapter)).parameters == read_shape("tiny").parameters


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, r"only plain LoRA adapters .* type IA3; merge it with PEFT \(merge_and_unload\)"),
        ({"use_dora": True}, "it uses use_dora; merge it with PEFT"),
        ({"bias": "all"}, "it uses bias"),
        ({"init_lora_weights": "pissa_niter_16"}, "it uses init_lora_weights=pissa_niter_16; merge it with PEFT"),
        ({"alora_invocation_tokens": [3, 4]}, "it uses alora_invocation_tokens; merge it with PEFT"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/such"}, r"an adapter for /no/such, .*: no such model folder"),
    ],
)
def test_an_adapter_that_cannot_be_merged_says_what_to_do(adapter: Path, changes: dict[str, object], says: str) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=says) as caught:
        resolve_model(adapter)
    assert len(str(caught.value).splitlines()) == 1


def test_an_adapter_of_another_model_is_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: torch.zeros(RANK, 64)}, file)
    with pytest.raises(ModelError, match=r"changes model.layers.0.self_attn.q_proj by \(128, 64\), .* \(128, 128\)"):
        resolve_model(adapter)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"holds base_model.model.lm_head.weight, which is no pair of factors"):
        resolve_model(adapter)


def test_an_adapter_of_a_model_that_lacks_tensors_is_refused(adapter: Path, tmp_path: Path) -> None:
    """Their random values would be written into the sum, where nobody could tell them from others."""
    base = shutil.copytree(resolve_model("tiny"), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    with pytest.raises(ModelError, match=r"1 tensors of .* are not in its files, such as model.layers.1.mlp.up_proj"):
        resolve_model(adapter)


def test_a_run_without_an_adapter_or_with_a_broken_checkpoint_is_one_line(run: Path, tmp_path: Path) -> None:
    for file in (run / "checkpoints" / "step_1" / "state").glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        export_adapter(str(run), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    write_config(run, {})
    with pytest.raises(ConfigError, match="trained all weights"):
        export_adapter(str(run), str(tmp_path / "new"))
