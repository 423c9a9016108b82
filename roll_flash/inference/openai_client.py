"""A chat client for any OpenAI-compatible endpoint. For evaluation only: it sees text, not the tokens as sampled.

Retries are bounded and only for what may pass: connection errors, 408, 409, 429 and 5xx; `Retry-After` is respected.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from roll_flash.errors import ConfigError, InferenceError
from roll_flash.types import FinishReason, Message, SamplingParams

RETRIED_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504, 529})


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the endpoint answered. Token counts are 0 where it does not tell."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float


def api_key_from(name: str | None) -> str | None:
    """The key in the environment variable `name`; None for none. Raises ConfigError when it is not set."""
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"the environment variable {name} is not set; put the endpoint's key into it")
    return key


class OpenAIChatClient:
    """Thread-unsafe; one per event loop. `max_connections` bounds the requests in flight."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        max_connections: int = 128,
        max_attempts: int = 5,
        backoff_s: float = 0.5,
    ) -> None:
        self.url = base_url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.model = model
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
            httpx.URL(self.url)
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise InferenceError(f"{base_url}: not a usable endpoint or key: {error}") from None

    async def chat(self, messages: Sequence[Message], sampling: SamplingParams, *, timeout_s: float) -> ChatReply:
        """One completion. `timeout_s` bounds everything, retries and waits included.

        Raises: TimeoutError; InferenceError for what does not go away by trying again.
        """
        started = time.monotonic()
        async with asyncio.timeout(timeout_s):
            answer = await self._post(_request_body(self.model, messages, sampling))
        return _reply(answer, self.url, time.monotonic() - started)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, body: dict[str, Any]) -> Any:
        for attempt in range(1, self._max_attempts + 1):
            retry_after: str | None = None
            try:
                response = await self._http.post(self.url, json=body)
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise InferenceError(f"{self.url}: {error}; an endpoint looks like http://host:port/v1") from None
            except httpx.RequestError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            else:
                if response.is_success:
                    return _json(response, self.url)
                trouble = f"HTTP {response.status_code}: {_error_text(response)}"
                if response.status_code not in RETRIED_STATUS:
                    raise InferenceError(f"{self.url}: {trouble}{_advice(response.status_code, self.model)}")
                retry_after = response.headers.get("retry-after")
            if attempt < self._max_attempts:
                await asyncio.sleep(self._wait_s(attempt, retry_after))
        raise InferenceError(f"{self.url}: gave up after {self._max_attempts} attempts: {trouble}; is the server up?")

    def _wait_s(self, attempt: int, retry_after: str | None) -> float:
        """Exponential with jitter; at least what the server asked for in seconds."""
        wait: float = self._backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
        try:
            return max(wait, float(retry_after)) if retry_after else wait
        except ValueError:
            return wait


def _request_body(model: str, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
    }
    if sampling.top_p != 1.0:
        body["top_p"] = sampling.top_p
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _json(response: httpx.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError:
        raise InferenceError(
            f"{url}: the answer is not JSON but {response.text[:80]!r}; is this an OpenAI-compatible endpoint?"
        ) from None


def _reply(answer: Any, url: str, elapsed_s: float) -> ChatReply:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        usage = answer.get("usage") or {}
        return ChatReply(
            text="" if text is None else str(text),
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            elapsed_s=elapsed_s,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise InferenceError(f"{url}: not a chat completion: {str(answer)[:120]}") from None


def _error_text(response: httpx.Response) -> str:
    try:
        answer = response.json()
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300] or response.reason_phrase


def _advice(status: int, model: str) -> str:
    match status:
        case 401 | 403:
            return "; give a key with --api-key-env NAME"
        case 404:
            return f"; check that the URL ends with /v1 and that the server knows the model {model!r}"
    return ""
