"""A ledger as JSON, for a checkpoint, and back. What is claimed and not released counts as given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from roll_flash.errors import StreamError
from roll_flash.stream.consumer_queue import ConsumerQueue
from roll_flash.stream.ledger import Ledger
from roll_flash.stream.rows import Key, RowInfo, Unit
from roll_flash.stream.tracked import TrackedGroup, TrackedRow


def ledger_state(ledger: Ledger) -> dict[str, Any]:
    """Plain data. Rows whose data has not arrived are not in it: nobody was promised anything about them."""
    rows = [
        [row_id, list(astuple(row.info)), row.group.name, sorted(row.columns), sorted(row.left), row.doomed]
        for row_id, row in ledger.rows.items()
        if row.has_arrived
    ]
    groups = [
        [group.name, group.partition, group.size, group.is_alone, group.arrived, group.lost, group.dropped_for]
        for group in ledger.groups.values()
        if group.arrived and (group.rows or not group.is_complete)
    ]
    return {
        "next_row": ledger.next_row,
        "rows": rows,
        "groups": groups,
        "sealed": sorted(ledger.sealed),
        "is_closed": ledger.is_closed,
        "books": dict(ledger.books),
        "consumers": {name: _queue_state(ledger, queue) for name, queue in ledger.queues.items()},
    }


def restore_ledger(ledger: Ledger, state: Mapping[str, Any]) -> None:
    """Go on where `state` was taken, in a ledger that nothing was put into, of the same consumers.

    Raises StreamError for other consumers or a ledger that was used, and KeyError, TypeError or ValueError for what is
    no state.
    """
    if ledger.next_row or ledger.books:
        raise StreamError("a stream can be restored only before anything is put into it")
    if set(state["consumers"]) != set(ledger.queues):
        raise StreamError(
            f"the saved stream has the consumers {sorted(state['consumers'])}, this one {sorted(ledger.queues)}"
        )
    ledger.next_row = state["next_row"]
    ledger.is_closed, ledger.sealed = state["is_closed"], set(state["sealed"])
    ledger.books = Counter(state["books"])
    for name, partition, size, is_alone, arrived, lost, dropped_for in state["groups"]:
        ledger.track(TrackedGroup(name, partition, size, is_alone, 0, arrived, lost, {}, dropped_for))
    for row_id, info, group, columns, left, doomed in state["rows"]:
        _restore_row(ledger, row_id, RowInfo(*info), group, set(columns), set(left), doomed)
    for name, queue in ledger.queues.items():
        _restore_ready(ledger, queue, state["consumers"][name])


def _queue_state(ledger: Ledger, queue: ConsumerQueue) -> dict[str, Any]:
    claimed: dict[tuple[int, Key], None] = {}
    for claim in ledger.claims.values():
        if claim.consumer == queue.consumer.name:
            for row_id in claim.row_ids:
                row = ledger.rows[row_id]
                if row.doomed is None:
                    claimed[row.group.partition, row.group.name if queue.whole_groups else row_id] = None
    return queue.state(claimed)


def _restore_row(
    ledger: Ledger, row_id: int, info: RowInfo, group_name: str, columns: set[str], left: set[str], doomed: str | None
) -> None:
    if doomed is not None:  # only somebody's claim kept it, and no claim outlives its process
        ledger.books[f"dropped_{doomed}"] += 1
        return
    group = ledger.groups[group_name]
    ledger.rows[row_id] = TrackedRow(info, group, left, columns, has_arrived=True)
    ledger.num_waiting += 1
    group.rows[row_id] = None
    ledger.held_bytes += info.num_bytes
    for name in left:
        queue = ledger.queues[name]
        queue.add(group.partition, group.name if queue.whole_groups else row_id)


def _restore_ready(ledger: Ledger, queue: ConsumerQueue, state: Mapping[str, Any]) -> None:
    for partition, keys in state["ready"]:
        for key in keys:
            row_ids = [key] if isinstance(key, int) else ledger.groups[key].rows
            queue.set_ready(partition, Unit(key, sum(ledger.rows[row_id].info.tokens for row_id in row_ids)))
