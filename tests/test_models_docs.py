"""The first section of docs/models.md, done as a new user would: every block, with a hub on loopback, tiny models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from roll_flash.cli.main import main
from roll_flash.models.adapter import write_adapter
from roll_flash.models.prepare import resolve_model
from tests.hub_server import open_hub
from tests.test_models import write_gguf

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
SECTION = PAGE[PAGE.index("## A model of yours") : PAGE.index("## How a model is computed")]
LAYER = "model.layers.0.self_attn.q_proj"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def commands(block: str) -> list[list[str]]:
    return [line.split("#")[0].split()[1:] for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page takes as given: data, models of the three kinds, and a run that trained an adapter."""
    tiny = resolve_model("tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_FLASH_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]
    Path("my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (config,) = blocks("yaml")
    Path("mine.yaml").write_text(config)
    shutil.copytree(tiny, "models/my-model")
    write_gguf(Path("models/my-model-Q8_0.gguf"))
    Path("models/my-adapter").mkdir()
    factors = {LAYER: (torch.ones(2, 128), torch.ones(128, 2))}
    write_adapter(Path("models/my-adapter"), factors, alpha=4.0, base=str(tiny), revision=None)
    checkpoint = Path("runs/mine/checkpoints/step_5")
    shutil.copytree(tiny, checkpoint / "hf")
    state = {f"model.{LAYER}.lora_a": torch.ones(2, 128), f"model.{LAYER}.lora_b": torch.ones(128, 2)}
    dcp.save({"model": state}, checkpoint_id=checkpoint / "state", no_dist=True)
    (checkpoint / "COMPLETE").touch()
    Path("runs/mine/config.yaml").write_text(
        config.replace("Qwen/Qwen3-0.6B", str(tiny)) + "learner: {lora: {rank: 2}}\n"
    )
    return tmp_path


def test_every_block_does_what_the_page_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, export, check = map(commands, blocks("sh"))
    assert len(begin) == 5
    assert len(export) == 4
    assert [words[:2] for words in check] == [["-m", "benchmarks.model_check"]] * 3
    with open_hub(monkeypatch, folder / "cache") as hub:
        hub.add("Qwen/Qwen3-0.6B", Path("models/my-model"))
        for words in [*begin, *export]:
            assert main(words) == 0, (words, capsys.readouterr().err)
        assert set(hub.commits) == {"Qwen/Qwen3-0.6B", "ORG/NAME"}
        assert hub.private == {"ORG/NAME": True}
    models = re.findall(r"^# model: (.*)", capsys.readouterr().out, re.MULTILINE)
    kinds = [
        "models--Qwen--Qwen3-0.6B",
        "models--Qwen--Qwen3-0.6B",
        "models/my-model",
        "gguf-my-model-Q8_0",
        "adapter-my",
    ]
    assert len(models) == 6
    for model, kind in zip(models, [*kinds, "adapter-mine-adapter"], strict=True):
        assert kind in model
    assert Path("mine-model/config.json").is_file()
    assert Path("mine-adapter/adapter_config.json").is_file()
