"""Controls weight transfer over NCCL from the driver: tells the first rank when to send, and to which server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from roll_flash.engines.inference import StagedWeights
from roll_flash.processes.background import gather_or_cancel

TRANSFER = "transfer"
"""Ray concurrency group of the rank's actor: weights are sent in its thread while another thread computes."""

Gather = Callable[[list[Any], str, float], Awaitable[list[Any]]]


class NcclChannel:
    """Sends weights from the first rank to servers. `gather` awaits rank calls, with the learner's error handling."""

    def __init__(self, first_rank: Any, gather: Gather, timeout_s: float) -> None:
        self._first_rank = first_rank
        self._gather = gather
        self._timeout_s = timeout_s

    async def join(self, endpoint: str, world_size: int, receive: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        """Create a group of the first rank and a server's `world_size` workers; `receive` makes the server join."""
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            DEFAULT_PACKED_NUM_BUFFERS,
        )

        host, port = await self._call("transfer_address")
        info = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + world_size,
            "packed": True,
            "packed_buffer_size_bytes": DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            "packed_num_buffers": DEFAULT_PACKED_NUM_BUFFERS,
        }
        await gather_or_cancel(self._call("join_transfer", endpoint, host, port, 1 + world_size), receive(info))

    async def send(self, endpoint: str, weights: StagedWeights, receive: Awaitable[Any]) -> None:
        """Send the weights while `receive`, the server's side of the transfer, runs."""
        await gather_or_cancel(self._call("send_weights", endpoint, replace(weights, channel=None)), receive)

    async def _call(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._first_rank, method).options(concurrency_group=TRANSFER).remote(*arguments)
        (result,) = await self._gather([call], method, self._timeout_s)
        return result
