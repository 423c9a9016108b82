"""The data plane: where the arrays lie. Stores know rows and columns and nothing of readiness or consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from roll_flash.errors import StreamError
from roll_flash.stream.rows import Array, Columns


class Store(Protocol):
    """Six methods. Rows are named by the control plane, which also says when they are there and when to release them.

    Arrays are numeric numpy arrays of any shape and come back read-only, bit by bit as they were put.
    """

    async def put(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        """Store new rows, which all have the same columns. After an error nobody will ask for any of them."""
        ...

    async def write(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        """Add columns to rows, replacing those of the same name."""
        ...

    async def get(self, row_ids: Sequence[int], columns: Sequence[str]) -> dict[str, list[Array]]:
        """For each column one array per row, in the order of `row_ids`. Raises StreamError for what is not there."""
        ...

    async def release(self, row_ids: Sequence[int]) -> None:
        """Throw rows away; those that are not there are ignored. Returns without waiting for the memory to be free."""
        ...

    async def stats(self) -> dict[str, float]:
        """`rows` and `bytes` held, and whatever else the store measures."""
        ...

    async def close(self) -> None:
        """Give back all memory and processes. Safe to call twice."""
        ...


class MemoryStore:
    """In this process. Nothing is copied: a row is the arrays that were put, so do not change those afterwards."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Array]] = {}

    async def put(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        for row_id, columns in zip(row_ids, rows, strict=True):
            self._rows[row_id] = dict(columns)

    async def write(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        for row_id, columns in zip(row_ids, rows, strict=True):
            self._rows.setdefault(row_id, {}).update(columns)

    async def get(self, row_ids: Sequence[int], columns: Sequence[str]) -> dict[str, list[Array]]:
        try:
            return {column: [self._rows[row_id][column] for row_id in row_ids] for column in columns}
        except KeyError:
            raise missing(row_ids, columns, self._rows) from None

    async def release(self, row_ids: Sequence[int]) -> None:
        for row_id in row_ids:
            self._rows.pop(row_id, None)

    async def stats(self) -> dict[str, float]:
        num_bytes = sum(array.nbytes for row in self._rows.values() for array in row.values())
        return {"rows": len(self._rows), "bytes": num_bytes}

    async def close(self) -> None:
        self._rows.clear()


def missing(row_ids: Sequence[int], columns: Sequence[str], rows: Mapping[int, Mapping[str, Any]]) -> StreamError:
    """The error that names the first row or column which is not stored."""
    for row_id in row_ids:
        for column in columns:
            if column not in rows.get(row_id, {}):
                return StreamError(f"row {row_id} has no column {column!r} in the store")
    return StreamError("rows are missing in the store")
