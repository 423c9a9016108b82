"""Reads the file of W&B's offline mode: blocks of LevelDB's log format, with W&B's protocol buffers in them.

wandb 0.31 has no reader in Python (its program `wandb-core` reads them, to send them). The messages are decoded by
wandb's own classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def read_records(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(record) for record in _records(file.read_bytes())]


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    place, parts = HEADER, b""
    while place < len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:  # padding at the end of a block
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        part = content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
