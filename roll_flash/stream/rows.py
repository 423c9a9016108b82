"""What travels through the stream: rows of ragged numpy columns, and the claims and batches that consumers get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.errors import StreamError

if TYPE_CHECKING:
    from roll_flash.stream.samplers import Sampler

Array = NDArray[Any]
Columns = Mapping[str, Array]
"""One row's fields: a numeric numpy array each, of any shape; rows of one column may differ in shape."""
Key = int | str
"""Of what a sampler chooses from: a row's id, or the name of a whole group."""


@dataclass(frozen=True, slots=True)
class RowInfo:
    """What the control plane knows about a row; it never sees the arrays."""

    tokens: int = 1
    """What the row costs to train: samplers balance by it."""
    num_bytes: int = 0
    group: str | None = None
    """Rows of one name are a group; None is a group of its own."""
    group_size: int | None = None
    """How many rows the group will have; None where a later row says so."""
    partition: int = 0
    """What belongs together and ends together, such as the optimizer step that trains the row."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row to put. Fields as in `RowInfo`; the columns that are missing are written later, by stages."""

    columns: Columns
    tokens: int = 1
    group: str | None = None
    group_size: int | None = None
    partition: int = 0

    def info(self) -> RowInfo:
        num_bytes = sum(array.nbytes for array in self.columns.values())
        return RowInfo(self.tokens, num_bytes, self.group, self.group_size, self.partition)


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who gets every row once: the columns it needs, and how its micro-batches are cut."""

    name: str
    columns: tuple[str, ...]
    sampler: Sampler
    in_order: bool = False
    """Take rows in the order they were put, waiting for a slow one, instead of in the order they became ready."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows that a consumer took and has not released."""

    claim_id: int
    consumer: str
    partition: int | None
    row_ids: tuple[int, ...]
    groups: Mapping[int, str]
    """Row id to the name of its group."""
    tokens: int
    """Of all rows together."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A claim with its data: `columns[name]` has one read-only array for each row, in the order of `row_ids`."""

    claim: Claim
    columns: Mapping[str, Sequence[Array]]

    @property
    def row_ids(self) -> tuple[int, ...]:
        return self.claim.row_ids

    @property
    def groups(self) -> list[str]:
        """The group of each row."""
        return [self.claim.groups[row_id] for row_id in self.row_ids]

    def __len__(self) -> int:
        return len(self.row_ids)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a sampler takes or leaves as a whole: a row, or a complete group."""

    key: Key
    tokens: int


@dataclass(frozen=True, slots=True)
class Situation:
    """What a sampler may know beside the units that are ready."""

    is_final: bool = False
    """All units that are left are ready: nothing better will come."""
    in_order: bool = False
    """A unit may be taken only together with all that are older."""


def read_only(array: object, column: str) -> Array:
    """A numeric array as it is stored: not a copy where it need not be one, and safe from later writes through it.

    Raises StreamError for anything that is not an array of numbers.
    """
    stored = np.asarray(array)
    if stored.dtype.hasobject or stored.dtype.kind not in "biuf":
        raise StreamError(
            f"column {column!r} holds {stored.dtype}; the stream carries arrays of numbers only: encode it as uint8"
        )
    stored = np.ascontiguousarray(stored).reshape(stored.shape).view()
    stored.flags.writeable = False
    return stored


def same_columns(rows: Sequence[Mapping[str, Array]]) -> tuple[str, ...]:
    """The column names that all rows have. Raises StreamError where they differ."""
    names = tuple(rows[0]) if rows else ()
    for row in rows[1:]:
        if row.keys() != rows[0].keys():
            raise StreamError(f"rows put together must have the same columns, not {sorted(row)} beside {sorted(names)}")
    return names


def require_names(asked: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises StreamError for the first of `asked` that is not `known`."""
    known = list(known)
    for name in asked:
        if name not in known:
            raise StreamError(f"there is no {what} {name!r}; there are {', '.join(map(repr, known)) or 'none'}")
