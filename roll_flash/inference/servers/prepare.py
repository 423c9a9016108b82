"""Lets a server on this node load new weights while it generates, and waits for that."""

from __future__ import annotations

import asyncio
import os

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.servers.control import CONTROL_TIMEOUT_S, ServerControl

END_TIMEOUT_S = 10.0
"""Timeout in seconds to end an update after an error, so that a run can end although the server hangs."""


async def prepare_weights(server: ServerControl, weights: StagedWeights) -> None:
    """Let the server load the weights next to the old ones, and wait until it finishes, fails, or dies.

    The server holds a pipe of this process open meanwhile, so it must be on this node. Errors are reported by the later
    request that swaps the weights.
    """
    reading, writing = os.pipe()
    try:
        pipe = f"/proc/{os.getpid()}/fd/{writing}"
        await server.post(
            "/update_weights", {"update_info": {"path": weights.path, "tag": weights.tag, "ready_pipe": pipe}}
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        await _until_closed(reading)
    except BaseException as error:
        # End this update on the server before the next one begins; a server that cannot is found when it is used next.
        ended = server.post("/finish_weight_update", timeout_s=END_TIMEOUT_S)
        await asyncio.shield(asyncio.gather(ended, return_exceptions=True))
        if isinstance(error, TimeoutError):
            raise InferenceError(f"{server.endpoint}: no new weights after {CONTROL_TIMEOUT_S:g} s") from None
        raise
    finally:
        os.close(reading)


async def _until_closed(reading: int) -> None:
    """Wait until the pipe is closed. Raises TimeoutError after CONTROL_TIMEOUT_S."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(reading, closed.set)
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            await closed.wait()
    finally:
        loop.remove_reader(reading)
