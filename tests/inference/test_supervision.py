"""When a server is started again, and when it is left alone. The server is a stand-in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import ServerUpdate, StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers import engine as server_engine
from roll_flash.inference.servers.control import ServerControl
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.processes.background import first_failure

WEIGHTS = StagedWeights(1, "/weights", 8)


class StandIn:
    """A server whose state is set by hand."""

    endpoint, log, version, kv_cache_tokens = "http://a", Path("/a.log"), 0, None
    name, node_id, index = "server 0", "", 0

    def __init__(self) -> None:
        self.is_running = True
        self.says: Literal["healthy", "silent", "gone"] = "healthy"
        self.starts = 1
        self.stops = 0

    async def state(self) -> str:
        return self.says if self.is_running else "gone"

    async def is_healthy(self) -> bool:
        return await self.state() == "healthy"

    async def is_lost(self) -> bool:
        return False

    async def start(self) -> None:
        self.starts += 1
        self.is_running, self.says = True, "healthy"

    async def stop(self) -> None:
        self.stops += 1
        self.is_running = False

    async def close(self) -> None:
        self.is_running = False


def engine_of(server: StandIn, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ServerEngine:
    monkeypatch.setattr(server_engine, "SUPERVISE_EVERY_S", 0.01)
    monkeypatch.setattr(server_engine, "DEATH_NOTICE_S", 0.05)
    monkeypatch.setattr(server_engine, "ServerProcess", lambda *_: server)
    config = InferenceConfig(engine="transformers", health_timeout_s=0.05)
    engine = open_engine(config, model_folder=folder, max_model_len=8, logs=folder)
    assert isinstance(engine, ServerEngine)
    return engine


def test_a_server_that_was_just_started_again_is_not_killed_for_what_was_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The supervision finds it hung, and waits for a publication that starts it again meanwhile."""

    class Publication:
        def locked(self) -> bool:
            return False

        async def __aenter__(self) -> None:
            await server.start()
            ended.set()

        async def __aexit__(self, *_: object) -> None:
            return None

    server, ended = StandIn(), asyncio.Event()
    server.says = "silent"

    async def run() -> None:
        engine = engine_of(server, monkeypatch, tmp_path)
        engine._hung_after_s = 0.05
        cast(Any, engine._busy)[server] = Publication()
        supervising = asyncio.create_task(engine._supervise(cast(ServerControl, server)))
        async with asyncio.timeout(30):
            await ended.wait()
        await asyncio.sleep(0.2)
        supervising.cancel()

    asyncio.run(run())
    assert (server.starts, server.stops) == (2, 0)


def test_a_server_that_dies_again_and_again_ends_the_run_and_old_deaths_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_engine, "RESTART_WINDOW_S", 0.6)

    async def run() -> None:
        server = StandIn()
        engine = engine_of(server, monkeypatch, tmp_path)

        async def die(times: int) -> None:
            for starts in range(server.starts, server.starts + times):
                server.is_running = False
                while server.starts == starts and not failure.happened.is_set():  # noqa: ASYNC110 - a stand-in
                    await asyncio.sleep(0.01)

        with first_failure() as failure:
            await engine.start()
            for _ in range(2):
                await die(3)
                await asyncio.sleep(0.7)
            assert failure.error is None
            await die(4)
            async with asyncio.timeout(10):
                await failure.happened.wait()
            await engine.close()
            failure.raise_error()

    with pytest.raises(InferenceError, match="died 4 times within"):
        asyncio.run(run())


def test_an_update_that_takes_far_longer_than_the_last_ones_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server answers all the while; it is started again and takes the weights then."""
    monkeypatch.setattr(server_engine, "UPDATE_FLOOR_S", 0.1)
    took_s = [0.01, 3600.0, 0.01]

    async def update(server: StandIn, weights: StagedWeights, in_flight: str) -> ServerUpdate:
        seconds = took_s.pop(0)
        await asyncio.sleep(seconds)
        return ServerUpdate("a", weights.version, seconds, seconds)

    monkeypatch.setattr(server_engine, "update_server", update)

    async def run() -> StandIn:
        server = StandIn()
        engine = engine_of(server, monkeypatch, tmp_path)

        async def keep(weights: StagedWeights) -> None:
            return None

        monkeypatch.setattr(engine._mirrors, "keep", keep)
        async with asyncio.timeout(30):
            await engine.publish(WEIGHTS)
            await engine.publish(WEIGHTS)
        return server

    server = asyncio.run(run())
    assert took_s == []
    assert server.stops >= 1
