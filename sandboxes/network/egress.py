"""HTTP proxy of a sandbox with `network="allowlist"`: it listens inside; the controller decides outside.

The sandbox has no network but loopback. The agent's binary listens on 127.0.0.1:3128 (as `agent --relay`) and
relays connections over a command's stdin and stdout; the controller reads the proxy request, checks host and port
against the spec's allowlist, resolves the name once, and connects to a checked address, or answers 403.
`HTTP_PROXY` and `HTTPS_PROXY` are set for every command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from urllib.parse import urlsplit

from roll_flash.sandboxes.client.commands import Command, CommandStream
from roll_flash.sandboxes.network.allowlist import Address, as_address, is_allowed, is_public, may_connect, unwrapped
from roll_flash.sandboxes.network.relay import Relay, RelayedConnection, join
from roll_flash.sandboxes.spec import PROXY_PORT

MAX_HEAD = 1 << 14
HEAD_TIMEOUT_S = 10.0
"""Maximum seconds for a program inside to send its request head."""
CONNECT_TIMEOUT_S = 20.0
"""Maximum seconds to resolve a name and to connect."""
EVICT_AFTER_S = 1.0
LOOKUPS, LOOKUPS_OF_ONE = 64, 2
"""Maximum parallel name look-ups of this process, and of one sandbox: a slow name server must not block others."""
MAX_WARNINGS = 16
FIELD = re.compile(r"[!#-'*+.0-9A-Z^-z|~-]+:[^\r\n\0]*")
STRIPPED_HEADERS = ("proxy-", "connection:", "host:")
"""Prefixes of header fields that are not forwarded."""

_log = logging.getLogger("roll_flash.sandboxes")


class _Refused(Exception):
    """The allowlist does not permit the request."""


class Egress:
    """Proxy that runs as long as its sandbox."""

    def __init__(self, start: Callable[[Command], CommandStream], allow: tuple[str, ...]) -> None:
        self._relay = Relay(start, PROXY_PORT, self._serve, evict_after_s=EVICT_AFTER_S)
        self._allow = allow
        self._lookups = asyncio.Semaphore(LOOKUPS_OF_ONE)
        self._warned: set[str] = set()

    async def start(self) -> None:
        """Start the relay. Raises SandboxStartError."""
        await self._relay.start()

    async def restart(self) -> None:
        """Start the relay again at once, after all processes were killed."""
        await self._relay.restart()

    async def close(self) -> None:
        await self._relay.close()

    async def _serve(self, connection: RelayedConnection) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head, rest = await _read_head(connection)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                host, port, first = _target(head)
                reader, writer = await self._connect(host, port)
        except _Refused:
            await _refuse(connection, "403 Forbidden")
            return
        except (OSError, ValueError):  # TimeoutError is an OSError
            await _refuse(connection, "502 Bad Gateway")
            return
        await self._join(connection, reader, writer, first, rest)

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a checked address of the host, without a second name look-up. Raises _Refused, OSError."""
        if not is_allowed(self._allow, host, port):
            raise _Refused
        found = await self._resolve(host, port)
        good = [address for address in found if may_reach(self._allow, address, port)]
        if not good:
            self._warn_once(f"{host}:{port} leads to {', '.join(map(str, found))}", found, port)
            raise _Refused
        failures = []
        for address in good:
            try:
                return await asyncio.open_connection(str(address), port)
            except OSError as error:
                failures.append(error)
        raise failures[0]

    async def _resolve(self, host: str, port: int) -> list[Address]:
        if (address := as_address(host)) is not None:
            return [address]
        await self._lookups.acquire()
        looking = asyncio.get_running_loop().run_in_executor(_resolvers(), resolve, host, port)
        looking.add_done_callback(self._note_looked_up)
        return await asyncio.shield(looking)

    def _note_looked_up(self, looking: asyncio.Future[list[Address]]) -> None:
        """Release the limit: a cancelled look-up counts against it until its thread ends."""
        self._lookups.release()
        if not looking.cancelled():
            looking.exception()

    def _warn_once(self, what: str, found: list[Address], port: int) -> None:
        if what not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(what)
            _log.warning("a sandbox's proxy refused: %s, not public; allow %s:%d too if it may", what, found[0], port)

    async def _join(
        self,
        connection: RelayedConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        first: bytes | None,
        rest: bytes,
    ) -> None:
        try:
            if first is None:
                await connection.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            writer.write((first or b"") + rest)
            await join(connection, reader, writer)
        except OSError:  # not only ConnectionError: a host may vanish (TimeoutError)
            return
        finally:
            writer.close()


async def _refuse(connection: RelayedConnection, status: str) -> None:
    with contextlib.suppress(ConnectionError):
        await connection.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())


async def _read_head(connection: RelayedConnection) -> tuple[bytes, bytes]:
    """Return the head of a request, of at most MAX_HEAD bytes, and what came with it: a body may be far longer."""
    came = b""
    while b"\r\n\r\n" not in came[:MAX_HEAD]:
        if len(came) >= MAX_HEAD or not (piece := await connection.read()):
            raise ValueError("no proxy request")
        came += piece
    head, _, rest = came.partition(b"\r\n\r\n")
    return head, rest


def _target(head: bytes) -> tuple[str, int, bytes | None]:
    """Return (host, port, head to send first) of a proxy request; the head is None for CONNECT.

    Raises _Refused for another kind of request, ValueError for an invalid one.
    """
    line, *fields = head.decode("latin-1").split("\r\n")
    fields = [field for field in fields if field]
    if any(end in line for end in "\r\n\0") or not all(map(FIELD.fullmatch, fields)):
        raise ValueError("no request head")
    words = line.split(" ")
    if len(words) != 3:
        raise _Refused
    method, where, version = words
    if method == "CONNECT":
        host, _, port = where.rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise _Refused
        return host, int(port), None
    url = urlsplit(where)
    if url.scheme != "http" or not url.hostname:
        raise _Refused
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [field for field in fields if not field.lower().startswith(STRIPPED_HEADERS)]
    # The client's `Host` could name a host that is not allowed, and so could what its URL has around brackets.
    authority = (f"[{url.hostname}]" if ":" in url.hostname else url.hostname) + (f":{url.port}" if url.port else "")
    first = "\r\n".join([f"{method} {path} {version}", f"Host: {authority}", *kept, "Connection: close", "", ""])
    return url.hostname, url.port or 80, first.encode("latin-1")


def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a name. Blocking. Raises OSError."""
    found = (
        as_address(str(entry[4][0]).partition("%")[0])
        for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [address for address in dict.fromkeys(found) if address is not None]


@cache
def _resolvers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(LOOKUPS, thread_name_prefix="sandbox names")


def may_reach(allow: Sequence[str], address: Address, port: int) -> bool:
    """True if an allowed name may lead to this address: a public one that is not this machine's, or one listed too."""
    if not may_connect(allow, address, port):
        return False
    return not (is_public(address) and is_local_address(unwrapped(address))) or is_allowed(allow, str(address), port)


def is_local_address(address: Address) -> bool:
    """True for an address of this machine. Sends nothing: a route to oneself begins at the address itself."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return as_address(str(probe.getsockname()[0])) == address
    except OSError:
        return False
