"""One session of an OpenEnv server: a WebSocket that the server gives an environment of its own (openenv-core 0.3).

The server's HTTP `/reset` and `/step` make a new environment for every request, so episodes need the WebSocket. Only
messages in JSON go over it, no package of theirs is needed.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from roll_flash.envs.model_text import MOST_DEPTH, encodable, is_deeper

from roll_flash.errors import ConfigError, EnvError

NAME = "OpenEnv-v0"
FULL_POLL_S = 0.5
"""How often a server that has no session free is asked again."""
PROBE_S = 3.0
MAX_MESSAGE_BYTES = 64 << 20


class WrongAction(Exception):
    """The server does not take the action as one of its environment. The message is for the model."""


class SessionEnded(WrongAction):
    """The server could not even say what is wrong with the action, or has not come to an end with it."""


class OpenEnvConnection:
    """Belongs to one event loop. Every method raises EnvError when the server is away or fails."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises ConfigError. `timeout_s` bounds connecting, waiting for a free session, and each answer."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ConfigError(f"{NAME}: url {url!r} is no address of a server; one looks like http://localhost:8000")
        secure = "s" if parts.scheme in ("https", "wss") else ""
        base = f"{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}"
        self._http, self._ws = f"http{secure}://{base}", f"ws{secure}://{base}/ws"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def action_schema(self) -> Mapping[str, Any]:
        """JSON schema of the environment's actions."""
        try:
            async with asyncio.timeout(self._timeout_s), self._client().get(f"{self._http}/schema") as answer:
                if answer.status != 200:
                    raise EnvError(f"{NAME}: {self._http}/schema answered {answer.status}; is that an OpenEnv server?")
                schema: Mapping[str, Any] = (await answer.json())["action"]
                return schema
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._away(error) from None
        except (ValueError, KeyError, TypeError) as error:
            raise EnvError(f"{NAME}: {self._http}/schema: not a schema of an OpenEnv server: {error!r}") from None

    async def reset(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """A new episode. Waits for a free session where the server has none."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._ask("reset", settings)
            except _Full as full:
                await self._drop()
                if time.monotonic() + FULL_POLL_S > deadline_s:
                    raise EnvError(
                        f"{NAME}: {self._http} had no free session for {self._timeout_s:g} s ({full}); let the server "
                        "have more (max_concurrent_envs), or run fewer episodes at a time"
                    ) from None
                await asyncio.sleep(FULL_POLL_S)
            except WrongAction as error:
                raise EnvError(f"{NAME}: reset with {dict(settings)}: {error}") from None

    async def step(self, action: Mapping[str, Any], most_s: float = math.inf) -> Mapping[str, Any]:
        """`observation`, `reward` and `done`. Raises WrongAction, and SessionEnded also for an action that takes longer
        than `most_s`, or `timeout_s`, of a server that is there."""
        return await self._ask("step", action, most_s)

    async def close(self) -> None:
        await self._drop()
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any], most_s: float = math.inf) -> Mapping[str, Any]:
        asked = _as_json({"type": kind, "data": dict(data)})
        limit_s = min(self._timeout_s, most_s)
        try:
            async with asyncio.timeout(limit_s):
                if self._socket is None:
                    self._socket = await self._client().ws_connect(self._ws, max_msg_size=MAX_MESSAGE_BYTES)
                await self._socket.send_str(asked)
                message = await self._socket.receive()
        except TimeoutError as error:
            if kind == "step" and await self._is_there():
                raise SessionEnded(f"it took longer than {limit_s:.3g} s and was given up") from None
            raise self._away(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(error) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(f"{NAME}: {self._ws} ended the session during {kind}")
        return self._read(kind, message.data)

    def _read(self, kind: str, text: str) -> Mapping[str, Any]:
        try:
            answer = json.loads(text)
            data: Mapping[str, Any] = answer["data"]
            if answer["type"] == "observation" and isinstance(data["observation"], dict):
                return data
            code, said = str(data.get("code")), str(data.get("message"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EnvError(f"{NAME}: {self._ws} answered {kind} with {text[:200]!r}") from None
        if code == "CAPACITY_REACHED":
            raise _Full(said)
        if code == "VALIDATION_ERROR":
            raise WrongAction("; ".join(_fault(error) for error in data.get("errors") or []) or said)
        if code == "EXECUTION_ERROR" and kind == "step":  # its environment raised, as many do for what is not allowed
            raise WrongAction(said[:300])
        if code == "SESSION_ERROR" and kind == "step":
            raise SessionEnded(said[:300])
        raise EnvError(f"{NAME}: {kind}: {code}: {said[:300]}")

    async def _is_there(self) -> bool:
        """Whether the server answers others while it is busy with an action of ours."""
        try:
            async with asyncio.timeout(PROBE_S), self._client().get(f"{self._http}/schema") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    async def _drop(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.close()

    def _away(self, error: Exception) -> EnvError:
        if isinstance(error, TimeoutError):
            return EnvError(f"{NAME}: {self._http} did not answer within {self._timeout_s:g} s")
        return EnvError(f"{NAME}: no server answers at {self._http} ({error}); start it, or correct url")


class _Full(Exception):
    pass


def _as_json(request: Mapping[str, Any]) -> str:
    """Raises WrongAction for what a model can write and a server cannot read: that would be the end of the session, as
    would half characters, which become question marks."""
    if is_deeper(request, MOST_DEPTH):
        raise WrongAction(f"it is nested more than {MOST_DEPTH} deep")
    try:
        return encodable(json.dumps(request, allow_nan=False, ensure_ascii=False))
    except ValueError:
        raise WrongAction("its numbers must be finite") from None


def _fault(error: Mapping[str, Any]) -> str:
    where = ".".join(map(str, error.get("loc", ())))
    return f"{where}: {error.get('msg')}" if where else str(error.get("msg"))
