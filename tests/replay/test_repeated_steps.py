"""`verify --repeat`: where it begins, what it refuses, and how models are compared. With a real learner:
test_training_runs.py and test_learner_restart_runs.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from roll_flash.config.tree import load_config
from roll_flash.errors import CheckpointError, RunError
from roll_flash.replay.steps import _of_a_resume, compare_models, repeat_steps
from roll_flash.run.run_dir import RunDir


def model(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda weights: weights.clone(), []),
        (lambda weights: torch.tensor([1.0, 2.5]), ["b by at most 0.5"]),
        (lambda weights: torch.nextafter(weights, weights + 1), ["b by at most 2.4e-07"]),
        (lambda weights: weights.to(torch.bfloat16), ["b by at most 0"]),
        (lambda weights: torch.tensor([1.0, float("nan")]), ["b by at most nan"]),
        (lambda weights: torch.ones(3), ["b by at most inf"]),
    ],
)
def test_two_models_are_compared_bit_by_bit(
    change: Callable[[torch.Tensor], torch.Tensor], found: list[str], tmp_path: Path
) -> None:
    weights = torch.tensor([1.0, 2.0])
    one = model(tmp_path / "one", a=torch.zeros(2), b=weights)
    other = model(tmp_path / "other", a=torch.zeros(2), b=change(weights))
    assert compare_models(one, other) == found


def test_a_model_with_other_tensors_is_named(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one", a=torch.zeros(1)), model(tmp_path / "other", b=torch.zeros(1))
    with pytest.raises(CheckpointError, match="only one of them has a, b"):
        compare_models(one, other)


def test_other_weights_after_a_resume_with_other_settings_name_these(tmp_path: Path) -> None:
    """A run that was resumed with another learning rate was called wrong, without a word about that."""
    folder = run_with(tmp_path, 1)
    config = load_config(folder / "config.yaml")
    assert _of_a_resume(config, folder) == ""
    changes = ["learner.learning_rate=3e-5", "checkpoint.keep=2"]
    changed = load_config(folder / "config.yaml", changes)
    RunDir.create(changed, resume=True).close()
    said = _of_a_resume(changed, folder)
    assert said.endswith("which may be why: learner.learning_rate: 1e-05 -> 3e-05")


def run_with(folder: Path, *steps: int) -> Path:
    """A run folder with checkpoints that have no files of their own, and without a journal."""
    config = load_config({"name": "run", "runs": str(folder), "model": {"path": "tiny"}, "envs": [{"id": "Sum-v0"}]})
    with RunDir.create(config, resume=False) as run_dir:
        for step in steps:
            with run_dir.writing_checkpoint(step) as checkpoint:
                (checkpoint / "hf").mkdir()
                (checkpoint / "state").mkdir()
                (checkpoint / "hf/weights").write_bytes(b"weights")
                (checkpoint / "state/moments").write_bytes(b"moments")
    return run_dir.folder


def test_without_two_checkpoints_or_the_whole_journal_it_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no checkpoint"):
        repeat_steps(run_with(tmp_path / "none"), print)
    with pytest.raises(RunError, match=r"with checkpoint.keep=2 there are two"):
        repeat_steps(run_with(tmp_path / "one", 3), print)


@pytest.mark.parametrize("damaged", ["step_2/state/moments", "step_5/hf/weights"])
def test_a_damaged_checkpoint_is_named_before_anything_starts(damaged: str, tmp_path: Path) -> None:
    run = run_with(tmp_path, 2, 5)
    (run / "checkpoints" / damaged).write_bytes(b"other..")
    with pytest.raises(CheckpointError, match=damaged.partition("/")[0] + ": damaged"):
        repeat_steps(run, print)
