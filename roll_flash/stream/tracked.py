"""What the ledger remembers of each row and each group that is in the stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_flash.stream.rows import RowInfo


@dataclass(slots=True)
class TrackedGroup:
    """`rows`: those that arrived and are neither dropped nor consumed by all, in order of arrival."""

    name: str
    partition: int
    size: int | None
    is_alone: bool = False
    """A row that is in no group: the smallest size of groups does not concern it."""
    arriving: int = 0
    arrived: int = 0
    lost: int = 0
    rows: dict[int, None] = field(default_factory=dict)
    dropped_for: str | None = None
    """Why the whole group was dropped; rows that arrive later go the same way."""

    @property
    def is_complete(self) -> bool:
        return self.size is not None and self.arrived >= self.size


@dataclass(slots=True)
class TrackedRow:
    info: RowInfo
    group: TrackedGroup
    left: set[str]
    """Consumers that have not consumed it."""
    columns: set[str] = field(default_factory=set)
    has_arrived: bool = False
    claimed_by: set[str] = field(default_factory=set)
    doomed: str | None = None
    """It will be dropped for this when nobody has a claim on it any more."""
