"""Server-sent events. A turn is streamed only when complete, so that the agent sees exactly what is recorded, even if a
server died in the middle and another one continued."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import ClientError, web

PIECE_CHARACTERS = 48
EVENTS_AT_ONCE = 64
"""The event loop gets control after this many events."""


@dataclass(frozen=True, slots=True)
class Event:
    """`data` is JSON, or verbatim text; `name` is set if the API names its events."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        data = self.data.encode() if isinstance(self.data, str) else msgspec.json.encode(self.data)
        head = f"event: {self.name}\n".encode() if self.name else b""
        return head + b"data: " + data + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


async def send(request: web.Request, events: Iterable[Event]) -> web.StreamResponse:
    """Send the events. Raises ConnectionError if the agent disconnected; closes the connection after any other error,
    because the answer to it would be read as part of the stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        for number, event in enumerate(events):
            await response.write(event.encode())
            if number % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await response.write_eof()
    except (OSError, ClientError) as error:
        raise ConnectionResetError(f"the agent disconnected: {error}") from error
    except Exception:
        if request.transport is not None:
            request.transport.close()
        raise
    return response
