"""Controls weight transfer over NCCL from the driver: tells the first rank when to send, and to which server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from roll_flash.engines.inference import StagedWeights
from roll_flash.processes.background import gather_or_cancel

TRANSFER = "transfer"
"""Ray concurrency group of the rank's actor: weights are sent in its threads while another thread computes."""
TRANSFER_THREADS = 8
"""One server takes weights at a time; the others are for calls that give up what waits for a dead server."""
ANSWER_S = 60.0
"""Time in seconds for the rank to answer after its own deadline."""

Gather = Callable[[list[Any], str, float], Awaitable[list[Any]]]


class NcclChannel:
    """Sends weights from the first rank to servers. `gather` awaits rank calls, with the learner's error handling.

    Methods raise InferenceError if the server fails, or takes longer than `timeout_s`. Whatever ends them, the rank no
    longer waits for that server then.
    """

    def __init__(self, first_rank: Any, gather: Gather, timeout_s: float) -> None:
        self._first_rank = first_rank
        self._gather = gather
        self._timeout_s = timeout_s

    async def join(self, endpoint: str, world_size: int, receive: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        """Create a group of the first rank and a server's `world_size` workers; `receive` makes the server join."""
        info = await self._call("offer_transfer", endpoint, world_size)
        await self._both(endpoint, self._call("join_transfer", endpoint, self._timeout_s), receive(info))

    async def send(self, endpoint: str, weights: StagedWeights, receive: Awaitable[Any]) -> None:
        """Send the weights while `receive`, the server's side of the transfer, runs."""
        staged = replace(weights, channel=None)
        await self._both(endpoint, self._call("send_weights", endpoint, staged, self._timeout_s), receive)

    async def _both(self, endpoint: str, ours: Awaitable[Any], theirs: Awaitable[Any]) -> None:
        try:
            await gather_or_cancel(ours, theirs)
        except BaseException:
            # The rank waits for the server in NCCL. Shielded: its staged weights may be released after this.
            await asyncio.shield(asyncio.ensure_future(self._call("end_transfer", endpoint)))
            raise

    async def _call(self, method: str, *arguments: Any) -> Any:
        call = self._first_rank.call.options(concurrency_group=TRANSFER).remote(method, *arguments)
        (result,) = await self._gather([call], method, self._timeout_s + ANSWER_S)
        return result
