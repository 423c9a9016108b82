"""How messages reach an MCP server: stdin and stdout of a command in the sandbox, or HTTP.

A server is hostile: it is read only while a request waits for its answer, and within bounds. One that floods at other
times waits on its full pipe. No task runs between two requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler

from roll_flash.envs.tools.functions import ToolError
from roll_flash.sandboxes import Sandbox, SandboxError
from roll_flash.sandboxes.client.commands import CommandStream
from roll_flash.sandboxes.network.egress import may_reach

logger = logging.getLogger("roll_flash.envs")

MAX_ANSWER_BYTES, PART_BYTES = 8 << 20, 100
"""Most that a server may send while one request waits. Each line, and each bracket that begins a list or an object of
JSON, counts as PART_BYTES more: reading them takes the time of so many bytes of text, or longer."""
TOO_MUCH = f"it sent more than {MAX_ANSWER_BYTES >> 20} MiB, or very many lines or brackets, for one request"
STDERR_BYTES = 300
CONNECT_S, CLOSE_S = 20.0, 3.0
FAILED_STATUS = frozenset({401, 404, 408, 429, 502, 503, 504})
"""HTTP statuses with which a server, or what stands before it, has failed. With others from 400 on one request has: a
model can cause them, by the arguments of a call."""


class ServerLostError(Exception):
    """The server has ended, or broke the protocol so that it cannot be used any more."""


class StdioConnection:
    """A command in the sandbox that reads and writes one message a line. Methods raise SandboxError too."""

    def __init__(self, sandbox: Sandbox, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._running = sandbox.stream(command, timeout=None, stdin=True, env=env)
        self._stack = contextlib.AsyncExitStack()
        self._stream: CommandStream | None = None
        self._lines, self._unread, self._stderr = _Lines(ServerLostError), deque[bytes](), b""
        self._is_begun = False
        """Whether a message was given up while it was sent: the next must not continue its line."""

    async def exchange(self, message: bytes) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the messages that come then. Raises ServerLostError."""
        self._lines.left = MAX_ANSWER_BYTES
        await self.send(message)
        assert self._stream is not None
        while True:
            while self._unread:  # also what came with the last answer
                yield self._unread.popleft()
            if (chunk := await self._stream.next()) is None:
                break
            is_message = chunk.source == "stdout"
            self._unread += self._lines.feed(chunk.data if is_message else b"", len(chunk.data))
            if not is_message:
                self._stderr = (self._stderr + chunk.data)[-STDERR_BYTES:]
        code = self._stream.result.exit_code if self._stream.result else None
        said = self._stderr.decode(errors="replace").strip()
        raise ServerLostError(f"it ended with exit code {code}{': ' if said else ''}{said}")

    async def send(self, message: bytes) -> None:
        """Send a message that has no answer."""
        if self._stream is None:
            self._stream = await self._stack.enter_async_context(self._running)
        line_end = b"\n" if self._is_begun else b""
        self._is_begun = True
        await self._stream.send(line_end + message + b"\n")
        self._is_begun = False

    async def close(self) -> None:
        """Kill the command and all that it started. Never raises."""
        with contextlib.suppress(SandboxError):
            await self._stack.aclose()


