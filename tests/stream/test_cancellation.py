"""Cancellation at any point: what did not return did not happen, and what was put is consumed once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_flash.stream import Consumer, MemoryStore, Row, Sequential, TrajectoryStream
from roll_flash.stream.rows import Array, Columns


class SlowStore(MemoryStore):
    """Every call is interrupted twice, before and after it took effect, as one over a network is."""

    async def put(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        await asyncio.sleep(0)
        await super().put(row_ids, rows)
        await asyncio.sleep(0)

    async def get(self, row_ids: Sequence[int], columns: Sequence[str]) -> dict[str, list[Array]]:
        await asyncio.sleep(0)
        found = await super().get(row_ids, columns)
        await asyncio.sleep(0)
        return found


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 14), st.booleans()), min_size=4, max_size=14),
    st.integers(1, 4),
)
def test_cancelled_writers_put_nothing_and_cancelled_readers_lose_nothing(
    cancellations: list[tuple[int, bool]], capacity: int
) -> None:
    """Each entry is a writer or a reader that is cancelled after so many turns of the event loop."""
    asyncio.run(_play(cancellations, capacity))


async def _play(cancellations: list[tuple[int, bool]], capacity: int) -> None:
    store = SlowStore()
    stream = TrajectoryStream([Consumer("reader", ("number",), Sequential(2))], store, capacity_rows=capacity)
    put: list[int] = []
    got: list[int] = []

    async def write(number: int) -> None:
        await stream.put([Row({"number": np.array(number)})])
        put.append(number)

    async def read() -> None:
        batch = await stream.next_batch("reader")
        if batch is not None:
            got.extend(int(number) for number in batch.columns["number"])
            await stream.release(batch)

    tasks: list[tuple[int, asyncio.Task[None]]] = []
    for number, (turns, writes) in enumerate(cancellations):
        tasks.append((turns, asyncio.create_task(write(number) if writes else read())))
    for turn in range(15):
        for turns, task in tasks:
            if turns == turn:
                task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    await stream.seal()
    async with asyncio.timeout(20):
        while not stream._ledger.is_exhausted("reader"):
            await read()
    assert sorted(got) == sorted(put)
    assert await stream.next_batch("reader") is None
    assert stream.books().get("produced", 0) == stream.books().get("consumed", 0) == len(put)
    assert (await store.stats())["rows"] == 0
