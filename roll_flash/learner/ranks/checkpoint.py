"""Writes and reads the training state of a checkpoint, at any world size.

It is files of torch.distributed.checkpoint (trained weights and optimizer, sharded) and random states of ranks, in a
folder of `run/checkpoints/folder.py`. Frozen weights are those of `model.path`; the manifest has a digest of them.
The LoRA adapter of a checkpoint can be exported alone, as a folder of PEFT.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Collection
from concurrent.futures import Future
from enum import Enum, EnumMeta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from roll_flash.config.tree import load_config
from roll_flash.errors import CheckpointError, ConfigError, first_line
from roll_flash.learner.model.weight_files import local_part
from roll_flash.learner.ranks.optimizer import WeightAverage
from roll_flash.models.adapter import write_adapter
from roll_flash.run.checkpoints.folder import new_folder
from roll_flash.run.run_dir import Checkpoint, find_checkpoint, require_new, require_undamaged

FULL_BYTES = 16 << 20
"""A disk with less than this is called full when a write has failed."""
_AVERAGE, _MODEL = "average", "model."


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all state names and shapes; equal digests mean that a state can be loaded."""
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


@torch.no_grad()
def digest_of_frozen(model: nn.Module, shards: dist.ProcessGroup) -> str:
    """Return a digest of the frozen weights, equal for any number of ranks and for float32 and bfloat16; empty without
    any. A collective of the ranks that together hold a whole model."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    if not frozen:
        return ""
    # Whole numbers: their sum is the same in any order.
    parts = [
        local_part(each).to(torch.bfloat16).flatten().view(torch.int16).sum(dtype=torch.int64)
        for each in frozen.values()
    ]
    sums = torch.stack(parts)
    dist.all_reduce(sums, group=shards)
    return hashlib.sha256(json.dumps([sorted(frozen), sums.tolist()]).encode()).hexdigest()[:16]


def _trained(weights: dict[str, Any], model: nn.Module, kept: Collection[str] = ()) -> dict[str, Any]:
    """Leave out the weights that no step changes, unless they are `kept`."""
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, each in parameters if not each.requires_grad and name not in kept}
    assert frozen <= weights.keys(), "a state has the names of its model"
    return {name: tensor for name, tensor in weights.items() if name not in frozen}


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
        trained = _trained(weights, model)
        state = {"model": trained, "optimizer": moments} | ({} if average is None else {_AVERAGE: average.state()})
        started = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_why_not(error, folder)}") from None
    assert isinstance(started, Future)
    return started


def finish_write(folder: Path, writing: Future[Any]) -> None:
    """Wait for the background write. Raises CheckpointError if it failed."""
    try:
        writing.result()
    except (CheckpointException, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {_why_not(error, folder)}") from None


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    average: WeightAverage | None = None,
) -> None:
    """Load a checkpoint of `begin_write` at any world size; a rank without a saved random state keeps its own.

    Only the moments of the optimizer are loaded: weight decay and betas come from the current config. An average that
    the checkpoint does not have begins with its weights. Frozen weights stay as they are, unless it has them.
    """
    weights, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"optimizer": {"state": optimizer_state["state"]}}
    random_file = folder / f"random-{rank}.pt"
    try:
        stored = SafeReader(folder).read_metadata().state_dict_metadata
        kept = {name.removeprefix(_MODEL) for name in stored if name.startswith(_MODEL)}
        state["model"] = _trained(weights, model, kept)
        if average is not None and any(name.startswith(f"{_AVERAGE}.") for name in stored):
            state[_AVERAGE] = average.state()
        dcp.load(state, storage_reader=SafeReader(folder), planner=SafePlanner())
        random_state = torch.load(random_file, weights_only=True) if random_file.exists() else None
    except (CheckpointException, OSError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {_last_line(error)}; use an older checkpoint") from None
    moments = {**optimizer_state, **state["optimizer"]}
    options = StateDictOptions(strict=len(state["model"]) == len(weights))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=moments, options=options)
    if average is not None and _AVERAGE not in state:
        average.restart()
    if random_state is not None:
        torch.set_rng_state(random_state["cpu"])
        if torch.cuda.is_available() and random_state["cuda"]:
            torch.cuda.set_rng_state_all(random_state["cuda"])


def _why_not(error: BaseException, folder: Path) -> str:
    """On a full disk torch reports a wrong position in the file, so say how little is left."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = FULL_BYTES
    left = f"; its disk is full ({free / 2**20:.1f} MiB left): free some" if free < FULL_BYTES else ""
    return _last_line(error) + left


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


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an Enum. Python 3.11.2 pickles one as a call of `getattr`."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return cast(Enum, kind.__members__[name])
    raise pickle.UnpicklingError(f"it names {name!r} of {kind!r}, which has no place in a checkpoint")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
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
