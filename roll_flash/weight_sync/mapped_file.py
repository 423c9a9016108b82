"""Reads tensors of a safetensors file from memory that it is mapped into.

safetensors 0.8 checks and lists a file without a trace, but keeps two Python objects for good with each tensor that it
reads: a server that gets new weights for days would grow.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct

import torch
from torch import Tensor

from roll_flash.weight_sync.page_locked import page_lock, unlock

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in the safetensors format."""


class MappedFile:
    """A safetensors file that safetensors has opened before, so that it is known to be intact."""

    def __init__(self, path: str, *, locked: bool = False) -> None:
        """`locked`: in page-locked memory until it is closed; the file must be writable. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR if locked else os.O_RDONLY)  # CUDA locks only memory that it may write
        try:
            area = mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if locked else mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        self._memory = torch.frombuffer(area, dtype=torch.uint8)
        (length,) = struct.unpack("<Q", area[:8])
        self._first = 8 + length
        self._entries = json.loads(area[8 : self._first])
        self.metadata: dict[str, str] = self._entries.get("__metadata__", {})
        self.is_locked = locked and page_lock(self._memory)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, a view of the file where its place allows that; valid until the file is closed."""
        entry = self._entries[name]
        dtype, begin = DTYPES[entry["dtype"]], self._first + entry["data_offsets"][0]
        values = self._memory[begin : begin + math.prod(entry["shape"]) * dtype.itemsize]
        aligned = values if begin % dtype.itemsize == 0 else values.clone()
        return aligned.view(dtype).view(entry["shape"])

    def close(self) -> None:
        if self.is_locked:
            unlock(self._memory.data_ptr())
            self.is_locked = False
