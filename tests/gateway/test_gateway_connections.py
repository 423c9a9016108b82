"""An agent cannot take the descriptors of a gateway, and so the place of all other agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from conftest import MODEL, Served, until

from roll_flash.gateway import connections

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def ask_and_keep(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which one request was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
    key = served.session.api_key
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    await reader.readexactly(length)
    return reader, writer


def test_an_agent_keeps_a_few_connections_between_its_requests(serve: Callable[..., None]) -> None:
    async def work(served: Served) -> None:
        kept = [await ask_and_keep(served) for _ in range(connections.MOST_IDLE + 5)]
        for reader, _ in kept[:5]:
            assert await reader.read() == b"", "those that it has not used for longest are closed"
        assert not any(reader.at_eof() for reader, _ in kept[5:])
        assert served.gateway.metrics()["gateway_idle_connections"] == connections.MOST_IDLE
        assert (await served.http.post("/v1/chat/completions", json=BODY)).status_code == 200

    serve(work, ["Hello."])


def test_its_connections_end_with_its_session(serve: Callable[..., None]) -> None:
    async def work(served: Served) -> None:
        reader, _ = await ask_and_keep(served)
        await served.gateway.end_session(served.session)
        assert await reader.read() == b""
        assert (await served.http.get("/v1/models")).status_code == 410

    serve(work, ["Hello."])


def test_connections_on_which_nothing_is_asked_lose_their_places(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_SILENT", 8)

    async def work(served: Served) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", served.gateway.port) for _ in range(12)]
        for reader, _ in silent[:4]:
            assert await reader.read() == b""
        assert (await served.http.get("/v1/models")).status_code == 200

    serve(work, ["Hello."])


def test_a_connection_on_which_nothing_is_asked_is_closed_after_a_while(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.1)

    async def work(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX-Slow: ")
        assert await reader.read() == b""

    serve(work, ["Hello."])


def test_a_connection_with_a_request_under_way_is_never_closed(serve: Callable[..., None]) -> None:
    async def work(served: Served) -> None:
        served.client.delay_s = 1.0
        url, headers = served.url, {"Authorization": f"Bearer {served.session.api_key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30, limits=limits) as http:
            asked = [asyncio.ensure_future(http.post("/v1/chat/completions", json=BODY)) for _ in range(40)]
            await until(lambda: served.session.requests_in_flight == 40)
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}

    serve(work, ["Hello."])
