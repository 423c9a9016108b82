"""`roll-flash verify --repeat`: repeat recorded steps with a learner of its own, and compare the weights.

The learner begins at the checkpoint before the newest one, or, without one, at the model that the run began with, and
trains the micro-batches that the journal has, as `--resume` does. It must come to the model of the newest checkpoint:
bit by bit on a CPU; on GPUs sums are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from roll_flash.config.tree import Config, load_config
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import CheckpointError, RunError
from roll_flash.learner.open import open_learner
from roll_flash.models.prepare import resolve_model
from roll_flash.processes.background import cancel_on_failure, first_failure
from roll_flash.processes.interrupt import run_to_end
from roll_flash.run.config_changes import changed_keys
from roll_flash.run.journal import journal_files
from roll_flash.run.run_dir import Checkpoint, list_checkpoints, require_undamaged
from roll_flash.run.verify import SHOWN, Finding
from roll_flash.sandboxes.scratch import scratch_folder
from roll_flash.system.resume import restore_learner
from roll_flash.system.system import open_models

_OF_THE_LEARNER = ("learner.", "model.", "rollout.temperature", "scheduler.groups_per_step", "steps")
"""Begin of the names of keys on which the weights after a recorded step may depend."""


def repeat_steps(folder: Path, note: Callable[[str], None]) -> Finding:
    """Repeat the steps of a run up to its newest checkpoint. Raises RunError if it has none, or no place to begin;
    CheckpointError for a damaged one; LearnerError for a step that cannot be repeated."""
    config = load_config(folder / "config.yaml")
    first, last = _stretch(config, folder)
    require_undamaged(last.hf)
    if first is not None:
        require_undamaged(first.state)
    model_folder = resolve_model(config.model.path, config.model.revision)
    learner = open_learner(config, model_folder=model_folder)
    with scratch_folder("repeat") as scratch:
        repeated = scratch / "hf"
        run_to_end(_train_again(config, folder, first, last.step, model_folder, learner, repeated, note))
        differences = compare_models(last.hf, repeated)
    begin = f"checkpoint {first.step}" if first is not None else "the model"
    if not differences:
        return Finding("repeated", True, f"the steps after {begin} lead to checkpoint {last.step}, bit by bit")
    shown = ", ".join(differences[:SHOWN]) + (" ..." if len(differences) > SHOWN else "")
    detail = f"the steps after {begin} lead to other weights than those of checkpoint {last.step}"
    return Finding(
        "repeated", False, f"{detail}: {len(differences)} tensors differ: {shown}{_of_a_resume(config, folder)}"
    )


def _of_a_resume(config: Config, folder: Path) -> str:
    """Name what resumes have changed of the learner: the steps before were trained with the old values."""
    before = [load_config(path) for path in sorted(folder.glob("config.yaml.bak*"))]
    lines = dict.fromkeys(line for each in before for line in changed_keys(each, config))
    changes = [line for line in lines if line.startswith(_OF_THE_LEARNER)]
    return f"; the run was resumed with other settings, which may be why: {', '.join(changes)}" if changes else ""


def _stretch(config: Config, folder: Path) -> tuple[Checkpoint | None, Checkpoint]:
    """Return the checkpoint at which to begin (None: the model) and the one to come to."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise RunError(f"{folder}: has no checkpoint with which repeated steps could be compared")
    if len(checkpoints) > 1:
        return checkpoints[-2], checkpoints[-1]
    if config.warm_start is not None or 0 not in journal_files(folder / "journal"):
        raise RunError(
            f"{folder}: has one checkpoint, and its steps cannot be repeated from the model (a warm start came first, "
            "or the begin of the journal was removed); with checkpoint.keep=2 there are two"
        )
    return None, checkpoints[-1]


async def _train_again(
    config: Config,
    folder: Path,
    first: Checkpoint | None,
    until: int,
    model_folder: Path,
    learner: LearnerEngine,
    target: Path,
    note: Callable[[str], None],
) -> None:
    """Write the model after the step `until` to `target`."""
    with first_failure() as failure:
        opening = open_models(config, model_folder, learner, serves=False, logs=target.parent, note=note)
        async with opening, cancel_on_failure(failure):
            await restore_learner(config, folder, first, learner, note, until=until)
            if learner.version != until:
                raise RunError(f"{folder}: the journal leads to step {learner.version}, not to checkpoint {until}")
            await (await learner.begin_export(target))


def compare_models(one: Path, other: Path) -> list[str]:
    """Name the tensors in which two model folders differ, each with its largest difference. Raises CheckpointError if
    they have different ones."""
    left, right = _places(one), _places(other)
    if left.keys() != right.keys():
        names = ", ".join(sorted(left.keys() ^ right.keys())[:SHOWN])
        raise CheckpointError(f"{one}: is another model than the repeated one: only one of them has {names}")
    found = []
    for name in sorted(left):
        mine, theirs = _read(left[name], name), _read(right[name], name)
        if not (mine.dtype == theirs.dtype and torch.equal(mine, theirs)):
            worst = (mine.double() - theirs.double()).abs().max().item() if mine.shape == theirs.shape else float("inf")
            found.append(f"{name} by at most {worst:.2g}")
    return found


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    places: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(str(path), framework="pt", device="cpu") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor
