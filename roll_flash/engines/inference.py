"""The two small protocols behind which an inference engine lives.

`InferenceEngine` is the driver's side: it owns server processes and gives them new weights. `InferenceClient` is the
worker's side: it turns token ids into token ids. The engine hands out a picklable `ClientSpec` that a worker in any
process turns into a client with `open_client`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from roll_flash.types import FinishReason, SamplingParams

InFlight = Literal["keep", "abort_resume"]
WeightTransfer = Literal["shm", "nccl", "ipc"]


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What a model sampled for one turn. Arrays have shape [N], N >= 1, one entry per sampled token.

    `token_ids` includes the end-of-turn token if the model sampled one. `logprobs` are natural logs under the
    distribution that was sampled from; `versions` are the weight versions the tokens were sampled with.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    server: str
    elapsed_s: float


class WeightChannel(Protocol):
    """A learner that sends weights itself, to one server at a time (NCCL)."""

    async def join(self, endpoint: str, world_size: int, receive: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        """Meet a server of `world_size` workers; `receive` tells the server where."""
        ...

    async def send(self, endpoint: str, weights: StagedWeights, receive: Awaitable[Any]) -> None:
        """Send while `receive`, the server's part, runs."""
        ...


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A set of weights that servers can read. `path` is a safetensors file in shared memory, which holds all tensors of
    the model or those that are trained (`published_weights.py`)."""

    version: int
    path: str
    num_bytes: int
    model_bytes: int = 0
    """What all tensors of the model would take; 0 where that is not known."""
    update_info: Mapping[str, Any] | None = None
    """What vLLM's own transfer engines are told, where the weights are on a GPU; None: `path` is a file."""
    channel: WeightChannel | None = None
    """Who sends them, where servers cannot read them themselves."""


@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """How one server took one publication."""

    server: str
    version: int
    paused_s: float
    """Time in which this server generated nothing because of the update."""
    total_s: float


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """All a worker needs to reach the servers. Picklable."""

    engine: str
    endpoints: tuple[str, ...]
    model_name: str
    max_model_len: int
    capacity_tokens: tuple[float, ...] = ()
    """For each endpoint the tokens that may be outstanding there, from all clients together; empty is no limit."""
    clients: int = 1
    """Clients that use the servers at the same time: each takes its share of the capacity."""
    pin_sessions: bool = False
    """All requests of a session go to one server, which every client chooses alike."""
    stream_every: int | None = None
    """Stream turns that may be longer than so many tokens, in pieces of that length. None never streams."""
    health_timeout_s: float = 30.0
    key: str = field(default="", repr=False)
    """What the servers ask of everybody; empty where they ask nothing."""


class InferenceClient(Protocol):
    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session: str | None = None,
        timeout_s: float,
    ) -> Generation:
        """Sample one turn after `token_ids`.

        `session` names the episode, so that its later turns can go where its prefix is cached. Cancelling the
        coroutine cancels the request on the server. A request whose server dies, hangs or aborts it goes on at another
        one, after the tokens that are known.

        Raises: TimeoutError after `timeout_s`; InferenceError if no server is left or the servers answer garbage.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Figures of this client so far, for the log: load, queue, removed servers, requests asked again."""
        ...

    async def close(self) -> None: ...


class InferenceEngine(Protocol):
    @property
    def dtype(self) -> str:
        """What the servers compute in: `float32` or `bfloat16`."""
        ...

    async def start(self) -> None:
        """Start all servers and wait until they are healthy. Raises InferenceError with the end of their log."""
        ...

    def client_spec(self) -> ClientSpec: ...

    async def publish(self, weights: StagedWeights, *, in_flight: InFlight = "keep") -> list[ServerUpdate]:
        """Swap the weights of one server after another; returns when all have them. `in_flight` says what becomes of
        the requests that a server is working on: they are kept, or aborted for their clients to resume."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """Log-probabilities [T - 1] of `token_ids[1:]` given what precedes them (parity probe).

        One array per server.
        """
        ...

    async def metrics(self) -> dict[str, float]:
        """Figures of the servers so far, for the log. A server that does not tell is left out."""
        ...

    async def health(self) -> dict[str, bool]:
        """Endpoint -> whether it answers."""
        ...

    async def close(self) -> None:
        """Stop every process. Safe to call twice, and after a failed start."""
        ...
