"""A checkpoint that somebody else made is data: nothing in it is run, and one of ours is read as it was."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from roll_flash.errors import CheckpointError
from roll_flash.learner.ranks.checkpoint import read_state

pytestmark = pytest.mark.filterwarnings("ignore")


class Planted:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def trained(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 3, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    for state in moments["state"].values():
        state.update(more)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_ours_is_read_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = trained(dtype)
    save(tmp_path / "state", model, optimizer)
    again, its_optimizer = trained(dtype)
    its_optimizer.param_groups[0]["lr"] = 7.0
    read_state(tmp_path / "state", again, its_optimizer, rank=0)
    assert its_optimizer.param_groups[0]["lr"] == 7.0  # the config's
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    for mine, its in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], its["exp_avg"])


@pytest.mark.parametrize("states", [[torch.arange(3, dtype=torch.uint8)], []], ids=["of a GPU", "of a CPU"])
def test_random_states_of_gpus_come_back_where_there_are_some(
    states: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA is a stand-in. A checkpoint of a run on CPUs has none of them."""
    model, optimizer = trained(torch.float32)
    save(tmp_path / "state", model, optimizer)
    torch.save({"cpu": torch.get_rng_state(), "cuda": states}, tmp_path / "state" / "random-0.pt")
    given: list[list[torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    read_state(tmp_path / "state", model, optimizer, rank=0)
    assert [[state.tolist() for state in each] for each in given] == ([[[0, 1, 2]]] if states else [])


def test_what_is_planted_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "ran")
    save(tmp_path / "listed", *trained())
    (tmp_path / "listed" / ".metadata").write_bytes(pickle.dumps(planted))
    save(tmp_path / "inside", *trained(), step=planted)
    for name in ("listed", "inside"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_state(tmp_path / name, *trained(), rank=0)
    assert not planted.file.exists()
