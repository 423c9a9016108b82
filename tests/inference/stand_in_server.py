"""A stand-in for a model server, on loopback: answers as told, well or badly, in the wire format of the real ones.

Its tokens tell where they stand: position p of the conversation holds token p % 50, with logprob -(p % 50 + 1) / 64. So
a turn shows whether a token was lost, doubled or mislabelled, however many servers it came from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Handler = Callable[["StandInServer", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def token_at(position: int) -> int:
    return position % 50


def logprob_at(position: int) -> float:
    return -(position % 50 + 1) / 64


class StandInServer:
    """Use as an async context manager. `handler` answers the generate requests, and may be changed at any time."""

    def __init__(self, handler: Handler, version: int = 0) -> None:
        self.handler = handler
        self.version = version
        self.healthy = True
        self.hangs_at_health = False
        self.requests: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> StandInServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length")), 0)
                body = await reader.readexactly(length)
                if head.startswith("GET /health"):
                    if self.hangs_at_health:
                        await asyncio.sleep(3600)
                    writer.write(response(b"", 200 if self.healthy else 503))
                elif head.startswith("GET /weight_info"):
                    writer.write(response(json.dumps({"weight_version": str(self.version)}).encode()))
                else:
                    self.requests.append(json.loads(body))
                    await self.handler(self, self.requests[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


def response(body: bytes, status: int = 200, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def choice(server: StandInServer, request: dict[str, Any], start: int, end: int, reason: str | None) -> dict[str, Any]:
    """Tokens `start:end` of the answer."""
    positions = [len(request["token_ids"]) + i for i in range(start, end)]
    return {
        "index": 0,
        "token_ids": [token_at(p) for p in positions],
        "logprobs": {"content": [{"token_id": token_at(p), "logprob": logprob_at(p)} for p in positions]},
        "finish_reason": reason,
        "weight_versions": [{"version": str(server.version), "start": 0, "end": end}] if end else [],
    }


def answer(server: StandInServer, request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A right answer, with the fields of its choice that `changes` names made wrong."""
    count = request["sampling_params"]["max_tokens"]
    return {"request_id": "x", "choices": [choice(server, request, 0, count, "length") | changes]}


async def well(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if not request.get("stream"):
        writer.write(response(json.dumps(answer(server, request)).encode()))
        return
    await stream(server, request, writer, request["sampling_params"]["max_tokens"], "length")
    writer.write(b"0\r\n\r\n")


async def stream(
    server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter, count: int, reason: str | None
) -> None:
    """`count` tokens in pieces; the transfer is left open."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    every = request["sampling_params"]["stream_interval"]
    for start in range(0, count, every):
        end = min(start + every, count)
        piece = {"choices": [choice(server, request, start, end, reason if end == count else None)]}
        event = f"data: {json.dumps(piece)}\n\n".encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        await writer.drain()
        await asyncio.sleep(0)
