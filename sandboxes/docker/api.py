"""Client for the part of the Docker Engine API that sandboxes need, in a version that both sides support."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import ssl
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import httpx

from roll_flash.sandboxes.client.connection import AgentConnection, StreamProtocol
from roll_flash.sandboxes.client.frames import STDOUT, Demultiplexer, FrameError
from roll_flash.sandboxes.errors import (
    SandboxDiskFull,
    SandboxError,
    SandboxImageMissing,
    SandboxPermissionDenied,
    SandboxStartError,
    SandboxUnavailable,
    SandboxUnreachable,
)

DEFAULT_HOST = "unix:///var/run/docker.sock"
CERTIFICATE_FILES = ("ca.pem", "cert.pem", "key.pem")
OLDEST_VERSION = "1.41"
NEWEST_VERSION = "1.44"
"""Supported API versions: engine 20.10 supports none above 1.41, engine 29 none below 1.44."""
REQUEST_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 5.0
MAX_HEADER = 1 << 14
BUILT_BY = {"roll-flash-agents": "agents-image", "roll-flash-browser": "browser-image"}
BUILT_OTHERWISE = "pull it, build it, or run `python -m roll_flash.sandboxes.images.default_image`"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """`unix:///path`, `tcp://host:port`, or `tcp` with TLS (`certificates`: a folder like DOCKER_CERT_PATH)."""

    host: str
    certificates: str | None = None

    @classmethod
    def from_environment(cls, host: str | None = None) -> EngineAddress:
        """Return the address in `host`, else DOCKER_HOST, else the default socket.

        TLS is used for `tcp://host:port?certificates=FOLDER`, and for every tcp address with DOCKER_TLS_VERIFY. Raises
        SandboxUnavailable for an address that is neither `unix://` nor `tcp://`.
        """
        address, _, query = (host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST).partition("?")
        named = parse_qs(query).get("certificates")
        if not address.startswith(("unix://", "tcp://")):
            raise SandboxUnavailable(f"{address}: a Docker engine's address is unix:///path or tcp://host:port")
        if address.startswith("unix://"):
            return cls(address)
        verify = os.environ.get("DOCKER_TLS_VERIFY", "") not in ("", "0")
        folder = os.environ.get("DOCKER_CERT_PATH") or str(Path.home() / ".docker")
        return cls(address, named[0] if named else folder if verify else None)

    @property
    def socket_path(self) -> str | None:
        return self.host.removeprefix("unix://") if self.host.startswith("unix://") else None

    @property
    def base_url(self) -> str:
        where = "docker" if self.socket_path else urlsplit(self.host).netloc
        return f"{'https' if self.certificates else 'http'}://{where}"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without TLS. Raises SandboxUnavailable for unusable certificates."""
        if self.certificates is None:
            return None
        authority, certificate, key = (str(Path(self.certificates) / name) for name in CERTIFICATE_FILES)
        try:
            context = ssl.create_default_context(cafile=authority)
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise SandboxUnavailable(
                f"{self.host}: the certificates in {self.certificates} cannot be used ({error}); "
                f"it must hold {', '.join(CERTIFICATE_FILES)}"
            ) from None
        return context

    def connection_error(self, error: Exception) -> SandboxUnavailable:
        """Return the error for a failed connection, with instructions for the user."""
        path = self.socket_path
        if path and os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
            return SandboxPermissionDenied(
                f"no permission on the Docker socket {path}; add this user to the group `docker`, or run as root"
            )
        if "CERTIFICATE" in str(error).upper():
            return SandboxUnavailable(
                f"the Docker engine at {self.host} is not the one that {self.certificates}/ca.pem signed for ({error})"
            )
        return SandboxUnavailable(f"no Docker engine answers at {self.host} ({error}); start one or set DOCKER_HOST")


