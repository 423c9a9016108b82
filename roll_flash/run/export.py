"""From a checkpoint to a model folder that anything loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll_flash.errors import CheckpointError, ConfigError
from roll_flash.run.run_dir import Checkpoint, find_checkpoint


def export_checkpoint(reference: str, target: str) -> tuple[Checkpoint, Path]:
    """Copy the Hugging Face folder of `RUN[@step]` to `target`, which appears only when all of it is there.

    Raises ConfigError for an unknown run or a folder with something in it, CheckpointError for one without a model.
    """
    checkpoint = find_checkpoint(reference)
    folder = Path(target).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty; choose another folder")
    if not (checkpoint.hf / "config.json").is_file():
        raise CheckpointError(f"{checkpoint.folder}: holds no model folder hf/; export another step")
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint.hf, partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{folder}: could not be written: {error}") from error
    return checkpoint, folder
