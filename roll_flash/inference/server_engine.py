"""Inference servers on this machine: their supervision, and new weights for them.

Invariants: a server that answers has the weights of the version it says; a publication leaves every server running,
also when it fails; a server that dies is started again with the newest published weights before it is asked anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.config import InferenceConfig
from roll_flash.errors import InferenceError
from roll_flash.inference.engine import ClientSpec, ServerUpdate, StagedWeights
from roll_flash.inference.kept_weights import KeptWeights
from roll_flash.inference.server_process import Launcher, ServerProcess

SUPERVISE_EVERY_S = 0.5
RESUME_ATTEMPTS = 3
MAX_RESTARTS = 3
"""Restarts of one server without a publication between them; after that it stays down and `publish` fails."""

_log = logging.getLogger(__name__)


class ServerEngine:
    """`InferenceEngine` over `config.servers` processes that speak vLLM's routes."""

    def __init__(
        self, launcher: Launcher, config: InferenceConfig, *, model_folder: Path, max_model_len: int, logs: Path
    ) -> None:
        self._launcher = launcher
        self._model_folder = model_folder
        self._max_model_len = max_model_len
        self._servers = [ServerProcess(index, launcher, config, logs) for index in range(config.servers)]
        self._busy = {server: asyncio.Lock() for server in self._servers}
        self._restarts = dict.fromkeys(self._servers, 0)
        self._newest = KeptWeights()
        self._supervisors: list[asyncio.Task[None]] = []
        self.deaths = 0
        """Servers found dead so far."""

    @property
    def dtype(self) -> str:
        """What the servers compute in: `float32` or `bfloat16`."""
        return self._launcher.dtype

    async def start(self) -> None:
        starts = [asyncio.create_task(server.start()) for server in self._servers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        self._supervisors = [asyncio.create_task(self._supervise(server)) for server in self._servers]

    def client_spec(self) -> ClientSpec:
        endpoints = tuple(server.endpoint for server in self._servers)
        return ClientSpec(self._launcher.name, endpoints, str(self._model_folder), self._max_model_len)

    async def publish(self, weights: StagedWeights) -> list[ServerUpdate]:
        """One server after another: generation never stops everywhere.

        Raises InferenceError if a server cannot take the weights; all servers go on generating.
        """
        updates = []
        for server in self._servers:
            async with self._busy[server]:
                if not server.is_running:
                    await self._restart(server)
                updates.append(await _update(server, weights.version, weights.path))
                self._restarts[server] = 0
        await asyncio.to_thread(self._newest.keep, weights)
        return updates

    async def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        return list(await asyncio.gather(*(self._score(server, token_ids) for server in self._servers)))

    async def health(self) -> dict[str, bool]:
        answers = await asyncio.gather(*(server.is_healthy() for server in self._servers))
        return {server.endpoint: answer for server, answer in zip(self._servers, answers, strict=True)}

    async def close(self) -> None:
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors = []
        await asyncio.gather(*(server.close() for server in self._servers))
        self._newest.close()

    def guards(self) -> list[int]:
        """Process ids of the servers' guards; each heads a process group that holds its server."""
        return [server.guard for server in self._servers if server.is_running]

    async def _score(self, server: ServerProcess, token_ids: Sequence[int]) -> NDArray[np.float32]:
        async with self._busy[server]:
            return await _score(server, token_ids)

    async def _supervise(self, server: ServerProcess) -> None:
        """Start the server again when it has died. Ends when it cannot be started."""
        while True:
            await asyncio.sleep(SUPERVISE_EVERY_S)
            if server.is_running:
                continue
            async with self._busy[server]:
                if not server.is_running:
                    try:
                        await self._restart(server)
                    except InferenceError as error:
                        _log.error("%s stays down: %s", server.endpoint, error)
                        return

    async def _restart(self, server: ServerProcess) -> None:
        self.deaths += 1
        if self._restarts[server] >= MAX_RESTARTS:
            raise InferenceError(f"server {server.endpoint} died {MAX_RESTARTS} times in a row; see {server.log}")
        self._restarts[server] += 1
        _log.warning("inference server %s died; starting it again, see %s", server.endpoint, server.log)
        await server.stop()
        await server.start()
        if self._newest.weights is not None:
            await _update(server, self._newest.weights.version, self._newest.weights.path)


async def _update(server: ServerProcess, version: int, path: str) -> ServerUpdate:
    """Swap the weights of one server. Requests in flight wait, and go on with the new weights."""
    started = time.monotonic()
    await server.post("/start_weight_update")
    paused = time.monotonic()
    try:
        await server.post("/pause?mode=keep&clear_cache=false")
        await server.post("/update_weights", {"update_info": {"path": path}})
        await server.post("/finish_weight_update", {"weight_version": str(version)})
        await _forget_prefixes(server)
        server.version = version
    finally:
        # Also when the caller gave up: a server left paused would hang every episode.
        await asyncio.shield(asyncio.ensure_future(_resume(server)))
    ended = time.monotonic()
    return ServerUpdate(server.endpoint, version, paused_s=ended - paused, total_s=ended - started)


async def _resume(server: ServerProcess) -> None:
    """More than one try: after an error the server drops the connection that the next request would use."""
    for attempt in range(1, RESUME_ATTEMPTS + 1):
        try:
            await server.post("/resume")
            return
        except InferenceError:
            if attempt == RESUME_ATTEMPTS or not server.is_running:
                raise


async def _forget_prefixes(server: ServerProcess) -> None:
    """No new request may build on keys and values of the old weights.

    Where the scheduler cannot forget them with requests in flight (GPU), those compute theirs again.
    """
    if not (await server.post("/reset_prefix_cache"))["success"]:
        await server.post("/reset_prefix_cache?reset_running_requests=true")


async def _score(server: ServerProcess, token_ids: Sequence[int]) -> NDArray[np.float32]:
    body = {
        "token_ids": list(token_ids),
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
    }
    answer: Any = await server.post("/inference/v1/generate", body)
    try:
        positions = answer["prompt_logprobs"][1:]
        scores = [position[str(token)]["logprob"] for position, token in zip(positions, token_ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise InferenceError(
            f"{server.endpoint}: no log-probabilities of the prompt in the answer: {error!r}"
        ) from None
    return np.asarray(scores, np.float32)
