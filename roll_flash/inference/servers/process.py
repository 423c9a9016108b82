"""One inference server process: start, health check, control requests and stop.

The address is always loopback, and every request carries the key of the run (`processes/keys.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from roll_flash.config.tree import InferenceConfig
from roll_flash.errors import InferenceError
from roll_flash.inference.servers.metrics import kv_cache_tokens
from roll_flash.models.prepare import cache_folder
from roll_flash.processes.keys import KEY_VARIABLE, bearer
from roll_flash.processes.supervise import GuardedProcess
from roll_flash.sandboxes.scratch import make_scratch_folder

HOST = "127.0.0.1"
MIN_PORT, MAX_PORT_TRIES = 20_000, 100
"""Ray's processes listen below."""
PORT_FREED_S = 30.0
"""For whatever took the port of a server that must be started again."""
CAUSE_CHARACTERS = 400
HEALTH_POLL_S = 0.2
HEALTH_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 600.0
"""Maximum time in seconds of one control request; callers set shorter timeouts for whole operations."""

_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception|Killed)\b: *\S.*")
_NO_CAUSE = ("Engine core initialization failed", "EngineDeadError")


@dataclass(frozen=True)
class Launcher:
    """Start settings for the servers of one engine. They implement vLLM's generate, pause and weight routes."""

    name: str
    dtype: str
    command: Callable[[int, int], list[str]]
    """Returns the command line for a server's index and port."""
    environment: Mapping[str, str]
    """Environment variables added to those of this process."""
    prepares_weights: bool = False
    """True if a server can load new weights while it generates, and then swap them at once."""
    joins_learner: bool = False
    """True if the learner sends weights directly; the server must first join a group with it."""


