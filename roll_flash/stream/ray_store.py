"""The data plane on many nodes: rows lie in Ray actors (shards), neighbours together.

Rows travel as flat buffers. Changes of one shard go in order, and all that are waiting go in one call, so that many
writers cost no more than one. What a consumer gets is a view of Ray's shared memory where it reads on the shard's node.
A shard that dies is an error that names it; nothing is retried behind anyone's back.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import Any

import ray
from ray.actor import ActorHandle

from roll_flash.errors import ShardDiedError, StreamError
from roll_flash.stream.blocks import decode_block, encode_block
from roll_flash.stream.rows import Array, Columns, same_columns
from roll_flash.stream.shard import StoreShard, release_message, write_message

ROWS_TOGETHER = 16
"""Rows with neighbouring ids share a shard, so that a group mostly comes in one call."""
SMALL_REPLY_BYTES, MOST_SMALL_REPLIES = 90_000, 4
"""Ray sends up to 100 KB inside its own messages and more through shared memory, which pays from about 400 KB on."""
MESSAGES_PER_CALL = 64
RELEASES_PER_CALL = 32
"""Releases wait for the next write, or until there are so many of them."""


class RayStore:
    """`store.Store` over shards. Picklable: workers on any node read and write the shards themselves."""

    def __init__(self, shards: Sequence[ActorHandle[Any]], *, timeout_s: float = 60.0) -> None:
        self._shards = list(shards)
        self._timeout_s = timeout_s
        self._outboxes = [_Outbox() for _ in self._shards]
        self._row_bytes = 0.0
        """Of the newest rows that were read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._shards, self._timeout_s)

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
        sent = []
        for shard, places in self._places(row_ids).items():
            block = encode_block([row_ids[place] for place in places], [rows[place] for place in places], names)
            sent.append(self._send(shard, write_message(block)))
        await asyncio.gather(*sent)

    async def get(self, row_ids: Sequence[int], columns: Sequence[str]) -> dict[str, list[Array]]:
        calls: list[Any] = []
        for shard, places in self._places(row_ids).items():
            lists = self._in_small_replies([row_ids[place] for place in places])
            request = json.dumps({"rows": lists, "columns": list(columns)}).encode()
            replies: Any = self._shards[shard].get.options(num_returns=len(lists)).remote(request)
            replies = [replies] if len(lists) == 1 else replies
            calls += [self._reply(shard, reply, ids) for reply, ids in zip(replies, lists, strict=True)]
        blocks = await asyncio.gather(*calls)
        self._row_bytes = sum(len(block) for block in blocks) / max(1, len(row_ids))
        found = {row_id: row for block in blocks for row_id, row in zip(*decode_block(block), strict=True)}
        return {column: [found[row_id][column] for row_id in row_ids] for column in columns}

    async def release(self, row_ids: Sequence[int]) -> None:
        for shard, places in self._places(row_ids).items():
            outbox = self._outboxes[shard]
            outbox.messages.append((release_message([row_ids[place] for place in places]), None))
            if len(outbox.messages) >= RELEASES_PER_CALL:
                self._start_sending(shard)

    async def stats(self) -> dict[str, float]:
        """Also sends what waits."""
        await asyncio.gather(*(self._send(shard, release_message([])) for shard in range(len(self._shards))))
        calls = [self._reply(index, shard.stats.remote(), []) for index, shard in enumerate(self._shards)]
        parts = await asyncio.gather(*calls)
        return {"rows": sum(rows for rows, _ in parts), "bytes": sum(held for _, held in parts)}

    async def close(self) -> None:
        shards, self._shards = self._shards, []
        for outbox in self._outboxes:
            if outbox.sending is not None:
                outbox.sending.cancel()
        for shard in shards:
            ray.kill(shard)

    def _places(self, row_ids: Sequence[int]) -> dict[int, list[int]]:
        """Shard to the places in `row_ids` of the rows it holds."""
        if not self._shards:
            raise StreamError("the stream's store is closed")
        places: dict[int, list[int]] = defaultdict(list)
        for place, row_id in enumerate(row_ids):
            places[row_id // ROWS_TOGETHER % len(self._shards)].append(place)
        return places

    def _in_small_replies(self, row_ids: list[int]) -> list[list[int]]:
        """Rows of one shard, split where that saves the way through the object store, which costs more than a call."""
        parts = max(1, ceil(len(row_ids) * self._row_bytes / SMALL_REPLY_BYTES))
        if parts > MOST_SMALL_REPLIES:
            return [row_ids]
        size = ceil(len(row_ids) / parts)
        return [row_ids[start : start + size] for start in range(0, len(row_ids), size)]

    def _send(self, shard: int, message: bytes) -> asyncio.Future[None]:
        """Done when the shard has applied the message and all before it."""
        done = asyncio.get_running_loop().create_future()
        self._outboxes[shard].messages.append((message, done))
        self._start_sending(shard)
        return done

    def _start_sending(self, shard: int) -> None:
        outbox = self._outboxes[shard]
        if outbox.sending is None or outbox.sending.done():
            outbox.sending = asyncio.create_task(self._send_all(shard))

    async def _send_all(self, shard: int) -> None:
        outbox = self._outboxes[shard]
        while outbox.must_go():
            taken = outbox.messages[:MESSAGES_PER_CALL]
            del outbox.messages[:MESSAGES_PER_CALL]
            # Whatever it is, those who wait must hear of it: nobody else looks at this task.
            error: StreamError | None = StreamError(f"{self._name(shard)} was not told: the stream's store is closed")
            try:
                await self._reply(shard, self._shards[shard].apply.remote(*(message for message, _ in taken)), [])
                error = None
            except StreamError as own:
                error = own
            except Exception as refused:  # Ray raises any when a call cannot be made: no memory, no disk, no actor
                error = StreamError(f"{self._name(shard)} cannot be reached: {_first_line(refused)}")
            finally:
                for done in (done for _, done in taken if done is not None and not done.done()):
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)

    async def _reply(self, shard: int, call: Any, row_ids: list[int]) -> Any:
        name = self._name(shard)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise StreamError(f"{name} did not answer within {self._timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, StreamError) else StreamError(f"{name} failed: {cause}") from None
        except ray.exceptions.RayError as error:
            raise ShardDiedError(
                f"{name} died ({_first_line(error)}); the rows it held are lost: "
                "resume the run from its newest checkpoint",
                row_ids,
            ) from None

    def _name(self, shard: int) -> str:
        return f"stream shard {shard + 1} of {len(self._outboxes)}"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class _Outbox:
    """What waits to be sent to one shard, in order. Nobody waits for a release."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, asyncio.Future[None] | None]] = []
        self.sending: asyncio.Task[None] | None = None

    def must_go(self) -> bool:
        return len(self.messages) >= RELEASES_PER_CALL or any(done is not None for _, done in self.messages)


def _rebuild(shards: list[ActorHandle[Any]], timeout_s: float) -> RayStore:
    return RayStore(shards, timeout_s=timeout_s)
