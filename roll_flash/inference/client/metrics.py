"""Counters of a client, and the combination of many clients' metrics into those of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counters of one client. Each is a metric with the same name."""

    requests: int = 0
    asked_again: int = 0
    """Retries because the server died, hung, sent a bad answer or aborted the request."""
    aborted: int = 0
    """Retries because a server aborted the request."""
    tokens_kept: int = 0
    """Tokens kept in these retries and not sampled again."""
    bad_answers: int = 0
    removed: int = 0
    """Number of times that a server was removed; `returned`: number of times that one came back."""
    returned: int = 0
    hung: int = 0
    """Number of removals because of a failed health check (no answer, or not healthy)."""


def combined(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of many clients: sums, but the maximum for names with `longest`."""
    total: dict[str, float] = {}
    for client in metrics:
        for name, value in client.items():
            if "longest" in name:
                total[name] = max(total.get(name, 0.0), value)
            else:
                total[name] = total.get(name, 0.0) + value
    return total
