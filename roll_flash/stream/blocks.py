"""Rows as one flat buffer: a short JSON header, then every array's bytes. No Python object is pickled on its way.

Layout: 8 bytes little-endian header length, the header, then each array at a multiple of 8 bytes. The header is
`{"rows": [ids], "columns": [names], "cells": [[dtype, shape] per row and column]}`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.stream.rows import Array, Columns, read_only

_ALIGNMENT = 8


def encode_block(row_ids: Sequence[int], rows: Sequence[Columns], columns: Sequence[str]) -> bytes:
    """The named columns of rows."""
    arrays = [row[column] for row in rows for column in columns]
    header = {
        "rows": list(row_ids),
        "columns": list(columns),
        "cells": [[array.dtype.str, array.shape] for array in arrays],
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    pieces: list[Any] = [len(head).to_bytes(8, "little"), head, b"\0" * (-len(head) % _ALIGNMENT)]
    for array in arrays:
        pieces.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
        pieces.append(b"\0" * (-array.nbytes % _ALIGNMENT))
    return b"".join(pieces)


def decode_block(block: bytes | NDArray[np.uint8]) -> tuple[list[int], list[dict[str, Array]]]:
    """Row ids and rows. The arrays are views of `block`, read-only if it is."""
    data = np.frombuffer(block, np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + length].tobytes())
    columns, cells = header["columns"], iter(header["cells"])
    start = 8 + length + (-length % _ALIGNMENT)
    rows: list[dict[str, Array]] = []
    for _ in header["rows"]:
        row: dict[str, Array] = {}
        for column in columns:
            name, shape = next(cells)
            dtype = np.dtype(name)
            count = prod(shape)
            # frombuffer refuses to begin at the very end of the buffer
            array = np.frombuffer(data, dtype, count, start).reshape(shape) if count else np.empty(shape, dtype)
            row[column] = read_only(array, column)
            start += count * dtype.itemsize + (-(count * dtype.itemsize) % _ALIGNMENT)
        rows.append(row)
    return header["rows"], rows
