"""Updates the weights of one server: loads them while it generates, then swaps them in a pause."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from roll_flash.engines.inference import InFlight, ServerUpdate, StagedWeights
from roll_flash.inference.servers.control import ServerControl

RESUME_TIMEOUT_S = 10.0


async def update_server(server: ServerControl, weights: StagedWeights, in_flight: InFlight) -> ServerUpdate:
    """Swap the weights of one server. Raises InferenceError if it cannot load them; it then continues to generate.

    Requests in flight wait and continue with the new weights (`keep`), or return their tokens and are retried by their
    clients (`abort_resume`); new requests wait in both cases.
    """
    started = time.monotonic()
    on_device = weights.update_info is not None
    if on_device:
        await _join(server, weights)
    else:
        await server.post("/start_weight_update")
        if server.prepares_weights:
            await server.prepare(weights)
    paused = time.monotonic()
    try:
        if in_flight == "keep":
            await server.post("/pause?mode=keep&clear_cache=false")
        else:
            await server.post("/pause?mode=abort&clear_cache=true")
        if on_device:
            await _receive(server, weights)
        else:
            await server.post("/update_weights", {"update_info": {"path": weights.path, "tag": weights.tag}})
        await server.post("/finish_weight_update", {"weight_version": str(weights.version)})
        await _clear_prefix_cache(server)
        server.version = weights.version
    finally:
        # Shielded from cancellation: a server that stays paused would block its episodes forever.
        await asyncio.shield(asyncio.ensure_future(server.post("/resume", timeout_s=RESUME_TIMEOUT_S)))
    ended = time.monotonic()
    return ServerUpdate(server.endpoint, weights.version, paused_s=ended - paused, total_s=ended - started)


async def _join(server: ServerControl, weights: StagedWeights) -> None:
    """Join the server and the sending learner in one group, once per server start.

    A server that fails here may wait for the learner without end: it is stopped, to be restarted.
    """
    channel = weights.channel
    if channel is None or server.joined:
        return

    async def join(info: dict[str, Any]) -> None:
        await server.post("/init_weight_transfer_engine", {"init_info": info})

    try:
        world_size = (await server.get("/get_world_size"))["world_size"]
        await channel.join(server.endpoint, world_size, join)
    except BaseException:
        await server.stop()
        raise
    server.joined = True


async def _receive(server: ServerControl, weights: StagedWeights) -> None:
    """Load weights from a GPU with one of vLLM's own transfer engines.

    From the first to the last request the model is incomplete. A server that fails in between has no valid weights: it
    is stopped, to be restarted.
    """
    try:
        await server.post("/start_weight_update")
        receive = server.post("/update_weights", {"update_info": dict(weights.update_info or {})})
        if weights.channel is None:
            await receive
        else:
            await weights.channel.send(server.endpoint, weights, receive)
    except BaseException:
        await server.stop()
        raise


async def _clear_prefix_cache(server: ServerControl) -> None:
    """Clear the prefix cache: no new request may use the KV cache of the old weights.

    A scheduler chosen in `inference.extra_args` may be unable to with requests in flight: these compute their KV cache
    again then.
    """
    answer: Any = await server.post("/reset_prefix_cache")
    if not answer["success"]:
        await server.post("/reset_prefix_cache?reset_running_requests=true")
