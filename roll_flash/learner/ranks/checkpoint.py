"""Writes and reads complete, atomic checkpoints of the training state, at any world size.

A checkpoint is a folder: torch.distributed.checkpoint files (weights and optimizer, sharded), the random state of each
rank, and `learner.json`, written last, which lists every file with its size. A folder without it, or with files that
differ from it, is incomplete. Each folder is written as a temporary sibling and then renamed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import pickle
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
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

from roll_flash.checked_files import Count, decode, read_checked
from roll_flash.errors import CheckpointError
from roll_flash.learner.ranks.weight_average import WeightAverage
from roll_flash.processes.background import begin_in_background, in_thread
from roll_flash.run.files import sync

MANIFEST = "learner.json"
_AVERAGE = "average"
_FORMAT = 1


@contextmanager
def new_folder(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling folder, which is synced to disk and renamed to `folder` when the block ends.

    After an error the temporary folder is removed. Raises CheckpointError if `folder` exists (unless `replaces`) or
    cannot be written.
    """
    if folder.exists() and not replaces:
        raise CheckpointError(f"{folder}: exists already; choose a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if partial.exists():  # left by a process that was killed while writing
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)


class Manifest(msgspec.Struct):
    """What `write_manifest` wrote, as far as it is read."""

    format: int
    model: str = ""
    version: Count = 0
    entropy_weight: float | None = None
    entropy_applies: bool = True
    """State of `EntropyControl`; none in checkpoints of older versions."""
    files: dict[str, Count] = {}


def write_manifest(folder: Path, metadata: dict[str, Any]) -> None:
    """Write the list of files with their sizes. Must be the last write to the folder."""
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    head = {"format": _FORMAT, "id": secrets.token_hex(16), **metadata}
    (folder / MANIFEST).write_text(json.dumps({**head, "files": files}, indent=1))


def read_manifest(folder: Path, model_fingerprint: str) -> Manifest:
    """Return the metadata of a complete checkpoint of this model. Raises CheckpointError for any mismatch."""
    try:
        manifest = decode(read_checked(folder / MANIFEST), Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a complete checkpoint (no {MANIFEST}); use an older one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error}; use an older checkpoint") from None
    if manifest.format != _FORMAT:
        raise CheckpointError(f"{folder}: format {manifest.format}, this version reads {_FORMAT}")
    if manifest.model != model_fingerprint:
        raise CheckpointError(f"{folder}: written for another model; set model.path to the one it was made from")
    for name, size in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} of {size} bytes"
            raise CheckpointError(f"{path}: truncated or missing ({state}); use an older checkpoint")
    return manifest


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


_POLL_S = 0.1
"""Interval in seconds between two checks that all files are written."""


async def write_in_background(
    folder: Path,
    *,
    folders_of_ranks: Callable[[Path], AbstractAsyncContextManager[Sequence[Path]]],
    begin: Callable[[Sequence[Path]], Awaitable[Any]],
    has_written: Callable[[Sequence[Path]], Awaitable[bool]],
    timeout_s: float,
    replaces: bool = False,
    manifest: dict[str, Any] | None = None,
) -> asyncio.Task[None]:
    """Return a task once `begin` has copied the data to write; the task ends when `folder` is complete.

    `folders_of_ranks` gives each rank the folder that it writes into, and collects their files in the end.

    `manifest` is the metadata of a checkpoint, written last. Raises CheckpointError, here or from the task, if the
    folder cannot be written or `timeout_s` expires, and any error of `begin` and `has_written`; no files remain then.
    """

    async def write(copied: asyncio.Event) -> None:
        async with in_thread(new_folder(folder, replaces=replaces)) as partial:
            try:
                async with asyncio.timeout(timeout_s), folders_of_ranks(partial) as folders:
                    await begin(folders)
                    copied.set()
                    while not await has_written(folders):  # noqa: ASYNC110 - another process writes and sets no event here
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                message = f"{folder}: not written within {timeout_s:g} s (learner.step_timeout_s)"
                raise CheckpointError(message) from None
            if manifest is not None:
                await asyncio.to_thread(write_manifest, partial, manifest)

    return await begin_in_background(write)


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