class EngineApi:
    """Client of one engine, for one event loop. Call `close` at the end."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self._tls = address.tls()
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=address.socket_path, verify=self._tls or True, trust_env=False),
            base_url=address.base_url,
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, pool=None),
        )
        self.version = OLDEST_VERSION

    async def close(self) -> None:
        await self._client.aclose()

    async def connect(self) -> dict[str, Any]:
        """Negotiate the API version and return the answer to /version. Raises SandboxUnavailable with instructions."""
        host = self.address.host
        try:
            response = await self._client.get("/version", timeout=PROBE_TIMEOUT_S)
            if response.status_code == 400 and "HTTPS" in response.text:
                raise SandboxUnavailable(
                    f"the Docker engine at {host} speaks TLS: set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH, "
                    f"or write {host}?certificates=FOLDER"
                )
            version: dict[str, Any] = response.json()
        except httpx.ConnectError as error:
            raise self.address.connection_error(error) from None
        except (httpx.HTTPError, ValueError) as error:
            raise SandboxUnavailable(f"the Docker engine at {host} does not answer properly: {error!r}") from None
        newest, oldest = str(version.get("ApiVersion", "0")), str(version.get("MinAPIVersion", "0"))
        self.version = negotiated_version(host, oldest, newest)
        return version

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: bytes | None = None,
        accept: tuple[int, ...] = (),
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> httpx.Response:
        """Send a request. Raises SandboxError for a status of 400 or above that is not in `accept`."""
        with self._reaching():
            response = await self._client.request(
                method,
                f"/v{self.version}{path}",
                params=dict(query) if query else None,
                json=body,
                content=content,
                headers={"Content-Type": "application/x-tar"} if content is not None else None,
                timeout=httpx.Timeout(timeout_s, pool=None),
            )
        if response.status_code >= 400 and response.status_code not in accept:
            raise _error_of(method, path, response)
        return response

    async def json(self, method: str, path: str, **options: Any) -> Any:
        return (await self.call(method, path, **options)).json()

    async def stat(self, container: str, path: str) -> dict[str, Any] | None:
        """Return what the engine tells of a path in a container (`size`, `mode`); None if it is missing."""
        head = await self.call("HEAD", f"/containers/{container}/archive", query={"path": path}, accept=(404,))
        if head.status_code == 404:
            return None
        told: dict[str, Any] = json.loads(base64.b64decode(head.headers["X-Docker-Container-Path-Stat"]))
        return told

    async def read_file(self, container: str, path: str) -> tuple[int, bytes] | None:
        """Return mode and content of a file in a container; None if it is missing or no regular file."""
        query = {"path": path}
        found = await self.call("GET", f"/containers/{container}/archive", query=query, accept=(404,))
        if found.status_code == 404:
            return None
        try:
            with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
                member = archive.next()
                content = archive.extractfile(member) if member is not None and member.isreg() else None
                return (member.mode & 0o777, content.read()) if member is not None and content is not None else None
        except (tarfile.TarError, EOFError):
            return None

    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Any = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        idle_timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> AsyncIterator[dict[str, Any]]:
        """Send a request and yield the JSON lines of the answer. Raises SandboxError, ValueError for other lines."""
        rest = b""
        async with self._streamed(method, path, idle_timeout_s, params=query, content=content) as response:
            # Not aiter_lines: it also ends lines at U+0085, which engines write as it is within a string.
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                for line in filter(bytes.strip, lines):
                    yield json.loads(line)
        if rest.strip():
            yield json.loads(rest)

    async def download(self, path: str, *, idle_timeout_s: float = REQUEST_TIMEOUT_S) -> AsyncIterator[bytes]:
        """Yield the bytes of an answer as they come. Raises SandboxError."""
        async with self._streamed("GET", path, idle_timeout_s) as response:
            async for chunk in response.aiter_bytes():
                yield chunk

    @asynccontextmanager
    async def _streamed(
        self, method: str, path: str, idle_timeout_s: float | None, **request: Any
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(idle_timeout_s, pool=None)
        with self._reaching():
            async with self._client.stream(method, f"/v{self.version}{path}", timeout=timeout, **request) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _error_of(method, path, response)
                yield response

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise SandboxUnreachable for the errors of a connection to the engine."""
        try:
            yield
        except httpx.ConnectError as error:
            raise SandboxUnreachable(str(self.address.connection_error(error))) from None
        except httpx.HTTPError as error:
            raise SandboxUnreachable(f"the Docker engine at {self.address.host}: {error!r}") from None

    async def attach(self, container: str, connection: AgentConnection) -> None:
        """Attach `connection` to a container's standard streams. Raises SandboxStartError, SandboxUnreachable."""
        loop = asyncio.get_running_loop()
        request = (
            f"POST /v{self.version}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        )
        protocol = _AttachProtocol(connection, request.encode())
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if path := self.address.socket_path:
                    await loop.create_unix_connection(lambda: protocol, path)
                else:
                    where = urlsplit(self.address.host)
                    await loop.create_connection(
                        lambda: protocol, where.hostname or "", where.port or 2375, ssl=self._tls
                    )
                await protocol.upgraded
        except (OSError, TimeoutError) as error:
            raise SandboxUnreachable(f"attaching to container {container[:12]}: {error!r}") from None


@asynccontextmanager
async def open_engine(host: str | None = None) -> AsyncIterator[EngineApi]:
    """Connect to an engine for an `async with`. Raises SandboxUnavailable.

    `host`: see `EngineAddress.from_environment`.
    """
    engine = EngineApi(EngineAddress.from_environment(host))
    try:
        await engine.connect()
        yield engine
    finally:
        await engine.close()


class _AttachProtocol(StreamProtocol):
    """Sends the upgrade request, checks the answer, then passes on the demultiplexed stream."""

    def __init__(self, connection: AgentConnection, request: bytes) -> None:
        super().__init__(connection)
        self.upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._header = bytearray()
        self._demultiplexer = Demultiplexer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.upgraded.done():
            self._header += data
            head, found, data = bytes(self._header).partition(b"\r\n\r\n")
            if not found:
                if len(self._header) > MAX_HEADER:
                    self._refuse("its answer has no end")
                return
            if b" 101 " not in head.split(b"\r\n")[0] + b" ":
                self._refuse((head.split(b"\r\n")[0] + b" " + data).decode(errors="replace"))
                return
            self.upgraded.set_result(None)
        try:
            for stream, piece in self._demultiplexer.feed(data):
                if stream == STDOUT:
                    self._connection.receive(piece)
                else:
                    self._connection.receive_diagnostics(piece)
        except FrameError as error:
            self._connection.lost(SandboxUnreachable(f"sandbox {self._connection.name}: {error}"))

    def _refuse(self, why: str) -> None:
        if not self.upgraded.done():
            self.upgraded.set_exception(SandboxStartError(f"the Docker engine refused to attach: {why[:300]}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._refuse("it closed the connection")
        super().connection_lost(exc)


def negotiated_version(host: str, oldest: str, newest: str) -> str:
    """Return the highest API version supported by this module and by an engine with `oldest` to `newest`.

    Raises SandboxUnavailable if there is none.
    """
    if _version_key(newest) < _version_key(OLDEST_VERSION):
        raise SandboxUnavailable(
            f"the Docker engine at {host} is too old (its API ends at {newest}); {OLDEST_VERSION} is needed (20.10)"
        )
    if _version_key(oldest) > _version_key(NEWEST_VERSION):
        raise SandboxUnavailable(
            f"the Docker engine at {host} is too new (its API begins at {oldest}, {NEWEST_VERSION} is the newest that "
            "this roll-flash speaks); upgrade roll-flash, or lower the engine's DOCKER_MIN_API_VERSION"
        )
    return min(newest, NEWEST_VERSION, key=_version_key)


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _error_of(method: str, path: str, response: httpx.Response) -> SandboxError:
    try:
        message = str(json.loads(response.text)["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:300] or f"status {response.status_code}"
    if response.status_code == 404 and "image" in message.lower():
        how = next((f"run `make {target}`" for image, target in BUILT_BY.items() if image in message), BUILT_OTHERWISE)
        return SandboxImageMissing(f"{message}; {how}")
    if "no space left" in message:
        return disk_full(message)
    return SandboxStartError(f"Docker engine, {method} {path}: {message}")


def disk_full(message: str) -> SandboxDiskFull:
    return SandboxDiskFull(
        f"the Docker engine's disk is full: {message[:300]}; free space (docker system df, docker system prune)"
    )
