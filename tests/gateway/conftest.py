"""A gateway over a tiny model here in the process, for each chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from scripted_model import END, ScriptedClient, TinyModel

from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions.session import Session, SessionSettings
from roll_flash.gateway.token_backend import TokenBackend

MODEL = "policy"
MAX_LENGTH = 4096


@dataclass
class Served:
    """A running gateway and one open session of it."""

    gateway: GatewayServer
    client: ScriptedClient
    session: Session
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})


Serve = Callable[..., Any]
Work = Callable[[Served], Awaitable[None]]


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    return TinyModel()


@pytest.fixture
def serve(tiny: TinyModel) -> Callable[..., None]:
    """Runs `work` with a gateway: `serve(work, texts, style=...)`. `texts` is what the model says, turn by turn."""

    def run(work: Work, texts: list[str], style: str = "chatml", **options: Any) -> None:
        async def whole() -> None:
            async with asyncio.timeout(60), opened(tiny, texts, style, **options) as served:
                await work(served)

        asyncio.run(whole())

    return run


async def until(condition: Callable[[], Any]) -> None:
    """Waits for something to become true, for half a minute at most."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


@asynccontextmanager
async def opened(
    tiny: TinyModel,
    texts: list[str],
    style: str,
    *,
    settings: SessionSettings | None = None,
    max_length: int = MAX_LENGTH,
    timeout_s: float = 30.0,
) -> AsyncIterator[Served]:
    tokenizer = tiny.tokenizer(style)
    client = ScriptedClient(tiny, tokenizer, lambda number: texts[number % len(texts)], END[style])
    backend = TokenBackend(client, tokenizer, model=MODEL, max_length=max_length)
    gateway = GatewayServer(backend, call_timeout_s=timeout_s)
    await gateway.start()
    session = gateway.open_session(settings or SessionSettings())
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"http://127.0.0.1:{gateway.port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        try:
            yield Served(gateway, client, session, http)
        finally:
            await gateway.close()