class ServerProcess:
    """A server process. `start` can be called again after the process has died; the endpoint stays the same."""

    def __init__(self, index: int, launcher: Launcher, config: InferenceConfig, logs: Path, key: str) -> None:
        self.index = index
        self.log = logs / f"{launcher.name}-{index}.log"
        self.port = config.port + index if config.port else _free_port()
        self.version = 0
        self.joined = False
        """True if the server has joined the learner's group since its start."""
        self.kv_cache_tokens: int | None = None
        """Capacity of the KV cache in tokens; None before the start or if the server does not report it."""
        self._launcher = launcher
        self._config = config
        self.starts = 0
        """Number of starts so far."""
        self._process: GuardedProcess | None = None
        self._key = key
        self._http = httpx.AsyncClient(base_url=self.endpoint, timeout=CONTROL_TIMEOUT_S, headers=bearer(key))

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def prepares_weights(self) -> bool:
        return self._launcher.prepares_weights

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def guard(self) -> int:
        """Process id of the guard. Raises InferenceError if the server was not started."""
        if self._process is None:
            raise InferenceError(f"{self._name} was not started")
        return self._process.pid

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises InferenceError with the cause from its log."""
        self.starts += 1
        await self._wait_for_port(PORT_FREED_S if self.starts > 1 else 0.0)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log_start = self.log.stat().st_size if self.log.exists() else 0
        scratch = make_scratch_folder("server")
        self._process = GuardedProcess(
            self._launcher.command(self.index, self.port), env=self._environment(scratch), log=self.log, scratch=scratch
        )
        await self._wait_until_healthy(log_start)
        self.joined = False
        if not self._launcher.joins_learner:
            await self.post("/init_weight_transfer_engine", {"init_info": {}})
        await self.post("/update_weight_version", {"new_version": "0"})
        self.version = 0
        self.kv_cache_tokens = kv_cache_tokens(await self.metrics_text())

    async def is_healthy(self) -> bool:
        return await self.state() == "healthy"

    async def state(self) -> Literal["healthy", "silent", "gone"]:
        """`gone`: the process has ended, or no process listens on its port, even if its guard runs; `silent`: a
        process listens, but does not answer correctly."""
        if not self.is_running:
            return "gone"
        try:
            return "healthy" if (await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)).is_success else "silent"
        except httpx.ConnectError:
            return "gone"
        except httpx.RequestError:
            return "silent"

    async def metrics_text(self) -> str:
        """Return the server's answer to /metrics; empty if it does not answer."""
        try:
            response = await self._http.get("/metrics", timeout=HEALTH_TIMEOUT_S)
        except httpx.RequestError:
            return ""
        return response.text if response.is_success else ""

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """Send a control request. Raises InferenceError unless it succeeds within `timeout_s`."""
        return await self._ask("POST", path, body, timeout_s)

    async def get(self, path: str) -> Any:
        """Same as `post`, for requests that change nothing."""
        return await self._ask("GET", path, None, CONTROL_TIMEOUT_S)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            response = await self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.RequestError as error:
            raise InferenceError(
                f"{self._name}: {path} failed: {type(error).__name__} {error}; see {self.log}"
            ) from None
        if not response.is_success:
            excerpt = " ".join(response.text.split())[:300]
            raise InferenceError(
                f"{self._name}: {path} answered HTTP {response.status_code}: {excerpt}; see {self.log}"
            )
        return response.json()

    async def stop(self) -> None:
        """Stop the process and all its child processes."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
            self._process = None

    async def close(self) -> None:
        await self.stop()
        await self._http.aclose()

    @property
    def _name(self) -> str:
        return f"{self._launcher.name} server {self.index} ({self.endpoint})"

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Return our environment, with TMPDIR set to `scratch`, which is removed after the server."""
        caches = cache_folder().with_name("inductor")  # no other user may write there: its files are executed
        return {
            **os.environ,
            "TMPDIR": str(scratch),
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self._launcher.environment,
            KEY_VARIABLE: self._key,
        }

    async def _wait_for_port(self, patience_s: float) -> None:
        """Raises InferenceError when something else keeps it: a process that is slow to die, somebody's connection."""
        advice = "set inference.port to another one, or to 0" if self._config.port else "start again"
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return require_free_port(HOST, self.port, advice)
            except InferenceError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(HEALTH_POLL_S)

    async def _wait_until_healthy(self, log_start: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._config.start_timeout_s
        while not await self.is_healthy():
            if self._process.returncode is not None:
                cause = _cause(self.log, log_start)
                raise InferenceError(
                    f"{self._name} did not start (exit {self._process.returncode}): {cause}; log: {self.log}"
                )
            if time.monotonic() > deadline:
                raise InferenceError(
                    f"{self._name} was not healthy after {self._config.start_timeout_s:g} s "
                    f"(inference.start_timeout_s): {_cause(self.log, log_start)}; log: {self.log}"
                )
            await asyncio.sleep(HEALTH_POLL_S)


def _free_port() -> int:
    """Below those that the kernel gives to connections: a server is away from its port until it has loaded its model,
    and while it is started again."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choice = random.SystemRandom()
    for _ in range(MAX_PORT_TRIES if first > MIN_PORT else 0):
        port = choice.randrange(MIN_PORT, first)
        with contextlib.suppress(InferenceError):
            require_free_port(HOST, port, "")
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int, advice: str) -> None:
    """Raises InferenceError, which ends with `advice`, if the port cannot be used."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InferenceError(f"port {port} on {host} cannot be used: {reason}; {advice}") from None


def _cause(log: Path, start: int) -> str:
    """Return the cause of a failure from the log: the last error that names a cause, else the last line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [(found.group(), number) for number, line in enumerate(lines) if (found := _ERROR_LINE.search(line))]
    causes = [error for error in errors if not any(text in error[0] for text in _NO_CAUSE)] or errors
    if not causes:
        return lines[-1][:CAUSE_CHARACTERS] if lines else "its log is empty"
    text, number = causes[-1]
    # pydantic puts the cause on the next line.
    more = lines[number + 1 : number + 2] if "validation error" in text else []
    return " ".join([text, *more])[:CAUSE_CHARACTERS]
