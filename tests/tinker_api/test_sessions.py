"""A learner is closed with the session of its client, however that ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_flash.gateway.server import GatewayServer
from roll_flash.tinker.routes import ClientSession, TinkerRoutes


def test_a_session_is_closed_to_its_end_though_its_client_goes_away() -> None:
    async def scenario() -> None:
        backend: Any = SimpleNamespace(model="tiny", max_length=64)
        servers: Any = SimpleNamespace()
        routes = TinkerRoutes(GatewayServer(backend, call_timeout_s=1), servers, frozenset(), Path())
        began, go, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def close() -> None:
            began.set()
            await go.wait()
            closed.set()

        model: Any = SimpleNamespace(close=close)
        session = ClientSession("one", model=model)
        routes._sessions["one"] = session
        asked = asyncio.create_task(routes._end(session))
        await began.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        ending = asyncio.create_task(routes.close())
        await asyncio.sleep(0.05)
        assert not ending.done()  # Ray must not be shut down before
        go.set()
        await asyncio.wait_for(ending, 20)
        assert closed.is_set()

    asyncio.run(scenario())
