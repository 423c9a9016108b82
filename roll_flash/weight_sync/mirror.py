"""Copies of published weights in the memory of one node, for the servers there.

The learner reuses its own memory for the next version. A mirror keeps the newest published weights, for servers that
are started again, and on a node without the learner it is what servers load from. There it takes over only the blocks
that changed; each block that arrives is checked against the hash that the source computed, so that the copy is exact.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError

BLOCK_BYTES = 2**20
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Blocks:
    """Size in bytes of a weights file and the hash of each of its blocks; the last one may be shorter."""

    size: int
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, path: str) -> Blocks:
        """Read a file. Raises OSError."""
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            view = memoryview(memory)
            try:
                hashes = tuple(_hash(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES))
                return cls(len(view), hashes)
            finally:
                view.release()


def read_blocks(path: str, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Return the blocks `numbers` of a file, mapped from it: Ray copies them once, into its store. Raises OSError."""
    file = np.memmap(path, np.uint8, mode="r")
    return [np.asarray(file[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]) for number in numbers]


class WeightMirror:
    """One version of the weights in anonymous shared memory.

    It has no name in any file system: the kernel frees it when this process ends, even after a crash.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._blocks = Blocks(0, ())
        """What is here; blocks that are not yet exact have an empty hash."""
        self.weights: StagedWeights | None = None
        """The kept weights, with a path that other processes of this node can open; None if they are incomplete."""

    @property
    def path(self) -> str:
        """Path by which processes of this node open the mirror; blocks that have not arrived are not exact."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def keep(self, weights: StagedWeights) -> StagedWeights:
        """Copy weights of this node, replacing the earlier copy. Raises OSError if they cannot be read."""
        self._blocks = Blocks(0, ())
        with open(weights.path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            descriptor = self._resized(size)
            done = 0
            while done < size:
                os.lseek(descriptor, done, os.SEEK_SET)
                done += os.sendfile(descriptor, source.fileno(), done, min(CHUNK_BYTES, size - done))
        return self._complete(weights)

    def begin(self, blocks: Blocks) -> list[int]:
        """Return the numbers of the blocks that are missing here. Until `finish`, no server may read the mirror."""
        self._resized(blocks.size)
        here = self._blocks.hashes if self._blocks.size == blocks.size else ()
        missing = [number for number, found in enumerate(blocks.hashes) if here[number : number + 1] != (found,)]
        lacking = set(missing)
        kept = tuple(b"" if number in lacking else found for number, found in enumerate(blocks.hashes))
        self._wanted, self._blocks = blocks, Blocks(blocks.size, kept)
        return missing

    def write(self, numbers: Sequence[int], blocks: Sequence[NDArray[np.uint8]]) -> None:
        """Write blocks that arrived. Raises InferenceError if one differs from the block at its source."""
        assert self._descriptor is not None, "begin() comes first"
        for number, block in zip(numbers, blocks, strict=True):
            if _hash(block.data) != self._wanted.hashes[number]:
                raise InferenceError(f"block {number} of the weights did not arrive as it was sent")
            if self._blocks.hashes[number] != self._wanted.hashes[number]:
                os.pwrite(self._descriptor, block.data, number * BLOCK_BYTES)
        with self._lock:
            hashes = list(self._blocks.hashes)
            for number in numbers:
                hashes[number] = self._wanted.hashes[number]
            self._blocks = Blocks(self._blocks.size, tuple(hashes))

    def finish(self, weights: StagedWeights) -> StagedWeights:
        """Return `weights` as they are here. Raises InferenceError if blocks are missing."""
        if self._blocks != self._wanted:
            raise InferenceError(f"version {weights.version} of the weights did not arrive whole")
        return self._complete(weights)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.weights = None

    def _resized(self, size: int) -> int:
        self.weights = None
        if self._descriptor is None:
            self._descriptor = os.memfd_create("roll-flash-newest")
        os.truncate(self._descriptor, size)
        return self._descriptor

    def _complete(self, weights: StagedWeights) -> StagedWeights:
        self.weights = replace(weights, path=self.path)
        return self.weights


def _hash(block: memoryview) -> bytes:
    return blake3(block).digest(16)
