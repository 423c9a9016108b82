"""HTTP/1.1 client for one server with minimal work per request: a stack of idle connections and a C parser.

This is the hot path of the rollout: every turn of every episode passes here. A request takes the most recently used
connection in O(1). `benchmarks/clients.py` compares it with aiohttp and httpx.

Invariants: one request at a time per connection; a connection whose request was cancelled is closed, which cancels the
request on the server; no timeouts here (the caller sets them) except CONNECT_TIMEOUT_S for new connections.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from roll_flash.errors import ConfigError
from roll_flash.processes.keys import bearer

CONNECT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 * 2**20
"""Maximum size of an answer in bytes; a valid answer to a generate request is shorter."""

Receiver = Callable[[bytes], None]


class ConnectionLostError(Exception):
    """The server could not be reached, or closed the connection before its answer was complete."""


class BadAnswerError(Exception):
    """The server's answer is invalid."""


@dataclass(slots=True)
class Answer:
    """An HTTP answer. `body` is empty if its parts went to a receiver."""

    status: int
    body: bytes


class HttpConnections:
    """Connections to one endpoint, `http://host:port`. Belongs to one event loop."""

    def __init__(self, endpoint: str, key: str = "") -> None:
        """`key`: sent with every request if not empty."""
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{endpoint}: an inference server is reached at http://host:port")
        self._host = parts.hostname
        self._port = parts.port or 80
        headers = {"Host": parts.netloc, "Accept": "*/*", **bearer(key)}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self.round_trip_s = 0.0 if self._host.startswith("127.") else math.inf
        """Shortest time in seconds in which a connection was opened so far; 0 on this machine, however busy it is."""

    async def post(self, path: str, body: bytes, receiver: Receiver | None = None) -> Answer:
        """Send a POST request. The parts of a text/event-stream answer go to `receiver`, if given, as they arrive.

        Raises ConnectionLostError, or BadAnswerError if the answer is not HTTP or `receiver` raises it.
        """
        head = (
            f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._ask(head.encode() + body, receiver)

    async def get(self, path: str) -> Answer:
        return await self._ask(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode(), None)

    def interrupt(self, reason: str) -> int:
        """End every request in flight with ConnectionLostError. Return the number of these requests."""
        interrupted = list(self._busy)
        for connection in interrupted:
            connection.fail(ConnectionLostError(reason))
        for connection in self._idle:
            connection.drop()
        self._idle.clear()
        return len(interrupted)

    def close(self) -> None:
        self.interrupt("the client was closed")

    async def _ask(self, request: bytes, receiver: Receiver | None) -> Answer:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, request, receiver)
                except ConnectionLostError:
                    # The server may close an idle connection just when it is used again.
                    if connection.has_answered:
                        raise
        return await self._exchange(await self._connect(), request, receiver)

    async def _exchange(self, connection: _Connection, request: bytes, receiver: Receiver | None) -> Answer:
        self._busy.add(connection)
        try:
            answer = await connection.ask(request, receiver)
        except BaseException:
            connection.drop()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def can_be_reached(self) -> bool:
        """Try to open a connection."""
        try:
            connection = await self._connect()
        except ConnectionLostError:
            return False
        connection.drop()
        return True

    async def _connect(self) -> _Connection:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except TimeoutError:
            raise ConnectionLostError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConnectionLostError(error.strerror or str(error)) from None
        self.round_trip_s = min(self.round_trip_s, time.perf_counter() - began)
        return connection


class _Connection(asyncio.Protocol):
    """One keep-alive connection. Its parser calls the methods `on_*`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._receiver: Receiver | None = None
        self.is_open = True
        self.has_answered = False
        """True if any data has arrived for the newest request."""

    def ask(self, request: bytes, receiver: Receiver | None) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._length = 0
        self._is_stream = self.has_answered = False
        self._receiver = receiver
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def drop(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.drop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.fail(ConnectionLostError(f"connection lost: {exc}" if exc else "the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.drop()  # no request is open
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(BadAnswerError(f"not an HTTP answer ({error}): {data[:80]!r}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = self._receiver is not None and value.startswith(b"text/event-stream")

    def on_body(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > MAX_ANSWER_BYTES:
            self.fail(BadAnswerError(f"an answer of more than {MAX_ANSWER_BYTES} bytes"))
        elif not self._is_stream:
            self._body.append(part)
        elif self._answer is not None and not self._answer.done():
            assert self._receiver is not None
            try:
                self._receiver(part)
            except BadAnswerError as error:
                self.fail(error)

    def on_message_complete(self) -> None:
        if self._answer is None or self._answer.done():
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._answer.set_result(Answer(self._parser.get_status_code(), body))
        if not self._parser.should_keep_alive():
            self.drop()
