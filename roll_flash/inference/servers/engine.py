"""Supervises the inference servers on this machine and publishes new weights to them.

Invariants: the weights of a server match the version it reports; every server runs after a publication, even a failed
one; a server that died or hangs is restarted with the newest published weights (weights sent from GPU to GPU are not
kept: such a server reports version 0 until the next publication). At most one server loads new weights at a time, so
that generation never stops on all servers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import ClientSpec, InFlight, ServerUpdate, StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.servers.metrics import logged_figures
from roll_flash.inference.servers.process import Launcher, ServerProcess
from roll_flash.inference.servers.update import update_server
from roll_flash.processes.background import start_background
from roll_flash.processes.deadlines import LearnedDeadline, RecentCount
from roll_flash.processes.keys import new_key
from roll_flash.weight_sync.published import WeightCopy

SUPERVISE_EVERY_S = 0.5
HUNG_AFTER = 3
"""Multiple of `health_timeout_s` without an answer after which a server is killed and restarted; clients stop using it
after one `health_timeout_s`."""
DEATH_NOTICE_S = 5.0
"""Time in seconds after a failed request in which the server may still be found dead."""
MAX_RESTARTS = 3
RESTART_WINDOW_S = 1800.0
"""Window in seconds for MAX_RESTARTS, per server, reset by each publication; with more restarts the server stays down
and the run ends."""
SCORE_TIMEOUT_S = 120.0
"""Timeout in seconds to score one short prompt, which may wait behind the server's other requests."""
UPDATE_FLOOR_S = 60.0
"""Minimum timeout in seconds of one server's update. Otherwise it is 10 times the longest recent update."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ServerEngine:
    """`InferenceEngine` with `config.servers` processes that implement vLLM's routes."""

    def __init__(
        self, launcher: Launcher, config: InferenceConfig, *, model_folder: Path, max_model_len: int, logs: Path
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._hung_after_s = HUNG_AFTER * config.health_timeout_s
        self._model_folder = model_folder
        self._max_model_len = max_model_len
        self._key = new_key()
        self._servers = [ServerProcess(index, launcher, config, logs, self._key) for index in range(config.servers)]
        self._busy = {server: asyncio.Lock() for server in self._servers}
        self._restarts = {server: RecentCount(RESTART_WINDOW_S) for server in self._servers}
        self._update_deadline = LearnedDeadline(floor_s=UPDATE_FLOOR_S, max_s=config.start_timeout_s)
        self._newest = WeightCopy()
        self._newest_lock = asyncio.Lock()
        self._supervisors: list[asyncio.Task[None]] = []
        self.deaths = 0
        """Number of server deaths, including kills of hung servers."""
        self.hung = 0

    @property
    def dtype(self) -> str:
        """Compute dtype of the servers: `float32` or `bfloat16`."""
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
        self._supervisors = [
            start_background(self._supervise(server), f"the supervision of {server.endpoint}")
            for server in self._servers
        ]

    def client_spec(self) -> ClientSpec:
        """Return the spec for one client; for more see `ClientSpec.clients`. Capacities are known after `start`."""
        ratio = self._config.admission_ratio
        capacity = tuple(ratio * (server.kv_cache_tokens or float("inf")) for server in self._servers)
        return ClientSpec(
            self._launcher.name,
            tuple(server.endpoint for server in self._servers),
            str(self._model_folder),
            self._max_model_len,
            capacity_tokens=capacity if ratio else (),
            stream_every=self._config.stream_every,
            health_timeout_s=self._config.health_timeout_s,
            key=self._key,
        )

    async def publish(self, weights: StagedWeights, *, in_flight: InFlight = "keep") -> list[ServerUpdate]:
        """Update one server after another, so that generation never stops on all. A server that dies or hangs
        meanwhile is restarted and then gets the weights.

        Raises InferenceError if a server cannot load the weights; all servers continue to generate.
        """
        updates = []
        for server in self._servers:
            async with self._busy[server]:
                updates.append(await self._update_or_restart(server, weights, in_flight))
                self._restarts[server].clear()
            if len(updates) == 1 and weights.update_info is None:
                # One server has loaded the weights, so they are valid; a restarted server must get them.
                async with self._newest_lock:
                    await asyncio.to_thread(self._newest.keep, weights)
        return updates

    async def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        return list(await asyncio.gather(*(self._score(server, token_ids) for server in self._servers)))

    async def metrics(self) -> dict[str, float]:
        """Return `deaths` and `hung` so far, and the metrics in `servers.metrics.LOGGED` of each numbered server."""
        texts = await asyncio.gather(*(server.metrics_text() for server in self._servers))
        figures = {"deaths": float(self.deaths), "hung": float(self.hung)}
        for index, text in enumerate(texts):
            figures |= {f"{name}_{index}": value for name, value in logged_figures(text).items()}
        return figures

    async def close(self) -> None:
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors = []
        await asyncio.gather(*(server.close() for server in self._servers))
        self._newest.close()

    def guards(self) -> list[int]:
        """Return the process ids of the servers' guards; each leads the process group of its server."""
        return [server.guard for server in self._servers if server.is_running]

    async def _score(self, server: ServerProcess, token_ids: Sequence[int]) -> NDArray[np.float32]:
        async with self._busy[server]:
            try:
                return await self._await_or_kill(server, _score(server, token_ids))
            except InferenceError:
                if not await _is_dead(server):
                    raise
            await self._restart(server)
            return await _score(server, token_ids)

    async def _update_or_restart(
        self, server: ServerProcess, weights: StagedWeights, in_flight: InFlight
    ) -> ServerUpdate:
        """Update one server; restart it once if it dies or hangs during the update."""
        if server.is_running:
            try:
                return await self._await_or_kill(server, self._update(server, weights, in_flight))
            except InferenceError:
                if not await _is_dead(server):
                    raise
        await self._restart(server)
        return await self._update(server, weights, in_flight)

    async def _update(self, server: ServerProcess, weights: StagedWeights, in_flight: InFlight) -> ServerUpdate:
        """Update one server within the usual time of updates; stop a slower one, so that it is restarted."""
        limit_s = self._update_deadline.limit_s()
        try:
            async with asyncio.timeout(limit_s):
                update = await update_server(server, weights, in_flight)
        except TimeoutError:
            await self._kill_hung(server, f"did not take new weights within {limit_s:.0f} s")
            raise InferenceError(f"{server.endpoint}: no new weights after {limit_s:.0f} s; see {server.log}") from None
        self._update_deadline.record(update.total_s)
        return update

    async def _await_or_kill(self, server: ServerProcess, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` without a timeout, but kill the server if it stops answering, so that `work` fails."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=self._hung_after_s))[0]:
                if not await server.is_healthy():
                    await self._kill_hung(server, f"did not answer for {self._hung_after_s:g} s")
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _supervise(self, server: ServerProcess) -> None:
        """Restart the server when it dies or hangs. Raises InferenceError if it cannot be started."""
        answered, starts = time.monotonic(), server.starts
        while True:
            await asyncio.sleep(SUPERVISE_EVERY_S)
            if self._busy[server].locked() or server.starts != starts or await server.is_healthy():
                answered, starts = time.monotonic(), server.starts
            elif await self._is_lost(server, answered):
                async with self._busy[server]:
                    # The previous lock holder may have restarted the server, so check its state again.
                    if server.starts == starts and await self._is_lost(server, answered):
                        await self._revive(server)

    async def _is_lost(self, server: ServerProcess, answered: float) -> bool:
        """True if the server is gone, or silent for too long since `answered`."""
        if not server.is_running:
            return True
        state, silent_s = await server.state(), time.monotonic() - answered
        return silent_s > {"gone": DEATH_NOTICE_S, "silent": self._hung_after_s, "healthy": math.inf}[state]

    async def _revive(self, server: ServerProcess) -> None:
        if await server.state() == "silent":
            await self._kill_hung(server, f"did not answer for {self._hung_after_s:g} s")
        await self._restart(server)

    async def _kill_hung(self, server: ServerProcess, what: str) -> None:
        self.hung += 1
        _log.warning("inference server %s %s; killing it", server.endpoint, what)
        await server.stop()

    async def _restart(self, server: ServerProcess) -> None:
        self.deaths += 1
        if self._restarts[server].add(time.monotonic()) > MAX_RESTARTS:
            raise InferenceError(
                f"server {server.endpoint} died {MAX_RESTARTS + 1} times within {RESTART_WINDOW_S / 60:g} minutes; "
                f"see {server.log}"
            )
        _log.warning("inference server %s died; starting it again, see %s", server.endpoint, server.log)
        await server.stop()
        await server.start()
        async with self._newest_lock:
            if self._newest.weights is not None:
                await self._update(server, self._newest.weights, "keep")


async def _is_dead(server: ServerProcess) -> bool:
    """True if the server is dead, checked after an error. Its guard needs a moment to notice, and may itself be
    stopped; a server that answers is not dead."""
    deadline = time.monotonic() + DEATH_NOTICE_S
    while True:
        state = await server.state()
        if state == "healthy" or not server.is_running or time.monotonic() > deadline:
            return state == "gone"
        await asyncio.sleep(0.1)


async def _score(server: ServerProcess, token_ids: Sequence[int]) -> NDArray[np.float32]:
    body = {
        "token_ids": list(token_ids),
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
    }
    answer: Any = await server.post("/inference/v1/generate", body, timeout_s=SCORE_TIMEOUT_S)
    try:
        positions = answer["prompt_logprobs"][1:]
        scores = [position[str(token)]["logprob"] for position, token in zip(positions, token_ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise InferenceError(
            f"{server.endpoint}: no log-probabilities of the prompt in the answer: {error!r}"
        ) from None
    return np.asarray(scores, np.float32)
