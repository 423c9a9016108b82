"""Times and sizes as counts in buckets that double: cheap to add to, to merge, and to read quantiles from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SMALLEST = 1e-5
BUCKETS = 64
PER_DOUBLING = 2


@dataclass(slots=True)
class Histogram:
    """Values from SMALLEST up; a quantile is right within a factor of 2 ** (1 / PER_DOUBLING)."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, value: float) -> None:
        bucket = 0 if value <= SMALLEST else int(math.log2(value / SMALLEST) * PER_DOUBLING) + 1
        self.counts[min(bucket, BUCKETS - 1)] += 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)

    def merge(self, other: Histogram) -> None:
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The upper edge of the bucket that `share` (0 to 1) of the values lie in or below; 0 without values."""
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= share * self.count:
                return float(min(self.largest, SMALLEST * 2 ** (bucket / PER_DOUBLING)))
        return 0.0