class HttpConnection:
    """A server outside of the sandbox (streamable HTTP): one POST a message, answered by JSON or by events."""

    def __init__(self, url: str, allow: Sequence[str], api_key: str | None) -> None:
        def allowed_socket(info: aiohttp.AddrInfoType) -> socket.socket:
            """The last place before a connection, whatever names and addresses led here."""
            family, kind, protocol, _, address = info
            host, port = str(address[0]), int(address[1])
            if not may_reach(allow, ipaddress.ip_address(host.partition("%")[0]), port):
                raise OSError(errno.EACCES, f"its address {host} is not public, and mcp_allow does not name it")
            return socket.socket(family, kind, protocol)

        self._url = url
        self._is_waiting, self._allowance = False, _Allowance()
        connector = aiohttp.TCPConnector(socket_factory=allowed_socket)
        connector._factory = partial(_Protocol, asyncio.get_running_loop(), self._allowance)  # type: ignore[assignment]
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),  # callers have a deadline
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self.headers = {
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **({} if api_key is None else {"Authorization": f"Bearer {api_key}"}),
        }

    async def exchange(self, message: bytes) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the messages that come then.

        Raises ToolError for a request that is refused, ServerLostError for a server that has failed.
        """
        # An answer to a question of the server, while our own request waits, gets no allowance of its own.
        is_answer, self._is_waiting = self._is_waiting, True
        if not is_answer:
            self._allowance.left = MAX_ANSWER_BYTES
        try:
            async with self._http.post(self._url, data=message, headers=self.headers, allow_redirects=False) as answer:
                if not 200 <= (status := answer.status) < 300:
                    refused = status >= 400 and status not in FAILED_STATUS
                    moved = answer.headers.get("Location", "")[:200]
                    raise (ToolError if refused else ServerLostError)(f"it answered with HTTP status {status} {moved}")
                if (session := answer.headers.get("Mcp-Session-Id")) is not None:
                    if re.fullmatch("[!-~]+", session) is None:  # as MCP requires; others may be no header to send
                        raise ServerLostError("its Mcp-Session-Id is not made of visible ASCII characters")
                    self.headers.setdefault("Mcp-Session-Id", session)
                # aiohttp's own `content_type` raises any error for some values of the header
                kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                is_events, lines, data = kind == "text/event-stream", _Lines(ToolError), list[bytes]()
                async for chunk in answer.content.iter_any():
                    for line in lines.feed(chunk, len(chunk)):
                        if not is_events or line.startswith(b"data:"):
                            data.append(line[5:] if is_events else line)
                        elif not line.strip() and data:
                            yield b"\n".join(data)
                            data = []
                if self._allowance.left < 0:  # its connection was broken off, which ends a body that has no length
                    raise ToolError(TOO_MUCH)
                if not is_events:
                    yield b"\n".join([*data, lines.begun])
        except (aiohttp.ClientError, OSError) as error:
            if self._allowance.left < 0:
                raise ToolError(TOO_MUCH) from None
            raise ServerLostError(f"{type(error).__name__}: {error}") from None
        finally:
            self._is_waiting = is_answer
            if not is_answer:
                self._allowance.left = 0

    async def send(self, message: bytes) -> None:
        """Send a message that has no answer."""
        async with contextlib.aclosing(self.exchange(message)) as answers:
            await anext(answers, b"")

    async def close(self) -> None:
        """End the session on the server too, if it answers in time. Never raises."""
        self._allowance.left = MAX_ANSWER_BYTES
        try:
            if "Mcp-Session-Id" in self.headers and not self._http.closed:
                ending = self._http.delete(self._url, headers=self.headers, allow_redirects=False)
                async with asyncio.timeout(CLOSE_S), ending:
                    pass
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            logger.debug("MCP server %s did not end its session: %s", self._url, error)
        finally:
            await self._http.close()


class _Allowance:
    """What a server may still send over all its connections, with all that HTTP puts around a message."""

    left = 0


class _Protocol(ResponseHandler):
    """A connection that breaks off when the server sends more than it may: aiohttp reads all answers that come, also
    provisional ones and those that nobody has asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, allowance: _Allowance) -> None:
        super().__init__(loop)
        self._allowance = allowance

    def data_received(self, data: bytes) -> None:
        self._allowance.left -= len(data) + PART_BYTES * data.count(b"\n")
        if self._allowance.left >= 0 or not data:
            super().data_received(data)
        elif self.transport is not None:
            self.transport.abort()  # who waits for an answer is told


class _Lines:
    """Cuts what a server sends into lines, in linear time. `left`: bytes that it may still send, else `error`."""

    def __init__(self, error: type[Exception]) -> None:
        self.begun, self.left, self._error = bytearray(), MAX_ANSWER_BYTES, error

    def feed(self, data: bytes, size: int) -> list[bytes]:
        """Return the lines that `data` completes, without their end. `size` counts, also for other data."""
        *ended, rest = data.split(b"\n")
        self.left -= size + PART_BYTES * (len(ended) + data.count(b"[") + data.count(b"{"))
        if self.left < 0:
            raise self._error(TOO_MUCH)
        if ended:
            ended[0] = bytes(self.begun + ended[0])
            self.begun.clear()
        self.begun += rest
        return ended
