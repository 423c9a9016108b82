"""A learner is closed with the session of its client, however that ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_flash.config.sections.learner import LoraConfig
from roll_flash.gateway.apis.api_error import ApiError
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


def test_of_two_models_that_are_asked_for_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        closed: list[str] = []

        class Model:
            def __init__(self, model_id: str, *_: Any) -> None:
                self.model_id = model_id

            async def open(self, *_: Any, **__: Any) -> dict[str, Any]:
                await asyncio.Event().wait()
                return {}

            async def close(self) -> None:
                closed.append(self.model_id)

        monkeypatch.setattr("roll_flash.tinker.routes.TrainedModel", Model)
        backend: Any = SimpleNamespace(model="tiny", max_length=64)
        servers: Any = SimpleNamespace(config=SimpleNamespace(learner=SimpleNamespace(lora=LoraConfig())))
        routes = TinkerRoutes(GatewayServer(backend, call_timeout_s=1), servers, frozenset({"tiny"}), Path())
        for name in ("one", "two"):
            routes._sessions[name] = ClientSession(name)

        def wanted(session_id: str, number: int = 0) -> dict[str, Any]:
            return {
                "session_id": session_id,
                "model_seq_id": number,
                "base_model": "tiny",
                "lora_config": {"rank": 2},
            }

        first = await routes._create_model(wanted("one"))
        assert await routes._create_model(wanted("one")) == first, "it may be sent again"
        for other in (wanted("two"), wanted("one", 1)):
            with pytest.raises(ApiError, match="session one trains a model, and one is trained at a time"):
                await routes._create_model(other)
        await routes.close()
        assert closed == [first["model_id"]]

    asyncio.run(scenario())
