"""Controls one inference server over HTTP: health, figures and control requests.

Where the server runs is up to the subclasses: `process.ServerProcess` is a child process of this one,
`remote.RemoteServer` belongs to an actor on some node. Every request carries the key of the run (`processes/keys.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.processes.keys import bearer

LOOPBACK = "127.0.0.1"
HEALTH_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 600.0
"""Maximum time in seconds of one control request; callers set shorter timeouts for whole operations."""
KEEP_ALIVE_S = 1.0
"""How long an unused connection is kept, for the requests of one publication: less than servers do."""


@dataclass(frozen=True)
class Launcher:
    """Start settings for the servers of one engine. They implement vLLM's generate, pause and weight routes."""

    name: str
    dtype: str
    command: Callable[[int, str, int], list[str]]
    """Returns the command line for a server's index, host and port."""
    environment: Mapping[str, str]
    """Environment variables added to those of the process that starts the server."""
    prepares_weights: bool = False
    """True if a server can load new weights while it generates, and then swap them at once."""
    joins_learner: bool = False
    """True if the learner sends weights directly; the server must first join a group with it."""
    returns_experts: bool = False
    """True if answers have the experts of each token of a mixture of experts."""


class ServerControl(ABC):
    """A server that can be started again after it died."""

    def __init__(self, index: int, launcher: Launcher, key: str) -> None:
        self.index = index
        self.version = 0
        self.joined = False
        """True if the server has joined the learner's group since its start."""
        self.kv_cache_tokens: int | None = None
        """Capacity of the KV cache in tokens; None before the start or if the server does not report it."""
        self.gpus: tuple[str, ...] = ()
        """Ids of the GPUs that its process sees; empty before the start, and on a CPU."""
        self.starts = 0
        """Number of starts so far."""
        self.log: Path | str = ""
        """Log file, with the node if it is on another one."""
        self._launcher = launcher
        self._key = key
        self._endpoint = ""
        self._http: httpx.AsyncClient | None = None
        self._clients: list[httpx.AsyncClient] = []
        """All clients so far: requests to an earlier endpoint may still be under way."""

    @property
    def endpoint(self) -> str:
        """Base URL; empty before the first start on another node."""
        return self._endpoint

    @property
    def prepares_weights(self) -> bool:
        return self._launcher.prepares_weights

    @property
    def name(self) -> str:
        return f"{self._launcher.name} server {self.index} ({self.endpoint or 'not started'})"

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """True while its process runs, as far as is known."""

    @property
    @abstractmethod
    def guard(self) -> int:
        """Process id of the guard, on the node of the server. Raises InferenceError if it was not started."""

    @property
    def node_id(self) -> str:
        """Ray's id of the node it runs on; empty without Ray."""
        return ""

    async def is_lost(self) -> bool:
        """Return true if its node no longer belongs to the cluster."""
        return False

    @abstractmethod
    async def start(self) -> None:
        """Start the server and wait until it answers. Raises InferenceError with the cause from its log."""

    @abstractmethod
    async def prepare(self, weights: StagedWeights) -> None:
        """Let the server load `weights` next to the old ones, and wait until it finishes, fails, or dies."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the process and all its child processes."""

    async def close(self) -> None:
        await self.stop()
        for client in self._clients:
            await client.aclose()

    async def is_healthy(self) -> bool:
        return await self.state() == "healthy"

    async def state(self) -> Literal["healthy", "silent", "gone"]:
        """`gone`: the process has ended, or no process listens on its port, even if its guard runs; `silent`: a
        process listens, but does not answer correctly."""
        if not self.is_running or self._http is None:
            return "gone"
        try:
            return "healthy" if (await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)).is_success else "silent"
        except httpx.ConnectError:
            return "gone"
        except httpx.RequestError:
            return "silent"

    async def metrics_text(self) -> str:
        """Return the server's answer to /metrics; empty if it does not answer."""
        if self._http is None:
            return ""
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
        if self._http is None:
            raise InferenceError(f"{self.name}: {path} failed: the server is not there; see {self.log}")
        try:
            response = await self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.RequestError as error:
            raise InferenceError(
                f"{self.name}: {path} failed: {type(error).__name__} {error}; see {self.log}"
            ) from None
        if not response.is_success:
            self._connect()
            excerpt = " ".join(response.text.split())[:300]
            raise InferenceError(f"{self.name}: {path} answered HTTP {response.status_code}: {excerpt}; see {self.log}")
        return response.json()

    def _reach(self, endpoint: str) -> None:
        """Send all further requests to `endpoint`."""
        if self._http is None or endpoint != self._endpoint:
            self._endpoint = endpoint
            self._connect()

    def _connect(self) -> None:
        """Use new connections from now on: a server closes one after an error of its own, and the next request on it
        would fail."""
        self._http = httpx.AsyncClient(
            base_url=self._endpoint,
            timeout=CONTROL_TIMEOUT_S,
            headers=bearer(self._key),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # servers of a run are asked without a proxy; SSL_CERT_FILE may name a file that is gone
        )
        self._clients.append(self._http)
