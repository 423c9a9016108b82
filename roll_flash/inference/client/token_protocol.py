"""Wire protocol of one turn: vLLM's `/inference/v1/generate`, in one piece or streamed.

All server answers are checked here: types and shape by the decoder, then counts, finiteness and versions. Every error
raises BadAnswerError with the wrong value.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from roll_flash.chat.prompt_logprobs import MAX_LOGPROB
from roll_flash.inference.client.http_connections import BadAnswerError
from roll_flash.types import SamplingParams

UNLABELLED_VERSION = "default"
"""vLLM's version label for weights without a label: those it loaded at its start."""
END_OF_STREAM = b"[DONE]"
MIN_LOGPROB = -float(np.finfo(np.float32).max)
"""Logprobs are stored as float32, where a lower one would be minus infinity. JSON has no NaN."""
MAX_INT32 = (1 << 31) - 1
"""Token ids and versions are stored as int32."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    error: Any = None


class Piece(msgspec.Struct, gc=False):
    """New tokens of one request. `versions` is None if the server has not reported them yet."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int]] | None
    """Spans (version, start, end) over all tokens of this request so far."""
    finish_reason: Literal["stop", "length", "abort"] | None
    routed_experts: NDArray[np.int16] | None = None
    """Experts [M, layers, k] of the request's tokens from `experts_from` on; only in its last piece."""


_encoder = msgspec.json.Encoder(enc_hook=int)  # a numpy integer among the token ids
_decoder = msgspec.json.Decoder(_Answer)


def encode_request(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    new_tokens: int,
    request_id: str,
    stream_every: int | None,
    experts_from: int = 0,
) -> bytes:
    """Return the body of a request. `stream_every`: tokens per streamed piece; None: the whole turn at once.
    `experts_from`: the first token whose experts the server returns, if it returns any."""
    parameters: dict[str, Any] = {
        "max_tokens": new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # 0 requests the logprob of the sampled token only, without alternatives.
        "logprobs": 0,
        # The server needs text only to find stop strings.
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": sampling.stop, "include_stop_str_in_output": True}
    if sampling.end_ids:
        parameters["stop_token_ids"] = sampling.end_ids
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    if experts_from:
        parameters["routed_experts_prompt_start"] = experts_from
    body: dict[str, Any] = {"request_id": request_id, "token_ids": token_ids, "sampling_params": parameters}
    if stream_every is not None:
        parameters["stream_interval"] = stream_every
        body["stream"] = True
    return _encoder.encode(body)


def decode_piece(content: bytes) -> Piece:
    """Decode one answer, or one event of a streamed answer. Raises BadAnswerError."""
    try:
        answer = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswerError(f"not an answer to a generate request ({error!s:.150}): {excerpt(content)}") from None
    if answer.error is not None:
        raise BadAnswerError(f"an error instead of tokens: {str(answer.error)[:200]}")
    if not answer.choices:
        raise BadAnswerError(f"an answer without choices: {excerpt(content)}")
    choice = answer.choices[0]
    token_ids = choice.token_ids or []
    content_of = choice.logprobs.content if choice.logprobs is not None else None
    logprobs = [entry.logprob for entry in content_of or ()]
    if len(logprobs) != len(token_ids):
        raise BadAnswerError(f"{len(token_ids)} tokens with {len(logprobs)} logprobs")
    if logprobs and not MIN_LOGPROB <= min(logprobs) <= max(logprobs) <= MAX_LOGPROB:
        raise BadAnswerError(f"logprobs that are positive or not finite: {min(logprobs):g} to {max(logprobs):g}")
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_INT32:
        raise BadAnswerError(f"token ids from {min(token_ids)} to {max(token_ids)}")
    experts = None if choice.routed_experts is None else decode_experts(choice.routed_experts)
    return Piece(token_ids, logprobs, _versions(choice.weight_versions), choice.finish_reason, experts)


def decode_experts(text: str) -> NDArray[np.int16]:
    """Decode an array [tokens, layers, k] of vLLM: a .npy file in base64. Raises BadAnswerError."""
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        found: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]
    except Exception as error:  # numpy parses the header as Python source and lets errors of many kinds through
        raise BadAnswerError(f"routed experts that cannot be read: {str(error)[:200]}") from None
    if found.ndim != 3 or found.dtype.kind not in "iu":
        raise BadAnswerError(f"routed experts of shape {found.shape} and type {found.dtype}")
    if found.size and not 0 <= found.min() <= found.max() <= np.iinfo(np.int16).max:
        raise BadAnswerError(f"routed experts from {found.min()} to {found.max()}")
    experts: NDArray[np.int16] = found.astype(np.int16)
    return experts


def encode_experts(experts: NDArray[np.int16]) -> str:
    """Return the text that `decode_experts` reads."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def event_splitter(take: Callable[[Piece], None]) -> Callable[[bytes], None]:
    """Return a receiver for the bytes of a server-sent event stream; it calls `take` with each event's piece."""
    buffer = bytearray()
    searched = 0  # bytes of the buffer in which no event ends

    def receive(part: bytes) -> None:
        nonlocal searched
        buffer.extend(part)
        begin = 0
        while (end := buffer.find(b"\n\n", max(begin, searched))) >= 0:
            event = bytes(buffer[begin:end]).strip()
            begin = end + 2
            if not event.startswith(b"data:"):
                raise BadAnswerError(f"not an event of a stream: {excerpt(event)}")
            data = event[5:].strip()
            if data != END_OF_STREAM:
                take(decode_piece(data))
        del buffer[:begin]
        searched = max(0, len(buffer) - 1)

    return receive


def excerpt(content: bytes) -> str:
    """Return the start of a server's answer on one line."""
    return " ".join(content[:600].decode(errors="replace").split())[:200] or "nothing"


def _versions(spans: list[_Span] | None) -> list[tuple[int, int, int]] | None:
    if spans is None:
        return None
    try:
        found = [(0 if s.version == UNLABELLED_VERSION else int(s.version), s.start, s.end) for s in spans]
    except ValueError:
        raise BadAnswerError(f"a weight version that is no number: {spans[0].version[:100]!r}") from None
    if any(not 0 <= version <= MAX_INT32 for version, _, _ in found):
        raise BadAnswerError(f"weight versions {found[:3]}")
    return found
