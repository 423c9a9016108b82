"""Token client of the rollout worker: sends token ids to servers, gets token ids, logprobs and weight versions.

If a server dies, hangs, sends a bad answer or aborts for new weights, the client retries and continues after the tokens
it has. The caller gets one turn, or one error that names the server and its answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from roll_flash.chat.prompt_logprobs import GENERATE_PATH
from roll_flash.engines.inference import ClientSpec, Generation, InferenceClient
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.inference.client.admission import Admission
from roll_flash.inference.client.health import ServerHealth
from roll_flash.inference.client.http_connections import BadAnswerError, ConnectionLostError, HttpConnections
from roll_flash.inference.client.metrics import Counts
from roll_flash.inference.client.partial_turn import Decode, PartialTurn
from roll_flash.inference.client.router import Router
from roll_flash.inference.client.token_protocol import decode_piece, event_splitter, excerpt
from roll_flash.processes.background import cancel_and_wait, start_background
from roll_flash.types import SamplingParams

MAX_BAD_ANSWERS = 3
"""Maximum bad answers per request; then it fails: the request itself may be the cause."""
BAD_ANSWERS_IN_A_ROW = 2
"""Number of consecutive bad answers after which a server is removed."""
BUSY_STATUS = frozenset({408, 425, 429})
"""Temporary 4xx statuses, which are retried; all other 4xx mean a wrong request."""
REACH_S = 12.0
"""Time in seconds in which each server must accept a connection at the start; a firewall may swallow packets."""
REACH_EVERY_S = 0.5
ABORT_PAUSE_S = 0.05
"""Pause in seconds before the retry of a request that was aborted without a new token."""

_log = logging.getLogger(__name__)


def open_client(spec: ClientSpec, tokenizer: Any = None) -> InferenceClient:
    """Create a client for the servers of `spec`, in any process. Needs no event loop before its first call.

    With the model's `tokenizer` a turn with stop strings continues after an interruption; without one it starts again.
    """
    if not spec.endpoints:
        raise ConfigError(f"engine {spec.engine!r} gave no endpoints to connect to")
    decode = partial(tokenizer.decode, skip_special_tokens=True) if tokenizer is not None else None
    return TokenClient(spec, decode)


class TokenClient:
    """`InferenceClient` over HTTP. One per event loop; allows any number of parallel calls."""

    def __init__(self, spec: ClientSpec, decode: Decode | None = None, *, first: int | None = None) -> None:
        """`first`: index of the first server to use; None uses the process id, so that processes differ."""
        self._spec = spec
        self._decode = decode
        self._router = Router(
            spec.endpoints,
            capacity_tokens=_capacities(spec),
            pinned=spec.pin_sessions,
            first=os.getpid() if first is None else first,
        )
        self._admission = Admission(self._router)
        self._connections = {server: HttpConnections(server, spec.key) for server in spec.endpoints}
        self._bad_in_a_row = dict.fromkeys(spec.endpoints, 0)
        self._health: dict[str, ServerHealth] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._last_error = ""
        self.counts = Counts()

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
        """See `InferenceClient`. If all servers are down, wait up to `timeout_s` for one to come back."""
        room = self._spec.max_model_len - len(token_ids)
        if not token_ids or room < 1:
            raise InferenceError(
                f"request {request_id}: {len(token_ids)} tokens leave no room in {self._spec.max_model_len}"
            )
        if not self._watches:
            for server in self._spec.endpoints:
                self._begin_to_watch(server)
        self.counts.requests += 1
        new_tokens = min(sampling.max_new_tokens, room)
        known = known_experts if self._spec.returns_experts else None
        turn = PartialTurn(
            token_ids,
            sampling,
            new_tokens,
            request_id,
            self._spec.stream_every,
            self._decode,
            known,
            self._spec.vocabulary,
            self._spec.expert_sizes,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._complete(turn, session)
        except TimeoutError:
            if self._router.healthy:
                raise
            raise InferenceError(f"no server could be reached for {timeout_s:g} s; last: {self._last_error}") from None

    async def use(self, spec: ClientSpec) -> None:
        """See `InferenceClient`."""
        before, self._spec = self._spec, spec
        is_watching = bool(self._watches)
        for server in set(spec.endpoints) - set(before.endpoints):
            self._connections.setdefault(server, HttpConnections(server, spec.key))
            self._bad_in_a_row[server] = 0
            self._router.add(server)
            if is_watching:
                self._begin_to_watch(server)
        for server, tokens in _capacities(spec).items():
            self._router.set_capacity(server, tokens)
        for server in set(before.endpoints) - set(spec.endpoints):
            self._router.remove(server)
            self._connections[server].interrupt("the server is no longer part of the run")
            if (watch := self._watches.pop(server, None)) is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        self._admission.admit()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this client only. Servers are numbered in the order of the spec's endpoints."""
        outstanding = [self._router.outstanding_tokens(server) for server in self._spec.endpoints]
        return {
            **{name: float(count) for name, count in asdict(self.counts).items()},
            **{f"outstanding_tokens_{index}": float(tokens) for index, tokens in enumerate(outstanding)},
            "servers_out": float(len(self._spec.endpoints) - self._router.healthy),
            "spill_overs": float(self._router.spill_overs),
            "queue_waiting": float(self._admission.waiting),
            "queue_waits": float(self._admission.waits),
            "queue_wait_s": self._admission.wait_s,
            "queue_longest_wait_s": self._admission.max_wait_s,
        }

    async def close(self) -> None:
        await cancel_and_wait(self._watches.values())
        self._watches.clear()
        for connections in self._connections.values():
            connections.close()

    async def _complete(self, turn: PartialTurn, session: str | None) -> Generation:
        bad_answers = 0
        avoid: str | None = None
        while True:
            tokens = turn.tokens
            server = await self._admission.enter(tokens, session, avoid)
            failed = True
            try:
                await self._ask(server, turn)
                failed = False
            except ConnectionLostError as error:
                self.counts.tokens_kept += turn.end_early()
                self._note_version(server, turn)
                self._remove(server, str(error))
            except BadAnswerError as error:
                turn.discard()
                bad_answers += 1
                self._note_bad_answer(server, str(error))
                if bad_answers >= MAX_BAD_ANSWERS:
                    raise InferenceError(
                        f"request {turn.request_id}: {bad_answers} answers were wrong, the last of {server}: {error}"
                    ) from None
            finally:
                self._admission.leave(server, tokens)
            if turn.finish_reason is not None:
                return turn.generation(server)
            self.counts.asked_again += 1
            # A server that aborted for new weights is back soon; using it again keeps the load balanced.
            avoid = server if failed else None

    async def _ask(self, server: str, turn: PartialTurn) -> None:
        receiver = event_splitter(turn.take) if turn.is_streamed else None
        known = turn.known_tokens
        answer = await self._connections[server].post(GENERATE_PATH, turn.request(), receiver)
        if answer.status != 200:
            failure = f"HTTP {answer.status}: {excerpt(answer.body)}"
            if 400 <= answer.status < 500 and answer.status not in BUSY_STATUS:
                raise InferenceError(f"{server}: {failure}")
            raise BadAnswerError(failure)
        if answer.body:
            turn.take(decode_piece(answer.body))
        gained = turn.finish()
        self._bad_in_a_row[server] = 0
        self._router.set_distance(server, self._connections[server].round_trip_s)
        self._health[server].succeeded()
        self._note_version(server, turn)
        if turn.finish_reason is None:
            self.counts.aborted += 1
            self.counts.tokens_kept += gained
            if turn.known_tokens == known:
                await asyncio.sleep(ABORT_PAUSE_S)

    def _note_version(self, server: str, turn: PartialTurn) -> None:
        """Record the newest version seen from a server: it must have that version when it comes back."""
        if turn.newest_version is not None:
            self._health[server].sampled_with(turn.newest_version)

    def _note_bad_answer(self, server: str, reason: str) -> None:
        self.counts.bad_answers += 1
        self._bad_in_a_row[server] += 1
        self._last_error = f"{server}: {reason}"
        if self._bad_in_a_row[server] >= BAD_ANSWERS_IN_A_ROW:
            self._remove(server, reason)

    def _remove(self, server: str, reason: str) -> None:
        self._last_error = f"{server}: {reason}"
        if self._router.remove(server):
            self.counts.removed += 1
            self._health[server].removed()
            _log.warning("%s is left out: %s", server, reason)

    def _bring_back(self, server: str) -> None:
        self._router.bring_back(server)
        self._bad_in_a_row[server] = 0
        self.counts.returned += 1
        _log.info("%s is back", server)
        self._admission.admit()

    def _is_busy(self, server: str) -> bool:
        return self._router.outstanding_tokens(server) > 0

    def _interrupt(self, server: str, reason: str) -> None:
        """Remove a hung server and end its requests, as it keeps connections open; they retry on other servers."""
        self.counts.hung += 1
        self._remove(server, reason)
        self._connections[server].interrupt(reason)

    def _begin_to_watch(self, server: str) -> None:
        health = ServerHealth(
            self._connections[server],
            timeout_s=self._spec.health_timeout_s,
            is_busy=partial(self._is_busy, server),
            on_hung=partial(self._interrupt, server),
            on_return=partial(self._bring_back, server),
        )
        self._health[server] = health
        self._watches[server] = start_background(health.run(), f"the health of {server}")


async def unreachable(spec: ClientSpec) -> list[str]:
    """Return the servers of `spec` that accept no connection from here within REACH_S."""
    deadline = time.monotonic() + REACH_S

    async def is_reachable(server: str) -> bool:
        connections = HttpConnections(server, spec.key)
        while not (found := await connections.can_be_reached()) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(REACH_EVERY_S)
        return found

    found = await asyncio.gather(*(is_reachable(server) for server in spec.endpoints))
    return [server for server, is_there in zip(spec.endpoints, found, strict=True) if not is_there]


def _capacities(spec: ClientSpec) -> dict[str, float]:
    """Return the maximum outstanding tokens of this client per server; empty if there is no limit."""
    if not spec.capacity_tokens:
        return {}
    shares = (tokens / spec.clients for tokens in spec.capacity_tokens)
    return dict(zip(spec.endpoints, shares, strict=True))
