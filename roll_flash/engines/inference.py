"""Defines the two protocols that an inference engine implements.

`InferenceEngine` is the driver's side: it owns the server processes and updates their weights. `InferenceClient` is the
worker's side: it turns token ids into token ids. The engine returns a picklable `ClientSpec`; a worker in any process
creates a client from it with `open_client`.
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
    """The tokens that a model sampled for one turn. Arrays have shape [N], N >= 1, one entry per sampled token.

    `token_ids` includes the end-of-turn token if the model sampled one. `logprobs` are natural logs under the sampling
    distribution; `versions` are the weight versions that sampled the tokens.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    server: str
    elapsed_s: float
    routed_experts: NDArray[np.int16] | None = None
    """Experts [M, layers, k] of a mixture of experts for the tokens after the `known_experts` of the request: first
    those of the prompt, then sampled ones. The last sampled token has none yet, because it was not computed yet. None
    if the servers return none (`ClientSpec.returns_experts`)."""


NO_EXPERTS = -1
"""Stands for each expert of a token whose experts are not known."""


def policy_arrays(
    length: int, generations: Sequence[tuple[int, Generation]]
) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]:
    """Return policy mask, log-probabilities and versions [T] of a sample of `length` tokens, whose generations begin at
    the given places."""
    mask = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    for start, generation in generations:
        span = slice(start, start + len(generation.token_ids))
        mask[span] = True
        logprobs[span] = generation.logprobs
        versions[span] = generation.versions
    return mask, logprobs, versions


def join_experts(generations: Sequence[Generation], length: int) -> NDArray[np.int16] | None:
    """Return the experts [length, layers, k] of a conversation, `NO_EXPERTS` where they are not known; None without
    any. Each of its turns was asked for the experts after those of the turns before."""
    parts = [each.routed_experts for each in generations if each.routed_experts is not None]
    if not parts:
        return None
    found = np.concatenate(parts)[:length]
    return np.pad(found, ((0, length - len(found)), (0, 0), (0, 0)), constant_values=NO_EXPERTS)


def fill_experts(lengths: Sequence[int], parts: Sequence[NDArray[np.int16] | None]) -> NDArray[np.int16] | None:
    """Join the experts of several sequences, `NO_EXPERTS` for those without; None if none has any.

    A turn has none if its server died after its last token and before it told the experts.
    """
    shape = next((part.shape[1:] for part in parts if part is not None), None)
    if shape is None:
        return None
    return np.concatenate(
        [
            np.full((length, *shape), NO_EXPERTS, np.int16) if part is None else part
            for length, part in zip(lengths, parts, strict=True)
        ]
    )


def count_experts(generations: Sequence[Generation]) -> int:
    """Return the number of tokens of a conversation whose experts are known: the `known_experts` of its next turn."""
    return sum(len(each.routed_experts) for each in generations if each.routed_experts is not None)


class WeightChannel(Protocol):
    """Sends weights from the learner directly to one server at a time (NCCL)."""

    async def join(self, endpoint: str, world_size: int, receive: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
        """Form a process group with a server of `world_size` workers; `receive` gives the server the address."""
        ...

    async def send(self, endpoint: str, weights: StagedWeights, receive: Awaitable[Any]) -> None:
        """Send the weights while `receive`, the server's side of the transfer, runs."""
        ...


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A set of weights that servers can read. `path` is a safetensors file in shared memory; it holds all tensors of
    the model or only the trained ones (see `weight_sync/published.py`)."""

    version: int
    path: str
    num_bytes: int
    model_bytes: int = 0
    """Size in bytes of all tensors of the model; 0 if unknown."""
    update_info: Mapping[str, Any] | None = None
    """Arguments for vLLM's own transfer engines if the weights are on a GPU; None: `path` is a file."""
    channel: WeightChannel | None = None
    """Channel that sends the weights; None if servers read them directly."""
    tag: str = ""
    """Random text that the file at `path` contains too, so that no other file is taken for it; empty: not checked."""
    node_id: str = ""
    """Ray's id of the node where `path` is; empty: that of the driver."""


@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """Timing of one weight update on one server."""

    server: str
    version: int
    paused_s: float
    """Time in seconds during which this server generated nothing because of the update."""
    total_s: float


ExpertSizes = tuple[int | None, int | None, int | None]
"""Decoder layers, experts that a token uses in a layer, and experts of a layer; None for what is not known."""


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """Everything that a worker needs to reach the servers. Picklable."""

    engine: str
    endpoints: tuple[str, ...]
    model_name: str
    max_model_len: int
    capacity_tokens: tuple[float, ...] = ()
    """Maximum outstanding tokens per endpoint, summed over all clients; empty means no limit."""
    clients: int = 1
    """Number of clients that use the servers at the same time; each gets an equal share of the capacity."""
    pin_sessions: bool = False
    """If true, all requests of a session go to one server; every client chooses the same one."""
    stream_every: int | None = None
    """Chunk length in tokens: turns that may be longer than this are streamed in chunks. None never streams."""
    health_timeout_s: float = 30.0
    key: str = field(default="", repr=False)
    """API key that the servers require; empty if they require none."""
    returns_experts: bool = False
    """If true, servers return the experts of each token, and an answer without them is wrong."""
    vocabulary: int | None = None
    """Number of tokens that the model has: an answer with another token is wrong. None if unknown."""
    expert_sizes: ExpertSizes = (None, None, None)
    """An answer with experts that the model does not have is wrong."""


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """An OpenAI-compatible endpoint that is no server of the run. Picklable."""

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)


class InferenceClient(Protocol):
    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session: str | None = None,
        timeout_s: float,
        known_experts: int = 0,
    ) -> Generation:
        """Sample one turn after `token_ids`, whose first `known_experts` tokens have known experts: these are not sent
        again.

        `session` names the episode, so that later turns can reach the server that caches its prefix. Cancelling the
        coroutine cancels the request on the server. If the server dies, hangs or aborts the request, another server
        continues it after the tokens received so far.

        Raises: TimeoutError after `timeout_s`; InferenceError if no server is left or the responses are invalid.
        """
        ...

    async def use(self, spec: ClientSpec) -> None:
        """Use the servers of a newer `spec` from now on. Requests to a server that is not in it continue elsewhere."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of this client so far: load, queue, removed servers, retried requests."""
        ...

    async def close(self) -> None: ...


class InferenceEngine(Protocol):
    @property
    def dtype(self) -> str:
        """Dtype in which the servers compute: `float32` or `bfloat16`."""
        ...

    async def start(self) -> None:
        """Start all servers and wait until they are healthy. Raises InferenceError with the tail of the server log."""
        ...

    def client_spec(self) -> ClientSpec: ...

    async def publish(self, weights: StagedWeights, *, in_flight: InFlight = "keep") -> list[ServerUpdate]:
        """Update the weights of one server after another; return when all servers have them. `in_flight` decides about
        running requests: they are kept, or aborted and then resumed by their clients."""
        ...

    async def forget_weights_on_devices(self) -> None:
        """Give no server the published weights again that are on a GPU of the learner, which will overwrite them. Only
        called if `publish` got such weights (`update_info`)."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities [T - 1] of `token_ids[1:]`, each given its prefix (parity probe).

        One array per server.
        """
        ...

    async def metrics(self) -> dict[str, float]:
        """Metrics of the servers so far. A server that does not respond is left out."""
        ...

    async def close(self) -> None:
        """Stop all server processes. Safe to call twice, and after a failed start."""
        ...
