"""One session of an OpenEnv server: a WebSocket with a private environment on the server (openenv-core 0.3).

The server's HTTP `/reset` and `/step` make a new environment for every request, so episodes need the WebSocket. It
carries only JSON messages, so OpenEnv's package is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from roll_flash.chat.model_text import MAX_DEPTH, encodable, is_deeper
from roll_flash.errors import ConfigError, EnvError
from roll_flash.processes.background import cancel_and_wait

NAME = "OpenEnv-v0"
FULL_POLL_S = 0.5
"""Seconds between retries if the server has no free session."""
PROBE_S = 3.0
"""Maximum seconds that a busy server may take to answer `/schema`."""
CLOSE_S = 3.0
PING_S = 0.05
"""Seconds after the answer to a ping in which nothing is read: a flood of pings would hold up the worker."""
MAX_MESSAGE_BYTES, MAX_SCHEMA_BYTES = 8 << 20, 8 << 20
MAX_MARKS = 500_000
"""Maximum number of commas and opening brackets in one message: more values block a worker for seconds and take
gigabytes."""


class WrongAction(Exception):
    """The server rejects the action as invalid. The message is shown to the model."""


class SessionEnded(WrongAction):
    """The server ended its session because of the action, did not finish the action in time, or its answer is too
    large, or none that can be read."""


class OpenEnvConnection:
    """Client of one server; belongs to one event loop. Every method raises EnvError if the server is down or fails."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises ConfigError. `timeout_s` limits connecting, the wait for a free session, and each answer."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ConfigError(f"{NAME}: url {url!r} is no address of a server; one looks like http://localhost:8000")
        secure = "s" if parts.scheme in ("https", "wss") else ""
        base = f"{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}"
        self._http, self._ws = f"http{secure}://{base}", f"ws{secure}://{base}/ws"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Future[aiohttp.WSMessage] | None = None
        """The next message. It is waited for also between requests, to answer the server's pings: most servers end a
        session that answers none for 20 s, and a model may write for longer."""

    async def action_schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of the environment's actions."""
        try:
            async with asyncio.timeout(self._timeout_s), self._client().get(f"{self._http}/schema") as answer:
                if answer.status != 200:
                    raise EnvError(f"{NAME}: {self._http}/schema answered {answer.status}; is that an OpenEnv server?")
                content = bytearray()
                async for part in answer.content.iter_any():
                    content += part
                    if len(content) > MAX_SCHEMA_BYTES:
                        raise EnvError(f"{NAME}: {self._http}/schema is larger than {MAX_SCHEMA_BYTES >> 20} MiB")
                if sum(map(content.count, (b",", b"[", b"{"))) > MAX_MARKS:
                    raise EnvError(f"{NAME}: {self._http}/schema has more than {MAX_MARKS} values")
                schema: Mapping[str, Any] = json.loads(content)["action"]
                return schema
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable_error(error) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EnvError(f"{NAME}: {self._http}/schema: not a schema of an OpenEnv server: {error!r:.200}") from None

    async def reset(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start an episode; wait until the server has a free session."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._ask("reset", settings)
            except _ServerFullError as full:
                await self.close()
                if time.monotonic() + FULL_POLL_S > deadline_s:
                    raise EnvError(
                        f"{NAME}: {self._http} had no free session for {self._timeout_s:g} s ({full}); let the server "
                        "have more (max_concurrent_envs), or run fewer episodes at a time"
                    ) from None
                await asyncio.sleep(FULL_POLL_S)
            except WrongAction as error:
                raise EnvError(f"{NAME}: reset with {dict(settings)}: {error}") from None

    async def step(self, action: Mapping[str, Any], max_s: float = math.inf) -> Mapping[str, Any]:
        """Return `observation`, `reward` and `done`. Raises WrongAction; raises SessionEnded also if the action takes
        longer than `max_s` or `timeout_s` while the server still answers other requests, or its answer is too large."""
        return await self._ask("step", action, max_s)

    async def close(self) -> None:
        """End the session, if there is one, and the connection."""
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await cancel_and_wait(filter(None, [self._next]))
            self._next = None
            with contextlib.suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                async with asyncio.timeout(CLOSE_S):
                    await _end(socket)
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any], max_s: float = math.inf) -> Mapping[str, Any]:
        asked = _as_json({"type": kind, "data": dict(data)})
        limit_s = min(self._timeout_s, max_s)
        try:
            async with asyncio.timeout(limit_s):
                message = await self._exchange(asked)
        except TimeoutError as error:
            if kind == "step" and await self._answers_others():
                raise SessionEnded(f"it took longer than {limit_s:.3g} s and was given up") from None
            raise self._unreachable_error(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable_error(error) from None
        if kind == "step" and _is_too_big(message):
            raise SessionEnded(f"its result is larger than {MAX_MESSAGE_BYTES >> 20} MiB")
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(f"{NAME}: {self._ws} ended the session during {kind}")
        return self._read(kind, message.data)

    async def _exchange(self, asked: str) -> aiohttp.WSMessage:
        """Send a request and return the next message."""
        if self._socket is None or self._next is None:
            self._socket = await self._client().ws_connect(self._ws, max_msg_size=MAX_MESSAGE_BYTES, autoping=False)
            self._next = asyncio.ensure_future(_next_message(self._socket))
        await self._socket.send_str(asked)
        message = await self._next
        self._next = asyncio.ensure_future(_next_message(self._socket))
        return message

    def _read(self, kind: str, text: str) -> Mapping[str, Any]:
        try:
            answer = _decoded(kind, text)
            data: Mapping[str, Any] = answer["data"]
            if answer["type"] == "observation" and isinstance(data["observation"], dict):
                return data
            code, said = str(data.get("code")), str(data.get("message"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EnvError(f"{NAME}: {self._ws} answered {kind} with {text[:200]!r}") from None
        if code == "CAPACITY_REACHED":
            raise _ServerFullError(said)
        if code == "VALIDATION_ERROR":
            raise WrongAction("; ".join(_fault(error) for error in data.get("errors") or []) or said)
        if code == "EXECUTION_ERROR" and kind == "step":  # many environments raise for a move that is not allowed
            raise WrongAction(said[:300])
        if code == "SESSION_ERROR" and kind == "step":
            raise SessionEnded(said[:300])
        raise EnvError(f"{NAME}: {kind}: {code}: {said[:300]}")

    async def _answers_others(self) -> bool:
        """Return True if the server answers other requests while it is busy with an action of this session."""
        try:
            async with asyncio.timeout(PROBE_S), self._client().get(f"{self._http}/schema") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # a small compressed answer could become a large one, on the event loop
            self._session = aiohttp.ClientSession(auto_decompress=False, headers={"Accept-Encoding": "identity"})
        return self._session

    def _unreachable_error(self, error: Exception) -> EnvError:
        if isinstance(error, TimeoutError):
            return EnvError(f"{NAME}: {self._http} did not answer within {self._timeout_s:g} s")
        return EnvError(f"{NAME}: no server answers at {self._http} ({error}); start it, or correct url")


class _ServerFullError(Exception):
    pass


async def _next_message(socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
    """Return the next message; answer pings meanwhile."""
    while (message := await socket.receive()).type in (aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG):
        if message.type is aiohttp.WSMsgType.PING:
            await socket.pong(message.data)
        await asyncio.sleep(PING_S)
    return message


async def _end(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Say that the session ends, and wait until the server does. aiohttp's own `close` reads all that a server still
    sends without a pause."""
    said = (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY)
    await socket.send_frame(aiohttp.WSCloseCode.OK.to_bytes(2, "big"), aiohttp.WSMsgType.CLOSE)
    while (await _next_message(socket)).type in said:  # noqa: ASYNC110 - the pause is what this is for
        await asyncio.sleep(PING_S)


def _is_too_big(message: aiohttp.WSMessage) -> bool:
    """Return True if the answer was larger than MAX_MESSAGE_BYTES: only an action makes it so, such as a program that
    prints without end."""
    return isinstance(message.data, aiohttp.WebSocketError) and message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


def _decoded(kind: str, text: str) -> Any:
    """Return the message. Raises SessionEnded for what only an action makes so: very many values, and JSON that Python
    does not read, such as numbers of 5,000 digits. Raises ValueError for all else that cannot be read."""
    problem = f"its result has more than {MAX_MARKS} values"
    if sum(map(text.count, ",[{")) <= MAX_MARKS:
        try:
            answer = json.loads(text)
            if not isinstance(answer, dict) or not is_deeper(answer, MAX_DEPTH):
                return answer
        except (ValueError, RecursionError):
            if not text.lstrip().startswith("{"):
                raise ValueError(text[:200]) from None
        problem = "its result cannot be read: it is nested too deep, or has numbers that are too long"
    if kind != "step":
        raise ValueError(problem)
    raise SessionEnded(problem)


def _as_json(request: Mapping[str, Any]) -> str:
    """Serialise a request; half characters become question marks.

    Raises WrongAction for JSON that a model can write but the server cannot read, as it would end the session.
    """
    if is_deeper(request, MAX_DEPTH):
        raise WrongAction(f"it is nested more than {MAX_DEPTH} deep")
    try:
        return encodable(json.dumps(request, allow_nan=False, ensure_ascii=False))
    except ValueError:
        raise WrongAction("its numbers must be finite") from None


def _fault(error: Mapping[str, Any]) -> str:
    where = ".".join(map(str, error.get("loc", ())))
    return f"{where}: {error.get('msg')}" if where else str(error.get("msg"))
