"""What a starved consumer waits for, for people."""

from __future__ import annotations

from collections import Counter

from roll_flash.stream.ledger import Ledger


def describe_wait(ledger: Ledger, consumer: str) -> str:
    """One line: how many of the consumer's units wait, and what they lack."""
    queue = ledger.queues[consumer]
    lacking = Counter(
        column
        for row in ledger.rows.values()
        if row.has_arrived and row.doomed is None and consumer in row.left and consumer not in row.claimed_by
        for column in set(queue.consumer.columns) - row.columns
    )
    columns = "".join(f", {count} rows lack {column!r}" for column, count in sorted(lacking.items()))
    short = sum(not group.is_complete for group in ledger.groups.values())
    return f"{queue.num_waiting(None)} waiting, {queue.num_ready()} ready{columns}, {short} groups are incomplete"
