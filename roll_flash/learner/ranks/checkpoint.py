"""Writes and reads the training state of a checkpoint, at any world size.

It is files of torch.distributed.checkpoint (weights and optimizer, sharded) and the random state of each rank, in a
folder of `checkpoint_folder.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from concurrent.futures import Future
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from roll_flash.errors import CheckpointError
from roll_flash.learner.ranks.weight_average import WeightAverage

_AVERAGE = "average"


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all state names and shapes; equal digests mean that a state can be loaded."""
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


def begin_write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    rank: int,
    group: dist.ProcessGroup,
) -> Future[Any]:
    """Copy this rank's shard of weights, optimizer and average and write it in the background. A collective.

    After it returns, training may continue. `group` is used only by the background write. `finish_write` reports
    errors.
    """
    weights, moments = get_state_dict(model, optimizer)
    random_state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    try:
        torch.save(random_state, folder / f"random-{rank}.pt")
        state = {"model": weights, "optimizer": moments} | ({} if average is None else {_AVERAGE: average.state()})
        started = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_last_line(error)}") from None
    assert isinstance(started, Future)
    return started


def finish_write(folder: Path, writing: Future[Any]) -> None:
    """Wait for the background write. Raises CheckpointError if it failed."""
    try:
        writing.result()
    except (CheckpointException, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_last_line(error)}") from None


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    average: WeightAverage | None = None,
) -> None:
    """Load a checkpoint of `begin_write` at any world size; a rank without a saved random state keeps its own.

    Only the moments of the optimizer are loaded: weight decay and betas come from the current config. An average that
    the checkpoint does not have begins with its weights.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": {"state": optimizer_state["state"]}}
    random_file = folder / f"random-{rank}.pt"
    try:
        if average is not None and _has_average(folder):
            state[_AVERAGE] = average.state()
        dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner())
        random_state = torch.load(random_file, weights_only=True) if random_file.exists() else None
    except (CheckpointException, OSError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {_last_line(error)}; use an older checkpoint") from None
    moments = {**optimizer_state, **state["optimizer"]}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=moments)
    if average is not None and _AVERAGE not in state:
        average.restart()
    if random_state is not None:
        torch.set_rng_state(random_state["cpu"])
        if torch.cuda.is_available() and random_state["cuda"]:
            torch.cuda.set_rng_state_all(random_state["cuda"])


def _has_average(folder: Path) -> bool:
    return any(name.startswith(f"{_AVERAGE}.") for name in SafeReader(folder).read_metadata().state_dict_metadata)


def _last_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _KNOWN or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint")


class SafeReader(FileSystemReader):
    """Reads checkpoint metadata with a restricted unpickler.

    Raises UnpicklingError, which torch.distributed.checkpoint converts to CheckpointException.
    """

    def read_metadata(self, *_: Any, **options: Any) -> Metadata:
        path = self._get_metadata_path(options.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load with `weights_only`, then serialise again for torch's own planner, whose unpickling can run code."""
        anew = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), anew)
        anew.seek(0)
        super().load_bytes(read_item, anew)
