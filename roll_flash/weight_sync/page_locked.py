"""Page-locked memory of the host: a GPU copies from and to it by itself, several times as fast as from other memory.

torch can allocate such memory, but rounds each piece up to a power of two, and cannot lock memory that is shared with
other processes. So memory is mapped here and then registered with CUDA. Where that fails it serves all the same.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def page_lock(memory: Tensor) -> bool:
    """Lock memory that begins at a page. Takes about a second for some GB. Returns false, and warns, if impossible."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code == 0:
        return True
    _log.warning("CUDA cannot lock %d bytes of memory (error %d): weights are copied more slowly", memory.nbytes, code)
    with suppress(RuntimeError):  # the next operation would report, and so clear, the error: not one that matters
        torch.zeros(1, device="cuda")
    return False


def unlock(address: int) -> None:
    """Unlock the memory that begins at `address`; it must still be mapped."""
    torch.cuda.cudart().cudaHostUnregister(address)


def page_locked_like(described: Tensor) -> Tensor:
    """Return a locked tensor of the host with the shape, strides and dtype of `described`."""
    last = sum((size - 1) * stride for size, stride in zip(described.shape, described.stride(), strict=True))
    area = mmap.mmap(-1, (last + 1) * described.itemsize)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    if page_lock(memory):
        weakref.finalize(area, unlock, memory.data_ptr()).atexit = False  # the driver unlocks all when a process ends
    return memory.view(described.dtype).as_strided(described.size(), described.stride())
