"""Complete, atomic checkpoints of the training state, readable at another world size.

A checkpoint is a folder: torch.distributed.checkpoint files (weights and optimizer, sharded), the random state of each
rank, and `learner.json`, written last, which names every file with its size. A folder without it, or whose files
differ from it, is incomplete. Folders are written beside their place and renamed into it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from roll_flash.errors import CheckpointError
from roll_flash.learner.ranks.saved_data import DataPlanner, DataReader

_MANIFEST = "learner.json"
_FORMAT = 1


@contextmanager
def new_folder(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Gives a sibling folder to write into, which takes the name `folder` at once and durably when the block ends.

    After an error nothing is left of it. Raises CheckpointError if `folder` exists (unless it `replaces` it) or the
    disk says no.
    """
    if folder.exists() and not replaces:
        raise CheckpointError(f"{folder}: exists already; choose a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if partial.exists():  # of a process that was killed while writing
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            _fsync(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _fsync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def write_manifest(folder: Path, metadata: dict[str, Any]) -> None:
    """List the files that are there, with their sizes. The last thing to be written."""
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, **metadata, "files": files}, indent=1))


def read_manifest(folder: Path, model_fingerprint: str) -> dict[str, Any]:
    """Metadata of a complete checkpoint of this model. Raises CheckpointError saying what is wrong."""
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a complete checkpoint (no {_MANIFEST}); use an older one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _MANIFEST}: cannot be read: {error}; use an older checkpoint") from None
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{folder}: format {manifest.get('format')}, this version reads {_FORMAT}")
    if manifest["model"] != model_fingerprint:
        raise CheckpointError(f"{folder}: written for another model; set model.path to the one it was made from")
    for name, size in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} of {size} bytes"
            raise CheckpointError(f"{path}: truncated or missing ({state}); use an older checkpoint")
    return manifest


def fingerprint(model: nn.Module) -> str:
    """A digest of all parameter names and shapes: equal exactly if a state fits."""
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def begin_write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, group: dist.ProcessGroup
) -> Future[Any]:
    """Copy this rank's shard of weights and optimizer aside, and write it in the background. A collective.

    When it returns, steps may go on. `group` serves the background alone. `finish_write` says how it went.
    """
    weights, moments = get_state_dict(model, optimizer)
    random_state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    try:
        torch.save(random_state, folder / f"random-{rank}.pt")
        started = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_last_line(error)}") from None
    assert isinstance(started, Future)
    return started


def finish_write(folder: Path, writing: Future[Any]) -> None:
    """Wait for the background to have written. Raises CheckpointError if it could not."""
    try:
        writing.result()
    except (CheckpointException, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_last_line(error)}") from None


def read_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Read what `begin_write` wrote, at any world size; a rank that did not exist then keeps its random state.

    Of the optimizer its moments are read. Weight decay and betas are those of the config, which may be another now.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": {"state": optimizer_state["state"]}}
    random_file = folder / f"random-{rank}.pt"
    try:
        dcp.load(state, storage_reader=DataReader(folder), planner=DataPlanner())
        random_state = torch.load(random_file, weights_only=True) if random_file.exists() else None
    except (CheckpointException, OSError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {_last_line(error)}; use an older checkpoint") from None
    moments = {**optimizer_state, **state["optimizer"]}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=moments)
    if random_state is not None:
        torch.set_rng_state(random_state["cpu"])
        if torch.cuda.is_available() and random_state["cuda"]:
            torch.cuda.set_rng_state_all(random_state["cuda"])


def _last_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
