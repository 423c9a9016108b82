"""Python's garbage collector in processes with hundreds of thousands of objects that live as long as they do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 10_000
"""With Python's default of 700 the collector scans all running episodes many times per second."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude what exists now (the 500,000 objects of the libraries) from collections, and make them less frequent."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
