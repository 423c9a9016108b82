"""What only shards in other processes can do: die, hang, and be read from elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from roll_flash.errors import ShardDiedError, StreamError
from roll_flash.stream import Consumer, Row, Sequential, TrajectoryStream
from roll_flash.stream.ray_store import ROWS_TOGETHER, RayStore
from roll_flash.stream.store import Store

pytestmark = pytest.mark.ray


@pytest.fixture
def mortal() -> Iterator[RayStore]:
    store = asyncio.run(RayStore.start(2))
    yield store
    asyncio.run(store.close())


def shard_process(store: RayStore, shard: int) -> int:
    call: Any = store._shards[shard].__ray_call__
    pid: int = ray.get(call.remote(lambda self: os.getpid()))
    return pid


def test_a_shard_that_is_killed_is_named_its_rows_are_counted_and_the_rest_goes_on(
    ray_local: None, mortal: RayStore
) -> None:
    async def main() -> None:
        stream = TrajectoryStream([Consumer("learner", ("number",), Sequential(100))], mortal)
        await stream.put([Row({"number": np.array(number)}) for number in range(ROWS_TOGETHER + 2)])
        os.kill(shard_process(mortal, 1), signal.SIGKILL)
        with pytest.raises(ShardDiedError, match=r"stream shard 2 of 2 died.*resume the run"):
            await stream.next_batch("learner")
        assert stream.books() == {
            "produced": ROWS_TOGETHER + 2,
            "dropped_shard_died": 2,
            "waiting": ROWS_TOGETHER,
        }
        batch = await stream.next_batch("learner")
        assert batch is not None
        assert [int(number) for number in batch.columns["number"]] == list(range(ROWS_TOGETHER))
        await stream.release(batch)
        with pytest.raises(ShardDiedError, match="stream shard 2 of 2"):
            await stream.put([Row({"number": np.array(number)}) for number in range(ROWS_TOGETHER)])
        assert stream.books()["produced"] == ROWS_TOGETHER + 2, "nothing was put"
        assert stream.metrics()["balanced"] == 1.0

    asyncio.run(main())


def test_a_shard_that_hangs_is_named_at_the_deadline(ray_store: Store) -> None:
    assert isinstance(ray_store, RayStore)
    hasty = RayStore(ray_store._shards, timeout_s=0.2)

    async def main() -> None:
        pid = shard_process(hasty, 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StreamError, match=r"stream shard 1 of 2 did not answer within 0\.2 s"):
                await hasty.put([0], [{"number": np.array(1)}])
        finally:
            os.kill(pid, signal.SIGCONT)

    asyncio.run(main())


class NoCallIsMade:
    """As Ray when an argument fits into no memory and on no disk, or the actor is not known: the call itself raises."""

    @property
    def apply(self) -> Any:
        return self

    def remote(self, *_: bytes) -> Any:
        raise OSError("Local disk is full\nThe object cannot be created")


def test_a_put_that_ray_refuses_ends_at_once_with_the_reason() -> None:
    async def main() -> None:
        shards: Any = [NoCallIsMade()]
        stream = TrajectoryStream([Consumer("learner", ("number",), Sequential(1))], RayStore(shards))
        for _ in range(2):
            async with asyncio.timeout(5):
                with pytest.raises(StreamError, match=r"^stream shard 1 of 1 cannot be reached: Local disk is full$"):
                    await stream.put([Row({"number": np.array(1)})])
        assert stream.books() == {"waiting": 0}

    asyncio.run(main())


def test_another_process_reads_rows_from_the_shards_itself(ray_store: Store) -> None:
    @ray.remote
    def total(store: RayStore, row_ids: list[int]) -> float:
        columns = asyncio.run(store.get(row_ids, ["values"]))
        return float(sum(array.sum() for array in columns["values"]))

    async def main() -> None:
        rows = [{"values": np.full(50_000, number, np.float32)} for number in range(6)]
        await ray_store.put(list(range(6)), rows)
        assert await total.remote(ray_store, list(range(6))) == 50_000 * 15
        await ray_store.release(range(6))

    asyncio.run(main())


def test_what_is_read_on_the_shards_node_is_a_view_of_shared_memory(ray_store: Store) -> None:
    async def main() -> None:
        await ray_store.put([0], [{"values": np.zeros(100_000, np.float32)}])
        values = (await ray_store.get([0], ["values"]))["values"][0]
        base: Any = values
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        assert not isinstance(base, np.ndarray | bytes), "a copy would own its memory"
        await ray_store.release([0])

    asyncio.run(main())
