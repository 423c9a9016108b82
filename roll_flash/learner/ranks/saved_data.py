"""Reads torch's distributed checkpoints as data: nothing that lies in a checkpoint is ever run.

torch reads the list of a checkpoint's tensors, and what in it is no tensor, with an unpickler that calls whatever the
file names. A run folder may come from somebody else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

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


class DataReader(FileSystemReader):
    """Raises UnpicklingError, which torch.distributed.checkpoint passes on as CheckpointException."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)

    def read_metadata(self, *_: Any, **options: Any) -> Metadata:
        path = self._get_metadata_path(options.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class DataPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """What was read as data goes on as bytes anew: torch's own planner reads those as a program."""
        anew = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), anew)
        anew.seek(0)
        super().load_bytes(read_item, anew)
