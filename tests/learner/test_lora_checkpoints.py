"""A checkpoint of a run with adapters has what steps change, and goes on only with the weights below it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from roll_flash.errors import CheckpointError
from roll_flash.learner.ranks.checkpoint import SafeReader, read_state
from roll_flash.learner.ranks.fsdp import FsdpLearner
from tests.learner.in_process import in_process
from tests.learner.samples import make_group

LORA: dict[str, Any] = {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}, "learning_rate": 1e-2}
GROUPS = [make_group(seed, prompt=20, turn=(3, 12)) for seed in range(4)]
pytestmark = pytest.mark.filterwarnings("ignore")


async def step(learner: FsdpLearner, groups: list[Any]) -> float:
    await learner.accumulate(groups)
    return float((await learner.finish_step()).metrics["grad_norm"])


def save_after_a_step(model: Path, folder: Path, **settings: Any) -> float:
    """Return the gradient norm of the step after the checkpoint."""

    async def write(learner: FsdpLearner) -> float:
        await step(learner, GROUPS[:2])
        await (await learner.begin_save(folder))
        return await step(learner, GROUPS[2:])

    return in_process(model, write, **LORA, **settings)


def load_and_step(model: Path, folder: Path, **settings: Any) -> float:
    async def read(learner: FsdpLearner) -> float:
        await learner.load(folder)
        return await step(learner, GROUPS[2:])

    return in_process(model, read, **LORA, **settings)


@pytest.mark.parametrize("critic", [{}, {"advantage": "gae", "critic": {"kind": "model"}}], ids=["policy", "critic"])
def test_a_checkpoint_holds_adapters_and_no_frozen_weight(
    tiny_model: Path, tmp_path: Path, critic: dict[str, Any]
) -> None:
    expected = save_after_a_step(tiny_model, tmp_path / "state", **critic)
    stored = SafeReader(tmp_path / "state").read_metadata().state_dict_metadata
    weights = [name for name in stored if name.startswith("model.")]
    assert any(name.endswith(".lora_a") for name in weights)
    assert not [name for name in weights if not name.endswith((".lora_a", ".lora_b", "value_weight"))]
    assert load_and_step(tiny_model, tmp_path / "state", **critic) == expected


def test_a_checkpoint_is_refused_on_other_weights_than_those_of_its_adapters(tiny_model: Path, tmp_path: Path) -> None:
    save_after_a_step(tiny_model, tmp_path / "state")
    other = shutil.copytree(tiny_model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "mlp.up_proj" in name)
    tensors[name][0, 0] += 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"trained on other weights than model.path has now; put those back"):
        load_and_step(other, tmp_path / "state")


def adapted() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A frozen layer before one that is trained."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_of_an_older_version_brings_its_frozen_weights(tmp_path: Path) -> None:
    model, optimizer = adapted()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "state")
    again, its_optimizer = adapted()
    read_state(tmp_path / "state", again, its_optimizer, rank=0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
