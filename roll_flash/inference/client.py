"""The worker's side: token ids to a vLLM server, token ids with logprobs and weight versions back.

Bare aiohttp, because this is the hot path: at 512 concurrent episodes httpx (and the SDKs on top of it) spends 41-50 ms
of CPU per rollout, as its pool looks at every connection for every request; aiohttp spends 1.0 ms.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from roll_flash.errors import ConfigError, InferenceError
from roll_flash.inference.engine import ClientSpec, Generation, InferenceClient
from roll_flash.inference.router import Router
from roll_flash.types import FinishReason, SamplingParams

GENERATE_PATH = "/inference/v1/generate"
RETRY_WAIT_S = 1.0
"""Pause before all servers are tried again when none could be reached: one may be on its way back."""
UNLABELLED_VERSION = "default"
"""How vLLM names weights that nobody labelled: those it loaded itself."""

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def open_client(spec: ClientSpec) -> InferenceClient:
    """A client for the servers of `spec`, in any process. Needs a running event loop at its first call only."""
    if not spec.endpoints:
        raise ConfigError(f"engine {spec.engine!r} gave no endpoints to connect to")
    return VllmClient(spec)


class VllmClient:
    """`InferenceClient` over HTTP. One per event loop; any number of calls at once."""

    def __init__(self, spec: ClientSpec) -> None:
        self._max_model_len = spec.max_model_len
        self._router = Router(spec.endpoints)
        self._servers = len(spec.endpoints)
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        session: str | None = None,
        timeout_s: float,
    ) -> Generation:
        """See `InferenceClient`. A server that cannot be reached is left out and the request goes to another one;
        with none left it tries again until `timeout_s` is over, because a server may be on its way back."""
        room = self._max_model_len - len(token_ids)
        if not token_ids or room < 1:
            raise InferenceError(
                f"request {request_id}: {len(token_ids)} tokens leave no room in {self._max_model_len}"
            )
        new_tokens = min(sampling.max_new_tokens, room)
        body = json.dumps(_request_body(token_ids, sampling, new_tokens, request_id)).encode()
        unreachable = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    tried: set[str] = set()
                    while len(tried) < self._servers:
                        server = self._router.choose(
                            len(token_ids) + new_tokens, session=session, now_s=time.monotonic(), avoid=tried
                        )
                        try:
                            return await self._ask(server, body)
                        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                            self._router.failed(server, time.monotonic())
                            tried.add(server)
                            unreachable = f"{server}: {type(error).__name__} {error}"
                        finally:
                            self._router.done(server, len(token_ids) + new_tokens)
                    await asyncio.sleep(RETRY_WAIT_S)
        except TimeoutError:
            if unreachable:
                raise InferenceError(f"no server could be reached for {timeout_s:g} s; last: {unreachable}") from None
            raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, server: str, body: bytes) -> Generation:
        started = time.monotonic()
        if self._session is None:
            self._session = _open_session()
        url = server + GENERATE_PATH
        async with self._session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            content = await response.read()
        if response.status != 200:
            excerpt = " ".join(content.decode(errors="replace").split())[:300]
            raise InferenceError(f"{server}: HTTP {response.status}: {excerpt}")
        try:
            return _generation(json.loads(content), server, time.monotonic() - started)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            excerpt = content[:200].decode(errors="replace")
            raise InferenceError(f"{server}: not an answer to a generate request ({error!r}): {excerpt}") from None


def _open_session() -> aiohttp.ClientSession:
    """No limit on connections, because the scheduler limits the episodes; deadlines are the callers'."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )


def _request_body(
    token_ids: Sequence[int], sampling: SamplingParams, new_tokens: int, request_id: str
) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "max_tokens": new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # 0 asks for the sampled token alone, without alternatives.
        "logprobs": 0,
        # Text is needed on the server only to look for stop strings.
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    return {"request_id": request_id, "token_ids": [int(token) for token in token_ids], "sampling_params": parameters}


def _generation(answer: Any, server: str, elapsed_s: float) -> Generation:
    choice = answer["choices"][0]
    token_ids = np.asarray(choice["token_ids"], np.int32)
    logprobs = np.asarray([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
    finish_reason = _FINISH_REASONS[choice["finish_reason"]]
    if len(token_ids) == 0 or len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} logprobs, finished by {finish_reason}")
    versions = _versions(choice["weight_versions"], len(token_ids))
    return Generation(token_ids, logprobs, versions, finish_reason, server, elapsed_s)


def _versions(spans: Any, length: int) -> NDArray[np.int32]:
    """One version per token. Raises ValueError if the spans leave a token out."""
    versions = np.full(length, -1, np.int32)
    for span in spans:
        label = span["version"]
        versions[span["start"] : span["end"]] = 0 if label == UNLABELLED_VERSION else int(label)
    if (versions < 0).any():
        raise ValueError(f"weight versions {spans} do not cover {length} tokens")
    return versions
