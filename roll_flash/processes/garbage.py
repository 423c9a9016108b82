"""Memory of processes that run for days: Python's garbage collector, and the C library's allocator."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 10_000
"""With Python's default of 700 the collector scans all running episodes many times per second."""
LARGE_BYTES = 1 << 17
"""The C library starts with this threshold, and raises it to the size of each larger block that is freed."""
_M_MMAP_THRESHOLD = -3
"""Of `malloc.h`."""


@contextmanager
def long_lived_process() -> Iterator[None]:
    """Exclude what exists now (the 500,000 objects of the libraries) from collections, make them less frequent, and
    return large blocks at once. Not for processes that compute: they use large blocks again and again."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
    return_large_blocks()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def return_large_blocks() -> None:
    """From now on memory of LARGE_BYTES and more goes back to the system when it is freed. Does nothing where the C
    library has no `mallopt`.

    Each actor call of Ray takes 1 MiB and 256 KiB for a message of some bytes (msgpack's buffers), in many threads.
    Kept for the next call and cut up by small objects meanwhile, they made a driver grow by 35 MiB in 1,000 steps.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def return_free_memory() -> None:
    """Give memory that the C library keeps free back to the system. Does nothing where it has no `malloc_trim`.

    What a learner has in use is the same after each step, but its free blocks are cut up in other ways each time: one
    with a tiny model grew by 4 MiB in 1,000 steps.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
