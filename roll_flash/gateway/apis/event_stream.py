"""Server-sent events. A turn is streamed when it is complete: what an agent saw of it is what is recorded, also when
its server died in the middle and another one went on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

PIECE_CHARACTERS = 48
EVENTS_AT_ONCE = 64
"""After so many the event loop turns."""


@dataclass(frozen=True, slots=True)
class Event:
    """`data` is JSON, or text as it stands; `name` where the API names its events."""

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
    """Raises ConnectionError when the agent has gone away."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for number, event in enumerate(events):
        await response.write(event.encode())
        if number % EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    await response.write_eof()
    return response
