"""What clients count, and how the counts of many become those of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened so far in one client. Each is a metric under its own name."""

    requests: int = 0
    asked_again: int = 0
    """Requests sent once more because their server died, hung, answered garbage or aborted them."""
    aborted: int = 0
    """Those of them that a server aborted."""
    tokens_kept: int = 0
    """Tokens that did not have to be sampled again then."""
    bad_answers: int = 0
    removed: int = 0
    """How often a server was left out, and how often one came back."""
    returned: int = 0
    hung: int = 0
    """Servers left out because they did not answer a heartbeat, or answered that they are not healthy."""


def combined(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The figures of many clients as one: sums, except of those called `longest` (the longest of any)."""
    total: dict[str, float] = {}
    for client in metrics:
        for name, value in client.items():
            if "longest" in name:
                total[name] = max(total.get(name, 0.0), value)
            else:
                total[name] = total.get(name, 0.0) + value
    return total
