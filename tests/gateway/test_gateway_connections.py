"""An agent cannot take the descriptors of a gateway, and so the place of all other agents."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable

import httpx
import pytest
from conftest import MODEL, Served, until

from roll_flash.gateway import connections, server
from roll_flash.gateway.sessions.session import SessionSettings

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def ask_and_keep(served: Served, says: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which one request was answered; `says` is what the answer says of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
    await ask(served, reader, writer, says)
    return reader, writer


async def ask(served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, says: str = "") -> None:
    key = served.session.api_key
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b"200 ok" in head
    assert head.partition(b"connection:")[2].split(b"\r\n")[0].strip() == says.encode()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))


def test_an_agent_keeps_a_few_connections_between_its_requests(serve: Callable[..., None]) -> None:
    async def work(served: Served) -> None:
        kept = [await ask_and_keep(served) for _ in range(connections.MAX_KEPT)]
        further, _ = await ask_and_keep(served, says="close")
        assert await further.read() == b""
        assert not any(reader.at_eof() for reader, _ in kept), "none is closed behind the agent's back"
        assert served.gateway.metrics()["gateway_kept_connections"] == connections.MAX_KEPT
        for each in kept:
            await ask(served, *each)
        kept[0][1].close()
        await until(lambda: served.gateway.metrics()["gateway_kept_connections"] < connections.MAX_KEPT)
        await ask_and_keep(served)  # in the place of the one that the agent closed

    serve(work, ["Hello."])


def test_who_has_no_key_keeps_no_connection(serve: Callable[..., None]) -> None:
    async def work(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer nobody\r\n\r\n")
        answer = (await reader.read()).lower()
        assert answer.startswith(b"http/1.1 401")
        assert b"connection: close" in answer

    serve(work, ["Hello."])


def test_connections_of_a_session_that_ended_wait_a_while_for_the_next(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may serve many sessions; what it would send just now must not meet a closed connection."""
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.5)

    async def work(served: Served) -> None:
        used, unused = [await ask_and_keep(served) for _ in range(2)]
        await served.gateway.end_session(served.session)
        served.session = served.gateway.open_session(SessionSettings())
        await ask(served, *used)
        assert await unused[0].read() == b""
        assert not used[0].at_eof()
        await ask(served, *used)

    serve(work, ["Hello."])


def test_a_connection_that_another_session_uses_by_now_does_not_end_with_the_first(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.1)

    async def work(served: Served) -> None:
        first = served.session
        used = await ask_and_keep(served)
        served.session = served.gateway.open_session(SessionSettings())
        await ask(served, *used)
        await served.gateway.end_session(first)
        await asyncio.sleep(0.3)
        await ask(served, *used)

    serve(work, ["Hello."])


def test_connections_on_which_nothing_is_asked_lose_their_places(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE_CONNECTIONS", 8)

    async def work(served: Served) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", served.gateway.port) for _ in range(12)]
        for reader, _ in silent[:4]:
            assert await reader.read() == b""
        assert (await served.http.get("/v1/models")).status_code == 200

    serve(work, ["Hello."])


def test_connections_that_come_all_at_once_are_no_more_than_there_may_be(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one turn of the event loop were forgotten before they were connected, and stayed for ever."""
    monkeypatch.setattr(connections, "MAX_IDLE_CONNECTIONS", 8)

    async def work(served: Served) -> None:
        silent = [socket.create_connection(("127.0.0.1", served.gateway.port)) for _ in range(40)]
        for each in silent[:32]:
            each.setblocking(False)
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(each, 1), 5) == b""
        await until(lambda: served.gateway.metrics()["gateway_kept_connections"] == 8)
        for each in silent:
            each.close()

    serve(work, ["Hello."])


def test_silent_connections_leave_descriptors_where_the_process_may_have_few(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)

    async def work(served: Served) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", served.gateway.port) for _ in range(20)]
        await until(lambda: served.gateway.metrics()["gateway_kept_connections"] == 8)
        for _, writer in silent:
            writer.close()

    serve(work, ["Hello."])


def test_who_connects_and_leaves_again_and_again_takes_nobodys_place(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE_CONNECTIONS", 8)

    async def work(served: Served) -> None:
        waiting = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
            writer.close()
            await until(lambda: served.gateway.metrics()["gateway_kept_connections"] == 1)
        await ask(served, *waiting)

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


def test_an_agent_that_never_ends_its_requests_takes_no_more_than_its_places(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_OPEN_REQUESTS", 8)

    async def begin(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        key = served.session.api_key
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Api-Key: {key}\r\nContent-Length: 9\r\n\r\n"
        writer.write(head.encode())
        return reader, writer

    async def work(served: Served) -> None:
        begun = [await begin(served) for _ in range(8)]
        await until(lambda: served.session.open_requests == 8)
        reader, _ = await begin(served)
        assert b" 429 " in await reader.readline()
        other = served.gateway.open_session(SessionSettings())
        answer = await served.http.get("/v1/models", headers={"Authorization": f"Bearer {other.api_key}"})
        assert answer.status_code == 200
        begun[0][1].close()
        await until(lambda: served.session.open_requests == 7)
        assert (await served.http.get("/v1/models")).status_code == 200

    serve(work, ["Hello."])


def test_a_gateway_takes_the_descriptors_that_it_may_have(serve: Callable[..., None]) -> None:
    """A shell's usual limit is 1,024, which connections on which nothing is asked would use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))

    async def work(served: Served) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", served.gateway.port) for _ in range(300)]
        assert (await served.http.get("/v1/models")).status_code == 200
        assert not any(reader.at_eof() for reader, _ in silent)

    try:
        serve(work, ["Hello."])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
