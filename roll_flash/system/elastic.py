"""Changes the servers and workers of a run while it runs, and tells workers where the servers are.

Servers move when their node is lost, and come and go on request (`roll-flash scale`). Workers learn of both within
FOLLOW_EVERY_S; until then their requests to a server that is gone wait or go to another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roll_flash.engines.inference import ClientSpec, InferenceEngine
from roll_flash.errors import InferenceError, PlacementError, RollFlashError
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.rollout.fleet import WORKER_DIED, WorkerFleet
from roll_flash.run.scale_request import ScaleRequest, answer_request, take_request

FOLLOW_EVERY_S = 1.0


class ElasticParts:
    """The servers and workers of a run. `run` is a background task for the whole run."""

    def __init__(
        self, engine: InferenceEngine, fleet: WorkerFleet, spec: ClientSpec, folder: Path, note: Callable[[str], None]
    ) -> None:
        """`spec`: what the workers were started with; `folder`: the run's folder, where requests arrive."""
        self._engine = engine
        self._fleet = fleet
        self._spec = spec
        self._folder = folder
        self._note = note

    async def run(self) -> None:
        while True:
            await self._tell_workers()
            request = await asyncio.to_thread(take_request, self._folder)
            if request is not None:
                await self._answer(request)
            await asyncio.sleep(FOLLOW_EVERY_S)

    async def _tell_workers(self) -> None:
        """Tell all workers of the servers and of the share of them that each may use."""
        new = replace(self._engine.client_spec(), clients=self._fleet.size, pin_sessions=self._spec.pin_sessions)
        if new != self._spec:
            self._spec = new
            await self._fleet.use(new)

    async def _answer(self, request: ScaleRequest) -> None:
        try:
            text, done = await self._scale(request), True
        except (PlacementError, InferenceError) as error:
            text, done = str(error), False
        self._note(f"scaling: {text}")
        await asyncio.to_thread(lambda: answer_request(self._folder, request, text, done=done))

    async def _scale(self, request: ScaleRequest) -> str:
        """Carry out a request; return the numbers that there are now. Raises PlacementError or InferenceError; parts
        that were already added stay."""
        if request.servers is not None:
            if not isinstance(self._engine, ServerEngine):
                raise InferenceError("the servers of this engine cannot be scaled")
            self._note(f"scaling: to {request.servers} server(s)")
            await self._engine.resize(request.servers, before_removal=self._tell_workers)
            await self._tell_workers()
        if request.workers is not None:
            self._note(f"scaling: to {request.workers} worker(s)")
            await self._resize_fleet(request.workers)
            await self._tell_workers()
        return f"{self._engine_size()} server(s) and {self._fleet.size} worker(s) now"

    async def _resize_fleet(self, workers: int) -> None:
        try:
            await self._fleet.resize(workers)
        except PlacementError:
            raise
        except (RollFlashError, *WORKER_DIED) as error:
            raise PlacementError(f"not all workers started: {error}") from None

    def _engine_size(self) -> int:
        return len(self._engine.client_spec().endpoints)
