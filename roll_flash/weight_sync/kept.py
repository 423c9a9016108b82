"""The newest published weights, kept for a server that must be started again."""

from __future__ import annotations

import os
from dataclasses import replace

from roll_flash.engines.inference import StagedWeights

CHUNK_BYTES = 64 * 2**20


class KeptWeights:
    """A copy of our own in anonymous shared memory, because the publisher uses its memory again.

    It has no name in any file system: the kernel frees it when this process ends, however it ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.weights: StagedWeights | None = None
        """What is kept, under a path that other processes of this machine can open."""

    def keep(self, weights: StagedWeights) -> None:
        """Copy `weights` in place of what was kept. Raises OSError if they cannot be read."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("roll-flash-newest")
        self.weights = None
        with open(weights.path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            os.truncate(self._descriptor, size)
            done = 0
            while done < size:
                os.lseek(self._descriptor, done, os.SEEK_SET)
                done += os.sendfile(self._descriptor, source.fileno(), done, min(CHUNK_BYTES, size - done))
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.weights = replace(weights, path=path)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.weights = None
