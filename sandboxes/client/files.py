"""File operations of the agent over a connection."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from roll_flash.sandboxes.client import frames
from roll_flash.sandboxes.client.channels import FileChannel
from roll_flash.sandboxes.client.commands import send_data
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.frames import WINDOW, Entry, Request
from roll_flash.sandboxes.errors import SandboxBusy, SandboxFileError

FILE_TIMEOUT_S = 300.0
PART_BYTES = 1 << 20
REQUESTS_AT_ONCE = 128


async def read_file(connection: AgentConnection, path: str, max_bytes: int) -> bytes:
    """Return the content of a file. Raises SandboxFileError, also if it is larger than `max_bytes`."""
    data = bytearray()

    async def keep(part: bytes) -> None:
        nonlocal data
        data += part

    await read_parts(connection, path, max_bytes, keep)
    return bytes(data)


async def read_parts(
    connection: AgentConnection, path: str, max_bytes: int, keep: Callable[[bytes], Awaitable[None]]
) -> None:
    """Read a file, of which at most about PART_BYTES are in memory: `keep` is called with each part in turn, the last
    one shorter or empty. Raises SandboxFileError, also if the file is larger than `max_bytes`."""
    channel = FileChannel(f"sandbox {connection.name}: read", window=WINDOW, max_bytes=max_bytes)
    number = connection.open(Request.READ, frames.read_request(path, max_bytes, WINDOW), channel)
    held = bytearray()
    async with connection.finishing(number, FILE_TIMEOUT_S):
        while (piece := await channel.next()) is not None:
            held += piece
            if len(held) >= PART_BYTES:
                await keep(bytes(held))
                held.clear()
            if not channel.done.done():
                channel.add_credit(len(piece))
                connection.send(Request.CREDIT, number, frames.u32(len(piece)))
        await keep(bytes(held))


async def write_file(connection: AgentConnection, path: str, data: bytes, mode: int) -> None:
    async def part(start: int) -> bytes:
        return data[start : start + PART_BYTES]

    await write_parts(connection, path, mode, part)


async def write_parts(
    connection: AgentConnection, path: str, mode: int, part: Callable[[int], Awaitable[bytes]]
) -> int:
    """Write a file and return its size. `part` returns PART_BYTES of it from a position on, fewer at its end."""
    channel = FileChannel(f"sandbox {connection.name}: write")
    number = connection.open(Request.WRITE, frames.mode_and_path(mode, path), channel)
    size, is_last = 0, False
    async with connection.finishing(number, FILE_TIMEOUT_S):
        while not is_last and not channel.done.done():
            data = await part(size)
            await send_data(connection, number, channel, data)
            size += len(data)
            is_last = len(data) < PART_BYTES
        if not channel.done.done():
            connection.send(Request.END, number)
        await channel.done
    return size


async def make_directory(connection: AgentConnection, path: str, mode: int) -> None:
    await _simple(connection, Request.MKDIR, frames.mode_and_path(mode, path), "make directory")


async def make_symlink(connection: AgentConnection, target: str, path: str) -> None:
    await _simple(connection, Request.SYMLINK, frames.text(target) + frames.text(path), "make symbolic link")


async def in_order(requests: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Send requests one after another without a wait for each answer, which takes a turn of a busy event loop.

    The agent handles them in this order.
    """
    left = iter(requests)
    while at_once := list(islice(left, REQUESTS_AT_ONCE)):
        await asyncio.gather(*at_once)


async def remove(connection: AgentConnection, path: str) -> None:
    """Remove a file or a tree; a path with a final slash removes only the directory's content."""
    await _simple(connection, Request.REMOVE, frames.text(path), "remove")


async def list_tree(connection: AgentConnection, path: str, max_entries: int) -> list[Entry]:
    """List all entries below a directory, without following links. Raises SandboxFileError above `max_entries`."""
    channel = FileChannel(f"sandbox {connection.name}: list", entries=max_entries)
    number = connection.open(Request.LIST, frames.list_request(path, max_entries), channel)
    async with connection.finishing(number, FILE_TIMEOUT_S):
        await channel.done
    return channel.entries


async def kill_all(connection: AgentConnection) -> None:
    """Kill every process but the agent, and wait until all are dead. Raises SandboxBusy."""
    try:
        await _simple(connection, Request.KILL_ALL, b"", "kill")
    except SandboxFileError as error:
        if error.errno != errno.EBUSY:
            raise
        raise SandboxBusy(f"sandbox {connection.name}: what runs in it does not end", error.errno) from None


@asynccontextmanager
async def paused(connection: AgentConnection) -> AsyncIterator[None]:
    """Stop every process but the agent for the duration of an `async with`. The engine can then start a program in
    the sandbox: the files that it reads for that are regular files. Raises SandboxFileError."""
    try:
        await _simple(connection, Request.PAUSE, b"", "pause")  # if cancelled, it is carried out all the same
        yield
    finally:
        if connection.usable:
            await asyncio.shield(_simple(connection, Request.RESUME, b"", "go on"))


async def ping(connection: AgentConnection, timeout_s: float) -> None:
    await _simple(connection, Request.PING, b"", "ping", timeout_s)


async def _simple(
    connection: AgentConnection, kind: Request, payload: bytes, what: str, timeout_s: float = FILE_TIMEOUT_S
) -> None:
    channel = FileChannel(f"sandbox {connection.name}: {what}")
    number = connection.open(kind, payload, channel)
    async with connection.finishing(number, timeout_s):
        await channel.done
