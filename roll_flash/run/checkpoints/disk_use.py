"""Disk that the checkpoints of a run take, known before it starts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from roll_flash.checked_files import MAX_FILE_BYTES, decode, open_checked
from roll_flash.config.tree import Config
from roll_flash.errors import RunError

_MODEL, _WEIGHTS, _MOMENTS = 4, 4, 4 + 4
"""Bytes per parameter, in float32: in the model folder; weights and two moments of AdamW in the learner's state."""


def checkpoint_bytes(config: Config, model_folder: Path) -> int:
    """Estimate the size of one checkpoint in bytes. With adapters it is that of the model folder: they are small beside
    it, and the learner's state leaves out the frozen weights."""
    per_parameter = _MODEL if config.learner.lora.rank else _MODEL + _WEIGHTS + _MOMENTS
    return per_parameter * _count_parameters(model_folder)


def check_disk(config: Config, model_folder: Path, *, existing: int = 0) -> str:
    """Return a line about the disk that a run will take; `existing` is the number of checkpoints that are there.

    Raises RunError if there is no room for the newest and the one that replaces it.
    """
    each, policy = checkpoint_bytes(config, model_folder), config.checkpoint
    kept = policy.keep + (config.steps // policy.keep_every if policy.keep_every else 0)
    place = next(path for path in (config.run_folder, *config.run_folder.absolute().parents) if path.exists())
    free, missing = shutil.disk_usage(place).free, max(2 - existing, 1)
    if free < missing * each:
        raise RunError(
            f"{config.run_folder}: checkpoints take about {_gib(each)} each, and the newest stays until the next is "
            f"complete: {_gib(missing * each)} are needed on this disk but only {_gib(free)} are free; "
            "free some or set `runs` to a folder on another disk"
        )
    more, when = (
        (2, "two more while they are written and copied") if policy.copy_to else (1, "one more while it is written")
    )
    limit = config.monitor.episodes_gib
    episodes = "without a limit (monitor.episodes_gib)" if limit is None else f"up to {limit:g} GiB"
    return (
        f"checkpoints take about {_gib(each)} each; up to {kept} kept, and {when}: "
        f"{_gib((kept + more) * each)}; episodes and journal {episodes}; {_gib(free)} are free on this disk"
    )


def _count_parameters(model_folder: Path) -> int:
    """Count the elements of all tensors in a folder's safetensors files, by their headers."""
    count = 0
    for path in model_folder.glob("*.safetensors"):
        with open_checked(path) as file:
            header = decode(file.read(min(int.from_bytes(file.read(8), "little"), MAX_FILE_BYTES)))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
