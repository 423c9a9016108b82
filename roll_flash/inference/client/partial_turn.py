"""State of one turn that may be sampled in several requests: its tokens so far and its next request.

A request ends early when its server dies, hangs or aborts it for new weights. Its tokens are kept exactly as sampled:
the next request continues after them, and every token keeps its logprob and version. A token without a version from the
server is not kept, because its version would be a guess. Each token keeps the experts with which it was computed first:
those of its own request, or of the next one if that request ended before it told them.

A server searches for stop strings only in its own output. A stop string that began in an earlier request is found here,
and the turn is cut after it; without a function to decode tokens, a turn with stop strings starts again instead.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.inference import ExpertSizes, Generation
from roll_flash.inference.client.http_connections import BadAnswerError
from roll_flash.inference.client.token_protocol import Piece, encode_request
from roll_flash.types import FinishReason, SamplingParams

Decode = Callable[[list[int]], str]


class PartialTurn:
    """Call `request`, `take` for each piece, then `finish` or `end_early`; repeat until `finish_reason` is set."""

    def __init__(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        new_tokens: int,
        request_id: str,
        stream_every: int | None,
        decode: Decode | None = None,
        known_experts: int | None = None,
        vocabulary: int | None = None,
        expert_sizes: ExpertSizes = (None, None, None),
    ) -> None:
        """`known_experts`: number of tokens of the prompt whose experts are known; None if servers return none.
        `vocabulary`: number of tokens that the model has; None if unknown."""
        self._prompt = token_ids
        self._sampling = sampling
        self._new_tokens = new_tokens
        self.request_id = request_id
        self._stream_every = stream_every if stream_every is not None and stream_every < new_tokens else None
        self._decode = decode
        self._vocabulary = vocabulary
        self._expert_sizes = expert_sizes
        self._request_starts: list[int] = []
        """Start positions, in new tokens, of the requests after the first."""
        self._started_s = time.monotonic()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        """Version of each token; may be shorter than the tokens while a request is in flight."""
        self._experts_from, self._known_experts = known_experts or 0, known_experts
        """Number of tokens whose experts are known from this and earlier turns."""
        self._experts: list[NDArray[np.int16]] = []
        self._new_experts: NDArray[np.int16] | None = None
        """Those of the request in flight."""
        self._kept = 0
        """Number of tokens kept from earlier requests."""
        self._requests = 0
        self._reported_finish: FinishReason | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> int:
        """Maximum tokens that the next request may occupy on its server: prompt, known tokens and new tokens."""
        return len(self._prompt) + self._new_tokens

    @property
    def known_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def newest_version(self) -> int | None:
        """Weight version of the last token; None if there is no token yet."""
        return self._versions[-1] if self._versions else None

    @property
    def is_streamed(self) -> bool:
        return self._stream_every is not None

    def request(self) -> bytes:
        """Return the body of the next request."""
        self._requests += 1
        self._reported_finish = self._new_experts = None
        start = self._known_experts or 0
        if self._requests == 1:
            return encode_request(
                self._prompt, self._sampling, self._new_tokens, self.request_id, self._stream_every, start
            )
        sampling = self._sampling
        if sampling.seed is not None:
            # The same seed would draw the same random numbers again.
            sampling = replace(sampling, seed=sampling.seed + self._kept)
        return encode_request(
            [*self._prompt, *self._token_ids],
            sampling,
            self._new_tokens - self._kept,
            f"{self.request_id}.{self._requests}",
            self._stream_every,
            start,
        )

    def take(self, piece: Piece) -> None:
        """Add a piece of the answer. Raises BadAnswerError for too many tokens, tokens that the model does not have,
        versions that do not cover them, and experts that the model does not have or of another shape than before."""
        if self._reported_finish is not None:
            raise BadAnswerError("tokens after the end of the turn")
        if len(self._token_ids) + len(piece.token_ids) > self._new_tokens:
            raise BadAnswerError(f"more than the {self._new_tokens - self._kept} tokens that were asked for")
        if self._vocabulary is not None and (largest := max(piece.token_ids, default=0)) >= self._vocabulary:
            raise BadAnswerError(f"token id {largest} of a model with {self._vocabulary} tokens")
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        if piece.versions is not None:
            self._set_versions(piece.versions)
        if piece.routed_experts is not None:
            self._check_experts(piece.routed_experts)
            self._new_experts = piece.routed_experts
        self._reported_finish = piece.finish_reason

    def finish(self) -> int:
        """Process the end of an answer. Raises BadAnswerError if the answer is incomplete.

        An abort leaves the turn open; return the number of tokens kept from the aborted request, else 0.
        """
        if self._reported_finish is None:
            raise BadAnswerError("an answer that ended without a reason")
        if self._reported_finish == "abort":
            return self.end_early()
        if not self._token_ids:
            raise BadAnswerError(f"a turn of no tokens, finished by {self._reported_finish!r}")
        if len(self._versions) < len(self._token_ids):
            raise BadAnswerError(f"no weight version for {len(self._token_ids) - len(self._versions)} tokens")
        self._require_experts()
        self._end(self._reported_finish)
        return 0

    def end_early(self) -> int:
        """End an interrupted request and keep its tokens with a known version. Return the number of kept tokens."""
        labelled = len(self._versions)
        if self._sampling.stop and self._decode is None:
            labelled = self._kept
        self._truncate(labelled)
        gained, self._kept = labelled - self._kept, labelled
        if gained:
            self._keep_experts()
        if labelled >= self._new_tokens:
            self._end("length")
        elif gained:
            self._request_starts.append(labelled)
        return gained

    def discard(self) -> None:
        """Drop all tokens of the current request after a bad answer."""
        self._truncate(self._kept)

    def generation(self, server: str) -> Generation:
        assert self.finish_reason is not None
        return Generation(
            np.array(self._token_ids, np.int32),
            np.array(self._logprobs, np.float32),
            np.array(self._versions, np.int32),
            self.finish_reason,
            server,
            time.monotonic() - self._started_s,
            np.concatenate(self._experts)[: len(self._prompt) + len(self._token_ids) - self._experts_from]
            if self._experts
            else None,
        )

    def _set_versions(self, spans: list[tuple[int, int, int]]) -> None:
        """Set the versions. Spans are relative to the start of the request and always cover all its tokens."""
        made = len(self._token_ids) - self._kept
        versions: list[int] = []
        for version, start, end in spans:
            if start != len(versions) or not start <= end <= made or version < 0:
                raise BadAnswerError(f"weight versions {spans[:3]} for {made} tokens")
            versions += [version] * (end - start)
        if len(versions) != made:
            raise BadAnswerError(f"weight versions {spans[:3]} for {made} tokens")
        self._versions[self._kept :] = versions

    def _check_experts(self, experts: NDArray[np.int16]) -> None:
        shape, known = experts.shape[1:], [part.shape[1:] for part in self._experts[:1]]
        if known and shape != known[0]:
            raise BadAnswerError(f"routed experts of shape {shape} for a token, before {known[0]}")
        layers, per_token, count = self._expert_sizes
        if layers not in (None, shape[0]) or per_token not in (None, shape[1]):
            raise BadAnswerError(f"routed experts of shape {shape} for a token, not ({layers}, {per_token})")
        if count is not None and experts.size and (largest := int(experts.max())) >= count:
            raise BadAnswerError(f"routed expert {largest} of a model with {count} experts")

    def _require_experts(self) -> None:
        """Raises BadAnswerError if the answer lacks the experts of a token that was computed."""
        if self._known_experts is None:
            return
        wanted = len(self._prompt) + len(self._token_ids) - 1 - self._known_experts
        found = 0 if self._new_experts is None else len(self._new_experts)
        if found < wanted:
            raise BadAnswerError(f"routed experts of {found} tokens, not of {wanted}; does the server return any?")

    def _keep_experts(self) -> None:
        """Keep the experts of the request that ended, of tokens that are kept."""
        if self._known_experts is None or self._new_experts is None:
            return
        found = self._new_experts[: len(self._prompt) + len(self._token_ids) - self._known_experts]
        self._experts.append(found)
        self._known_experts += len(found)
        self._new_experts = None

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._sampling.stop and self._request_starts:
            self._cut_at_stop()
        self._keep_experts()

    def _cut_at_stop(self) -> None:
        """Cut the turn after the first stop string that began in an earlier request. A token has at least one byte.

        The end is found by halves, as what has a stop string has it with more tokens too: to decode up to each end in
        turn, with an agent's stop string of 4 KiB, would hold up all episodes of a worker for seconds.
        """
        longest = max(len(stop.encode()) for stop in self._sampling.stop)
        for request_start in self._request_starts:
            first, last = max(0, request_start - longest), min(request_start + longest, len(self._token_ids))
            if request_start < last and self._has_stop(first, last):
                ends = range(request_start + 1, last)
                self._truncate(request_start + 1 + bisect_left(ends, True, key=partial(self._has_stop, first)))
                self.finish_reason = "stop"
                return

    def _has_stop(self, first: int, end: int) -> bool:
        assert self._decode is not None
        text = self._decode(self._token_ids[first:end])
        return any(stop in text for stop in self._sampling.stop)

    def _truncate(self, length: int) -> None:
        del self._token_ids[length:], self._logprobs[length:], self._versions[length:]
