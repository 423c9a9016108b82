"""The LoRA adapter of a checkpoint, alone, as a folder of PEFT."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from roll_flash.config.tree import load_config
from roll_flash.errors import CheckpointError, ConfigError, first_line
from roll_flash.learner.ranks.checkpoint import SafePlanner, SafeReader
from roll_flash.learner.ranks.checkpoint_folder import new_folder
from roll_flash.models.adapter import write_adapter
from roll_flash.run.run_dir import Checkpoint, find_checkpoint, require_new, require_undamaged

_PREFIX, _A, _B = "model.model.", ".lora_a", ".lora_b"
"""Names in a checkpoint: the state of the learner's module, whose `model` is that of transformers."""


def export_adapter(reference: str, target: str) -> tuple[Checkpoint, Path]:
    """Write the adapter of `RUN[@step]` to the new folder `target`, in float32 as it was trained.

    Raises ConfigError for an unknown run, a run without adapters or a folder that is not empty, CheckpointError for a
    checkpoint that cannot be read.
    """
    checkpoint, folder = find_checkpoint(reference), require_new(target)
    config = load_config(checkpoint.folder.parent.parent / "config.yaml")
    if not config.learner.lora.rank:
        raise ConfigError(
            f"{reference}: the run trained all weights (learner.lora.rank=0); export it without --adapter"
        )
    require_undamaged(checkpoint.state)
    factors = _factors(checkpoint.state)
    base = Path(config.model.path).expanduser()
    name = str(base.resolve()) if base.exists() else config.model.path
    with new_folder(folder, replaces=True) as partial:
        write_adapter(partial, factors, alpha=config.learner.lora.alpha, base=name, revision=config.model.revision)
    return checkpoint, folder


def _factors(state: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, in] and B [out, rank] by the name of their layer; nothing else of the checkpoint is read."""
    try:
        stored = SafeReader(state).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in stored.items()
            if isinstance(about, TensorStorageMetadata) and name.startswith(_PREFIX) and name.endswith((_A, _B))
        }
        dcp.load(tensors, storage_reader=SafeReader(state), planner=SafePlanner(), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{state}: cannot be read: {first_line(error)}; use another step") from None
    layers = sorted(name.removesuffix(_A) for name in tensors if name.endswith(_A))
    if not layers:
        raise CheckpointError(f"{state}: holds no adapter; use another step")
    return {layer.removeprefix(_PREFIX): (tensors[layer + _A], tensors[layer + _B]) for layer in layers}
