"""Supervises the inference servers of a run and publishes new weights to them.

Invariants: the weights of a server match the version it reports; every server runs after a publication, even a failed
one, unless it died in it or its node is lost; a server that died or hangs is restarted with the newest published
weights. At most one server loads new weights at a time, so that generation never stops on all servers, and a server
that dies keeps no other one waiting for weights.

A server whose node is lost is away: the run goes on with the others, and it is started again, with the newest weights,
as soon as a node has room for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from roll_flash.chat.prompt_logprobs import GENERATE_PATH, read_prompt_logprobs, score_request
from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import ClientSpec, InFlight, ServerUpdate, StagedWeights
from roll_flash.engines.places import Places
from roll_flash.errors import InferenceError, PlacementError
from roll_flash.inference.servers.control import HEALTH_TIMEOUT_S, Launcher, ServerControl
from roll_flash.inference.servers.metrics import logged_figures
from roll_flash.inference.servers.process import ServerProcess
from roll_flash.inference.servers.remote import RemoteServer
from roll_flash.inference.servers.update import update_server
from roll_flash.models.folder import read_object
from roll_flash.models.shape import expert_sizes
from roll_flash.processes.background import cancel_and_wait, gather_or_cancel, start_background
from roll_flash.processes.deadlines import LearnedDeadline, RecentCount
from roll_flash.processes.keys import new_key
from roll_flash.watchdog.activity import Activity, doing
from roll_flash.weight_sync.mirrors import Mirrors

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
AWAY_RETRY_S = 5.0
"""Interval in seconds between two attempts to start a server again whose node is lost."""
USUAL_START_S = 60.0
UNFIT = "do not fit the"
"""Part of a server's answer to weights that no server can load (`weight_sync.published`)."""
UPDATE_FLOOR_S = 60.0
"""Minimum timeout in seconds of one server's update. Otherwise it is 10 times the longest recent update."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ServerEngine:
    """`InferenceEngine` with `config.servers` servers that implement vLLM's routes: with `places` on the nodes of a Ray
    cluster, without them as child processes of this one."""

    def __init__(
        self,
        launcher: Launcher,
        config: InferenceConfig,
        *,
        model_folder: Path,
        max_model_len: int,
        logs: Path,
        places: Places | None = None,
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._hung_after_s = HUNG_AFTER * config.health_timeout_s
        self._model_folder = model_folder
        self._max_model_len = max_model_len
        self._key = new_key()
        self._logs = logs
        self._places = places
        self._busy: dict[ServerControl, asyncio.Lock] = {}
        self._restarts: dict[ServerControl, RecentCount] = {}
        self._servers = [self._new_server(index) for index in range(config.servers)]
        self._update_deadline = LearnedDeadline(floor_s=UPDATE_FLOOR_S, max_s=config.start_timeout_s)
        self._mirrors = Mirrors(_this_node())
        self._loading = asyncio.Lock()
        """Held while a server loads weights and while mirrors change."""
        self._on_device: StagedWeights | None = None
        """The newest weights, if they are on GPUs of the learner, until it overwrites them."""
        self._away: dict[ServerControl, float] = {}
        """Servers whose node is lost, with the time since when."""
        self._down: set[ServerControl] = set()
        """Servers that died and are not back yet."""
        self._supervisors: dict[ServerControl, asyncio.Task[None]] = {}
        self.deaths = 0
        """Number of server deaths, including kills of hung servers."""
        self.hung = 0
        self.lost = 0
        """Number of times that a server lost its node."""

    @property
    def dtype(self) -> str:
        """Compute dtype of the servers: `float32` or `bfloat16`."""
        return self._launcher.dtype

    async def start(self) -> None:
        try:
            await gather_or_cancel(*(server.start() for server in self._servers))
        except BaseException:
            await self.close()
            raise
        for server in self._servers:
            self._begin_to_supervise(server)

    def client_spec(self) -> ClientSpec:
        """Return the spec for one client; for more see `ClientSpec.clients`. Capacities are known after `start`;
        endpoints change when a server starts on another node."""
        ratio = self._config.admission_ratio
        vocabulary = self._model.get("vocab_size")
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
            returns_experts=self._launcher.returns_experts,
            vocabulary=vocabulary if isinstance(vocabulary, int) else None,
            expert_sizes=expert_sizes(self._model),
        )

    @cached_property
    def _model(self) -> dict[str, Any]:
        """The model's config.json."""
        return read_object(self._model_folder / "config.json")

    async def publish(self, weights: StagedWeights, *, in_flight: InFlight = "keep") -> list[ServerUpdate]:
        """Update one server after another, so that generation never stops on all. A server that is away, or dies or
        hangs meanwhile, gets the weights when it is back: the publication waits for it only if no other server is
        there.

        Raises InferenceError if a server cannot load the weights; all servers continue to generate.
        """
        if weights.update_info is None:
            there = {server.node_id for server in self._servers if server not in self._away}
            async with self._loading:  # to all nodes at once; one that fails is found when its server is updated
                await self._mirrors.bring(weights, there)
        updates: dict[ServerControl, ServerUpdate] = {}
        # A server that comes back meanwhile may still have older weights.
        while server := await self._next_without(updates):
            update = await self._update_unless_lost(server, weights, in_flight)
            if update is None:
                continue
            if not updates:
                # One server has loaded the weights, so they are valid; a restarted server must get them.
                await self._keep(weights)
            updates[server] = update
        return list(updates.values())

    async def forget_weights_on_devices(self) -> None:
        """See `InferenceEngine`. Waits for a server that loads them."""
        async with self._loading:
            self._on_device = None

    async def _keep(self, weights: StagedWeights) -> None:
        if weights.update_info is not None:
            self._on_device = weights
            return
        async with self._loading:
            await self._mirrors.keep(weights)

    @property
    def _newest(self) -> StagedWeights | None:
        return self._on_device or self._mirrors.newest

    @property
    def _there(self) -> list[ServerControl]:
        return [server for server in self._servers if server not in self._away and server not in self._down]

    async def _next_without(self, updates: Mapping[ServerControl, ServerUpdate]) -> ServerControl | None:
        """Return a server that is there and has no update yet. If none is there, wait for the first that comes back;
        `_bring_back` ends the run if none does."""
        while not updates and not self._there:  # noqa: ASYNC110 - several tasks change it
            await asyncio.sleep(SUPERVISE_EVERY_S)
        return next((server for server in self._there if server not in updates), None)

    async def resize(self, servers: int, *, before_removal: Callable[[], Awaitable[None]]) -> None:
        """Start more servers, with the newest weights, or end the last ones; `before_removal` tells clients that these
        are no longer in `client_spec`. Raises InferenceError or PlacementError; servers that started stay."""
        for index in range(len(self._servers), servers):
            server = self._new_server(index)
            try:
                await self._start_with_newest(server)
            except BaseException:
                await self._end(server)
                raise
            self._servers.append(server)
            self._begin_to_supervise(server)
        leaving, self._servers = self._servers[servers:], self._servers[:servers]
        if leaving:
            await before_removal()
        for server in leaving:
            async with self._busy[server]:
                await self._end(server)

    def _new_server(self, index: int) -> ServerControl:
        arguments = (index, self._launcher, self._config, self._logs, self._key)
        places = self._places
        server = ServerProcess(*arguments) if places is None else RemoteServer(*arguments, places)
        self._busy[server] = asyncio.Lock()
        self._restarts[server] = RecentCount(RESTART_WINDOW_S)
        return server

    def _begin_to_supervise(self, server: ServerControl) -> None:
        work = self._supervise(server)
        self._supervisors[server] = start_background(work, f"the supervision of {server.name}")

    async def _end(self, server: ServerControl) -> None:
        """End a server that is no longer wanted, and free its place."""
        if (task := self._supervisors.pop(server, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._away.pop(server, None)
        self._down.discard(server)
        await server.close()
        if self._places is not None:
            await self._places.give_back(f"server {server.index}")

    async def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """See `InferenceEngine`; without servers that are not there. If none is, wait for one."""
        while True:
            await self._next_without({})
            found = await asyncio.gather(*(self._score_unless_lost(server, token_ids) for server in self._there))
            if scores := [each for each in found if each is not None]:
                return scores

    async def metrics(self) -> dict[str, float]:
        """Return `deaths`, `hung` and `lost` so far, and of each numbered server `up` (1, or 0 while it is started
        again or away) and the metrics in `servers.metrics.LOGGED`."""
        servers = list(self._servers)
        texts = await asyncio.gather(*(server.metrics_text() for server in servers))
        figures = {"deaths": float(self.deaths), "hung": float(self.hung), "lost": float(self.lost)}
        for index, (server, text) in enumerate(zip(servers, texts, strict=True)):
            of_server = {"up": float(server in self._there), **logged_figures(text)}
            figures |= {f"{name}_{index}": value for name, value in of_server.items()}
        return figures

    async def close(self) -> None:
        await cancel_and_wait(self._supervisors.values())
        self._supervisors.clear()
        await asyncio.gather(*(server.close() for server in self._servers))
        await self._mirrors.close()

    def guards(self) -> list[int]:
        """Return the process ids of the servers' guards; each leads the process group of its server."""
        return [server.guard for server in self._servers if server.is_running]

    async def _score_unless_lost(self, server: ServerControl, token_ids: Sequence[int]) -> NDArray[np.float32] | None:
        try:
            return await self._score(server, token_ids)
        except (InferenceError, PlacementError) as error:
            if not await self._lose(server, error):
                raise
            return None

    async def _score(self, server: ServerControl, token_ids: Sequence[int]) -> NDArray[np.float32]:
        async with self._busy[server]:
            try:
                return await self._await_or_kill(server, _score(server, token_ids))
            except InferenceError:
                if not await _is_dead(server):
                    raise
            await self._restart(server)
            return await _score(server, token_ids)

    async def _update_unless_lost(
        self, server: ServerControl, weights: StagedWeights, in_flight: InFlight
    ) -> ServerUpdate | None:
        async with self._busy[server]:
            try:
                update = await self._update_or_restart(server, weights, in_flight)
            except (InferenceError, PlacementError) as error:
                if not await self._lose(server, error):
                    raise
                return None
            if update is not None:
                self._restarts[server].clear()
            return update

    async def _update_or_restart(
        self, server: ServerControl, weights: StagedWeights, in_flight: InFlight
    ) -> ServerUpdate | None:
        """Update one server. If it dies, hangs or fails during the update, such as for want of memory, return None, and
        its supervision restarts it; if it is the only one, restart it here, once. Raises InferenceError for weights
        that do not fit the model."""
        if server.is_running:
            try:
                return await self._await_or_kill(server, self._update(server, weights, in_flight))
            except InferenceError as error:
                if UNFIT in str(error) or await server.is_lost():
                    raise
                died = await _is_dead(server)
                _log.warning("%s %s new weights: %s", server.name, "died while it took" if died else "failed at", error)
        if server in self._supervisors and len(self._there) > 1:
            self._down.add(server)
            await server.stop()  # whatever is left of it has half the weights
            return None
        await self._restart(server)
        return await self._update(server, weights, in_flight)

    async def _update(
        self, server: ServerControl, weights: StagedWeights | None, in_flight: InFlight
    ) -> ServerUpdate | None:
        """Update one server, without `weights` with the newest ones that are kept, if any. Stop a server that takes
        far longer than usual, so that it is restarted."""
        async with self._loading:
            if (wanted := weights or self._newest) is None:
                return None
            limit_s = self._update_deadline.limit_s()
            try:
                with doing(
                    f"server {server.index}", "it takes new weights", then=f"it is killed after {limit_s:.0f} s"
                ):
                    async with asyncio.timeout(limit_s):
                        update = await update_server(server, await self._at(server, wanted), in_flight)
            except TimeoutError:
                await self._kill_hung(server, f"did not take new weights within {limit_s:.0f} s")
                message = f"{server.endpoint}: no new weights after {limit_s:.0f} s; see {server.log}"
                raise InferenceError(message) from None
            self._update_deadline.record(update.total_s)
            return update

    async def _at(self, server: ServerControl, weights: StagedWeights) -> StagedWeights:
        """Return the weights as the node of `server` has them. Raises InferenceError if it cannot get them."""
        if weights.update_info is not None:
            return weights
        at = await self._mirrors.bring(weights, {server.node_id})
        (found,) = at.values()
        if isinstance(found, InferenceError):
            raise found
        return found

    async def _await_or_kill(self, server: ServerControl, work: Coroutine[Any, Any, T]) -> T:
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

    async def _supervise(self, server: ServerControl) -> None:
        """Restart the server when it dies or hangs. Raises InferenceError if it cannot be started."""
        then = f"it is killed and started again after {self._hung_after_s:g} s (inference.health_timeout_s)"
        with doing(f"server {server.index}", "no answer", announced_s=HEALTH_TIMEOUT_S, then=then) as answer:
            await self._keep_alive(server, answer)

    async def _keep_alive(self, server: ServerControl, answer: Activity) -> None:
        answered, starts = time.monotonic(), server.starts
        while True:
            if server in self._away:
                await self._bring_back(server)
                answered, starts = time.monotonic(), server.starts
            await asyncio.sleep(SUPERVISE_EVERY_S)
            if self._busy[server].locked() or server.starts != starts or await server.is_healthy():
                answered, starts = time.monotonic(), server.starts
                answer.begin()
            elif await self._is_lost(server, answered):
                async with self._busy[server]:
                    # The previous lock holder may have restarted the server, so check its state again.
                    if server.starts == starts and await self._is_lost(server, answered):
                        try:
                            await self._revive(server)
                        except (InferenceError, PlacementError) as error:
                            if not await self._lose(server, error):
                                raise

    async def _is_lost(self, server: ServerControl, answered: float) -> bool:
        """True if the server is gone, or silent for too long since `answered`."""
        if not server.is_running:
            return True
        state, silent_s = await server.state(), time.monotonic() - answered
        return silent_s > {"gone": DEATH_NOTICE_S, "silent": self._hung_after_s, "healthy": math.inf}[state]

    async def _revive(self, server: ServerControl) -> None:
        if await server.state() == "silent":
            await self._kill_hung(server, f"did not answer for {self._hung_after_s:g} s")
        await self._restart(server)

    async def _kill_hung(self, server: ServerControl, what: str) -> None:
        self.hung += 1
        _log.warning("inference server %s %s; killing it", server.endpoint, what)
        await server.stop()

    async def _lose(self, server: ServerControl, error: Exception) -> bool:
        """After an `error`, return true if the server has lost its node; it is away then."""
        if server in self._away:
            return True
        if not await server.is_lost():
            return False
        self.lost += 1
        self._away[server] = time.monotonic()
        self._down.discard(server)
        _log.warning("%s is away, its node is lost: %s", server.name, error)
        await server.stop()
        return True

    async def _bring_back(self, server: ServerControl) -> None:
        """Try to start a server that is away. Raises InferenceError if all servers have been away for too long."""
        try:
            async with self._busy[server]:
                await self._start_with_newest(server)
                del self._away[server]
            _log.warning("%s is back", server.name)
            return
        except (InferenceError, PlacementError) as error:
            _log.info("%s stays away: %s", server.name, error)
            limit_s = self._config.start_timeout_s
            if len(self._away) == len(self._servers) and time.monotonic() - max(self._away.values()) > limit_s:
                raise InferenceError(
                    f"no server came back within {limit_s:g} s (inference.start_timeout_s): {error}"
                ) from None
        await server.stop()
        await asyncio.sleep(AWAY_RETRY_S)

    async def _start_with_newest(self, server: ServerControl) -> None:
        """Start a server and give it the newest weights, also if they become the newest meanwhile."""
        await server.start()
        given = None
        while (newest := self._newest) is not given:
            given = newest
            await self._update(server, None, "keep")

    async def _restart(self, server: ServerControl) -> None:
        if await server.is_lost():
            raise InferenceError(f"the node of {server.name} is lost")
        self.deaths += 1
        if self._restarts[server].add(time.monotonic()) > MAX_RESTARTS:
            raise InferenceError(
                f"server {server.endpoint} died {MAX_RESTARTS + 1} times within {RESTART_WINDOW_S / 60:g} minutes; "
                f"see {server.log}"
            )
        _log.warning("inference server %s died; starting it again, see %s", server.endpoint, server.log)
        self._down.add(server)
        began_s = time.monotonic()
        with doing(f"server {server.index}", "it starts again", announced_s=USUAL_START_S):
            await server.stop()
            await self._start_with_newest(server)
        self._down.discard(server)
        _log.warning("%s is back after %.0f s", server.name, time.monotonic() - began_s)


def _this_node() -> str:
    """Ray's id of this node; empty without Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


async def _is_dead(server: ServerControl) -> bool:
    """True if the server is dead, checked after an error. Its guard needs a moment to notice, and may itself be
    stopped; a server that answers is not dead."""
    deadline = time.monotonic() + DEATH_NOTICE_S
    while True:
        state = await server.state()
        if state == "healthy" or not server.is_running or time.monotonic() > deadline:
            return state == "gone"
        await asyncio.sleep(0.1)


async def _score(server: ServerControl, token_ids: Sequence[int]) -> NDArray[np.float32]:
    answer: Any = await server.post(GENERATE_PATH, score_request(token_ids), timeout_s=SCORE_TIMEOUT_S)
    try:
        return read_prompt_logprobs(answer, token_ids)
    except ValueError as error:
        raise InferenceError(f"{server.endpoint}: {error}") from None
