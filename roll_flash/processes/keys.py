"""Key of a run's model servers: without it, other users of the machine can neither generate nor send weights.

Each run makes a new key. A server gets it in its environment (command lines are readable by all users), clients get it
in their `ClientSpec`. Every route requires `Authorization: Bearer KEY`, except `/health`, which reveals nothing else.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from roll_flash.errors import ConfigError

KEY_VARIABLE = "ROLL_FLASH_SERVER_KEY"
OPEN_PATH = "/health"
REFUSED = b'{"error": "this server answers its run only: send its key as Authorization: Bearer KEY"}'

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def new_key() -> str:
    return secrets.token_urlsafe(32)


def bearer(key: str) -> dict[str, str]:
    """Header of a request; empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_from_environment() -> str:
    """Key of this server. Raises ConfigError if it is not set: a server without a key would answer every user."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigError(f"the environment variable {KEY_VARIABLE} is not set; a server does not start without a key")
    return key


def is_authorized(path: str, authorization: bytes, key: str) -> bool:
    """Check the key in constant time."""
    return path == OPEN_PATH or hmac.compare_digest(authorization, f"Bearer {key}".encode())


class RequireKey:
    """ASGI middleware (vLLM's option `--middleware`) that runs before all others."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._key = key_from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        if is_authorized(scope["path"], authorization, self._key):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSED)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSED})
