"""One shard of the stream's data, as a Ray actor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.errors import StreamError
from roll_flash.stream.blocks import decode_block, encode_block
from roll_flash.stream.rows import Array

WRITE, RELEASE = b"w", b"r"


def write_message(block: bytes) -> bytes:
    return WRITE + block


def release_message(row_ids: Sequence[int]) -> bytes:
    return RELEASE + json.dumps(list(row_ids)).encode()


class StoreShard:
    """Calls carry `bytes` only, which Ray moves without pickling; several changes travel in one call."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Array]] = {}
        self._bytes = 0

    def apply(self, *messages: bytes) -> None:
        """Writes and releases, in this order."""
        for message in messages:
            if message[:1] == WRITE:
                self._write(message)
            else:
                self._release(json.loads(message[1:]))

    def get(self, request: bytes) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
        """One block for each of the lists of rows that are asked for; the block itself where there is one list.

        Replies are arrays and not `bytes`, so that who reads them on this node reads them in place.
        """
        wanted = json.loads(request)
        blocks = [self._block(row_ids, wanted["columns"]) for row_ids in wanted["rows"]]
        return blocks[0] if len(blocks) == 1 else blocks

    def _block(self, row_ids: Sequence[int], columns: Sequence[str]) -> NDArray[np.uint8]:
        for row_id in row_ids:
            if lacking := [column for column in columns if column not in self._rows.get(row_id, {})]:
                raise StreamError(f"row {row_id} has no column {lacking[0]!r} in the store")
        return np.frombuffer(encode_block(row_ids, [self._rows[row_id] for row_id in row_ids], columns), np.uint8)

    def stats(self) -> tuple[int, int]:
        return len(self._rows), self._bytes

    def _write(self, message: bytes) -> None:
        # A copy that is aligned, and that does not keep the other messages of the call alive.
        block = np.frombuffer(message, np.uint8)[1:].copy()
        block.flags.writeable = False
        for row_id, columns in zip(*decode_block(block), strict=True):
            row = self._rows.setdefault(row_id, {})
            for name, array in columns.items():
                self._bytes += array.nbytes - (row[name].nbytes if name in row else 0)
                row[name] = array

    def _release(self, row_ids: Sequence[Any]) -> None:
        for row_id in row_ids:
            self._bytes -= sum(array.nbytes for array in self._rows.pop(row_id, {}).values())
