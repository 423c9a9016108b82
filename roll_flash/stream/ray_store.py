"""The data plane on many nodes: rows lie in Ray actors (shards), row i in shard i mod n.

Rows travel as one flat buffer per shard and call. What a consumer gets is a view of Ray's shared memory where it reads
on the node of the shard. A shard that dies is an error that names it; nothing is retried behind anyone's back.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from roll_flash.errors import ShardDiedError, StreamError
from roll_flash.stream.blocks import decode_block, encode_block
from roll_flash.stream.rows import Array, Columns, same_columns


class StoreShard:
    """One shard, as a Ray actor. Calls carry `bytes` only, which Ray moves without pickling."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Array]] = {}
        self._bytes = 0

    def write(self, block: bytes) -> None:
        for row_id, columns in zip(*decode_block(block), strict=True):
            row = self._rows.setdefault(row_id, {})
            self._bytes += sum(
                new.nbytes - row[name].nbytes if name in row else new.nbytes for name, new in columns.items()
            )
            row.update(columns)

    def get(self, request: bytes) -> NDArray[np.uint8]:
        """The reply is an array and not `bytes`, so that who reads it on this node reads it in place."""
        wanted = json.loads(request)
        row_ids, columns = wanted["rows"], wanted["columns"]
        for row_id in row_ids:
            if lacking := [column for column in columns if column not in self._rows.get(row_id, {})]:
                raise StreamError(f"row {row_id} has no column {lacking[0]!r} in the store")
        block = encode_block(row_ids, [self._rows[row_id] for row_id in row_ids], columns)
        return np.frombuffer(block, np.uint8)

    def release(self, request: bytes) -> None:
        for row_id in json.loads(request):
            for array in self._rows.pop(row_id, {}).values():
                self._bytes -= array.nbytes

    def stats(self) -> tuple[int, int]:
        return len(self._rows), self._bytes


class RayStore:
    """`store.Store` over shards. Picklable: workers on any node write and read the shards themselves."""

    def __init__(self, shards: Sequence[ActorHandle[Any]], *, timeout_s: float = 60.0) -> None:
        self._shards = list(shards)
        self._timeout_s = timeout_s

    @classmethod
    async def start(cls, num_shards: int, *, timeout_s: float = 60.0) -> RayStore:
        """Start the shards, spread over the nodes. Ray must be initialised; the shards end with it at the latest."""
        actor: Any = ray.remote(StoreShard)
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        store = cls([actor.options(**options).remote() for _ in range(num_shards)], timeout_s=timeout_s)
        try:
            await store.stats()
        except BaseException:
            await store.close()
            raise
        return store

    async def put(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        await self.write(row_ids, rows)

    async def write(self, row_ids: Sequence[int], rows: Sequence[Columns]) -> None:
        names = same_columns(rows)
        places = self._places(row_ids)
        calls = {
            shard: self._shards[shard].write.remote(
                encode_block([row_ids[place] for place in at], [rows[place] for place in at], names)
            )
            for shard, at in places.items()
        }
        await self._gather(calls, {shard: [row_ids[place] for place in at] for shard, at in places.items()})

    async def get(self, row_ids: Sequence[int], columns: Sequence[str]) -> dict[str, list[Array]]:
        asked = {shard: [row_ids[place] for place in at] for shard, at in self._places(row_ids).items()}
        calls = {
            shard: self._shards[shard].get.remote(json.dumps({"rows": ids, "columns": list(columns)}).encode())
            for shard, ids in asked.items()
        }
        replies = await self._gather(calls, asked)
        found = {row_id: row for block in replies for row_id, row in zip(*decode_block(block), strict=True)}
        return {column: [found[row_id][column] for row_id in row_ids] for column in columns}

    async def release(self, row_ids: Sequence[int]) -> None:
        for shard, at in self._places(row_ids).items():
            # Nobody waits for it: whether a dead shard can still forget something is not worth an error.
            self._shards[shard].release.remote(json.dumps([row_ids[place] for place in at]).encode())

    async def stats(self) -> dict[str, float]:
        calls = {index: shard.stats.remote() for index, shard in enumerate(self._shards)}
        parts = await self._gather(calls, {index: [] for index in calls})
        return {"rows": sum(rows for rows, _ in parts), "bytes": sum(held for _, held in parts)}

    async def close(self) -> None:
        shards, self._shards = self._shards, []
        for shard in shards:
            ray.kill(shard)

    def _places(self, row_ids: Sequence[int]) -> dict[int, list[int]]:
        """Shard to the places in `row_ids` of the rows it holds."""
        if not self._shards:
            raise StreamError("the stream's store is closed")
        places: dict[int, list[int]] = defaultdict(list)
        for place, row_id in enumerate(row_ids):
            places[row_id % len(self._shards)].append(place)
        return places

    async def _gather(self, calls: dict[int, Any], row_ids: dict[int, list[int]]) -> list[Any]:
        return list(await asyncio.gather(*(self._reply(shard, call, row_ids[shard]) for shard, call in calls.items())))

    async def _reply(self, shard: int, call: Any, row_ids: list[int]) -> Any:
        name = f"stream shard {shard + 1} of {len(self._shards)}"
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise StreamError(f"{name} did not answer within {self._timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StreamError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[0]
            raise ShardDiedError(
                f"{name} died ({reason}); the rows it held are lost: resume the run from its newest checkpoint",
                row_ids,
            ) from None
