"""Chat client for any OpenAI-compatible endpoint. For evaluation only: it gets text, not the sampled tokens.

Temporary errors are retried: connection errors, 408, 409 and 5xx a limited number of times; rate limits (429, and 503
or 529 with `Retry-After`) until the deadline of the request. If the endpoint sends `Retry-After`, all requests of this
client wait for that time. aiohttp and not httpx: `benchmarks/results/clients.md`.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import reprlib
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from roll_flash.chat.model_text import encodable
from roll_flash.config.addresses import is_loopback
from roll_flash.engines.inference import ChatEndpoint
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.types import FinishReason, Message, SamplingParams

RETRIED_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
CONNECT_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0
"""Long enough for an endpoint that loads its model on the first request."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum size of an answer in bytes, above any real answer with logprobs; an endless answer must not fill memory."""
MAX_ANSWER_MARKS = 2_000_000
"""Maximum number of commas and opening brackets in one answer: 100,000 tokens with their logprobs. An answer with more
values blocks a worker for seconds and takes gigabytes."""
MAX_ERROR_BYTES = 1 << 20
"""Number of bytes of an error answer that are read for its text."""
MAX_TOKENS = 1 << 31
"""Maximum token count that an endpoint may report for one answer."""
MAX_BACKOFF_S = 30.0
_shortening = reprlib.Repr()
_shortening.maxstring = _shortening.maxother = 80
ANSWER_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading an answer of another form may raise: wrong types, numbers beyond a float, nesting without end."""
CONTEXT_ERROR_TEXTS = ("context length", "context_length", "context size", "context window", "prompt is too long")
"""Error texts for a conversation that does not fit the context; there is no standard error code."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Answer of the endpoint. Token counts are None if it does not report them."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int | None
    completion_tokens: int | None
    elapsed_s: float
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Format of the endpoint: `{"id", "type": "function", "function": {"name", "arguments": JSON text}}`."""


def says_too_long(status: int | None, said: str) -> bool:
    """Return True for an endpoint's error of a conversation that does not fit the model's context."""
    return status in (400, 413, 422) and any(words in said.lower() for words in CONTEXT_ERROR_TEXTS)


class EndpointRefusedError(InferenceError):
    """The endpoint answered `status`, a permanent error."""

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said

    @property
    def is_too_long(self) -> bool:
        """True if the conversation does not fit the model's context."""
        return says_too_long(self.status, self.said)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """An unsuccessful answer."""

    status: int
    text: str
    retry_after_s: float | None

    @property
    def throttles(self) -> bool:
        asked_to_wait = self.status in (503, 529) and self.retry_after_s is not None
        # OpenAI also sends 429 for an account without credit; that error is permanent.
        return (self.status == 429 and "insufficient_quota" not in self.text) or asked_to_wait

    @property
    def is_temporary(self) -> bool:
        return self.throttles or (self.status in RETRIED_STATUS and self.status != 429)


def api_key_from(name: str | None) -> str | None:
    """Return the key in the environment variable `name`; None if `name` is None. Raises ConfigError if not set."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()  # a file's last line end may have come along
    if not key:
        raise ConfigError(f"the environment variable {name} is not set; put the endpoint's key into it")
    return key


class OpenAIChatClient:
    """Chat client; not thread-safe, one per event loop. `max_connections`: maximum requests in flight; 0: no limit."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        path: str = "/chat/completions",
        max_connections: int = 0,
        max_attempts: int = 5,
        backoff_s: float = 0.5,
    ) -> None:
        """`path`: another one than that of chat completions, for `complete` alone."""
        self.url = base_url.rstrip("/").removesuffix(path) + path
        self.model = model
        self.takes_tools = True
        """The caller sets it to False if the endpoint refuses declared tools."""
        self._max_connections = max_connections
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._not_before_s = 0.0
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Content-Type": "application/json"}
        self._key = api_key
        if not _is_http(self.url):
            raise InferenceError(f"{base_url}: not an endpoint; one looks like http://host:port/v1")
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise InferenceError(f"{base_url}: the key for this endpoint has characters that no key can have")
            self._headers["Authorization"] = f"Bearer {api_key}"

    @classmethod
    def at(cls, endpoint: ChatEndpoint, *, max_attempts: int = 5) -> OpenAIChatClient:
        return cls(endpoint.base_url, endpoint.model, endpoint.key, max_attempts=max_attempts)

    async def ask_for_one_token(self, timeout_s: float) -> ChatReply:
        """Ask for one token, so that errors are reported early. Raises InferenceError if the endpoint is down, rejects
        the key or the model, or sends an invalid answer."""
        hello: list[Message] = [{"role": "user", "content": "Hello"}]
        try:
            return await self.chat(hello, SamplingParams(temperature=0.0, max_new_tokens=1), timeout_s=timeout_s)
        except TimeoutError:
            raise InferenceError(f"{self.url}: no answer to a request for one token within {timeout_s:g} s") from None

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatReply:
        """Return one completion. `timeout_s` includes all retries and waits.

        Raises TimeoutError, or InferenceError if an error is permanent or retries do not help.
        """
        started = time.monotonic()
        body = _request_body(self.model, messages, sampling) | ({"tools": list(tools)} if tools else {})
        answer = await self.complete(body, timeout_s=timeout_s)
        return _reply(answer, self.url, time.monotonic() - started)

    async def complete(self, body: Mapping[str, Any] | bytes, *, timeout_s: float) -> Any:
        """Send the body of a request, or its JSON, unchanged; return the answer's JSON. Raises the errors of `chat`,
        and EndpointRefusedError if the endpoint refuses the request."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with asyncio.timeout(timeout_s):
            return await self._post(sent, deadline_s=time.monotonic() + timeout_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: bytes, deadline_s: float) -> Any:
        failed = throttled = 0
        while True:
            await self._wait_for_turn(deadline_s)
            outcome = await self._send(body)
            if isinstance(outcome, bytes):
                return _json(outcome, self.url)
            text = outcome if isinstance(outcome, str) else f"HTTP {outcome.status}: {outcome.text}"
            if isinstance(outcome, _Refusal) and not outcome.is_temporary:
                message = f"{self.url}: {text}{_advice(outcome.status, self.model)}"
                raise EndpointRefusedError(message, outcome.status, outcome.text)
            if isinstance(outcome, _Refusal) and outcome.throttles:
                throttled += 1
                await self._back_off(outcome, throttled, text, deadline_s)
                continue
            failed += 1
            if failed >= self._max_attempts:
                raise InferenceError(f"{self.url}: gave up after {failed} attempts: {text}; is the server up?")
            await asyncio.sleep(self._backoff(failed))

    async def _back_off(self, refusal: _Refusal, throttled: int, text: str, deadline_s: float) -> None:
        """Make all requests wait for the endpoint's `Retry-After`; without it only this one, with growing back-off."""
        asked_s = refusal.retry_after_s or 0.0
        wait_s = max(self._backoff(throttled), asked_s)
        self._require_time(wait_s, deadline_s, text)
        self._not_before_s = max(self._not_before_s, time.monotonic() + asked_s)
        await asyncio.sleep(wait_s)

    async def _wait_for_turn(self, deadline_s: float) -> None:
        while (wait_s := self._not_before_s - time.monotonic()) > 0:
            self._require_time(wait_s, deadline_s, "the endpoint asked other requests to wait")
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.1))

    def _require_time(self, wait_s: float, deadline_s: float, why: str) -> None:
        """Raise InferenceError if a wait would end after the deadline of the request."""
        if time.monotonic() + wait_s > deadline_s:
            raise InferenceError(
                f"{self.url}: throttled: {why}; it would have to wait {wait_s:.0f} s more, past its deadline "
                "(rollout.generate_timeout_s); lower --max-concurrent, or run again later to resume"
            )

    async def _send(self, body: bytes) -> bytes | _Refusal | str:
        """Return the body of the answer, the refusal of the server, or the text of a connection error."""
        try:
            post = self._open_session().post(self.url, data=body, headers=self._headers, allow_redirects=False)
            async with post as response:
                if 300 <= response.status < 400:
                    return _redirected(response)
                content = await self._content(response)
                if response.ok:
                    return content
                text = _error_text(content, response.reason or "")
                if self._key:  # some endpoints quote it; agents and files get these texts
                    text = text.replace(self._key, "[the key]")
                return _Refusal(response.status, text, _seconds(response.headers))
        except aiohttp.InvalidURL as error:
            raise InferenceError(f"{self.url}: {error}; an endpoint looks like http://host:port/v1") from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise InferenceError(f"{self.url}: its certificate is not trusted: {error.certificate_error}") from None
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            return f"no connection: {os.strerror(number) if number and number > 0 else error.os_error}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{type(error).__name__} {error}".strip()

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the body. Raises InferenceError if it is longer than MAX_ANSWER_BYTES."""
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                response.close()
                raise InferenceError(f"{self.url}: an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                # The proxy look-up costs more than the rest of a request, so enable it only if proxies exist.
                trust_env=bool(urllib.request.getproxies()) and not is_loopback(urlsplit(self.url).hostname or ""),
            )
        return self._session

    def _backoff(self, attempt: int) -> float:
        """Return an exponential back-off in seconds, with jitter."""
        longest: float = min(MAX_BACKOFF_S, self._backoff_s * 2 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _redirected(response: aiohttp.ClientResponse) -> _Refusal:
    """Turn a redirect into a refusal: for privacy, the request must not go to another server."""
    text = f"redirects to {response.headers.get('Location', 'nowhere')[:200]!r}; if you trust it, name it as the URL"
    return _Refusal(response.status, text, None)


def _seconds(headers: Mapping[str, str]) -> float | None:
    """Return `Retry-After` in seconds, from a number or a date (RFC 9110, 10.2.3); None if missing or invalid."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        date = email.utils.parsedate_tz(value)
    try:
        return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())
    except (ValueError, OverflowError):  # an impossible date
        return None


def _request_body(model: str, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p if sampling.top_p != 1.0 else None,
        "top_k": sampling.top_k or None,
        "stop": list(sampling.stop) or None,
        "seed": sampling.seed,
    }
    return {name: value for name, value in body.items() if value is not None}


def _json(content: bytes, url: str) -> Any:
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > MAX_ANSWER_MARKS:
        raise InferenceError(f"{url}: an answer of more than {MAX_ANSWER_MARKS} commas and brackets")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        shown = content[:80].decode(errors="replace")
        raise InferenceError(
            f"{url}: the answer is not JSON but {shown!r}; is this an OpenAI-compatible endpoint?"
        ) from None


def _reply(answer: Any, url: str, elapsed_s: float) -> ChatReply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content") if message.get("tool_calls") else message["content"]
        usage = answer.get("usage") or {}
        return ChatReply(
            text=text_of_content(content),
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            prompt_tokens=token_count(usage.get("prompt_tokens")),
            completion_tokens=token_count(usage.get("completion_tokens")),
            elapsed_s=elapsed_s,
            tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
        )
    except ANSWER_ERRORS:
        raise InferenceError(f"{url}: not a chat completion: {excerpt(answer)}") from None


def text_of_content(content: Any) -> str:
    """Return the text of an answer, which endpoints of thinking models give in parts. Raises one of ANSWER_ERRORS."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str | None):
        raise TypeError(f"a {type(content).__name__} is no text")
    return encodable(content or "")


def excerpt(answer: Any) -> str:
    """Return the beginning of an endpoint's answer as text, without rendering all of a large answer."""
    return _shortening.repr(answer)[:120]


def _tool_call(call: Any) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    function = {"name": encodable(str(name)), "arguments": encodable(str(arguments))}
    return {"id": encodable(str(call["id"])), "type": "function", "function": function}


def token_count(value: Any) -> int | None:
    """Return `value` as a token count; None stays None. Raises ValueError if it is not a valid count."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        raise ValueError("not a number of tokens")
    return int(value)


def _error_text(content: bytes, reason: str) -> str:
    content = content[:MAX_ERROR_BYTES]
    try:
        answer = json.loads(content)
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = error.get("message", error) if isinstance(error, dict) else error
        if isinstance(error, dict) and error.get("code") == "insufficient_quota":
            text = f"{text} (insufficient_quota)"
        text = str(text)
    except (ValueError, RecursionError):
        text = content.decode(errors="replace")
    return " ".join(text.split())[:300] or reason


def _advice(status: int, model: str) -> str:
    match status:
        case 401 | 403:
            where = "(serve-gateway: --endpoint-key-env; in a config: api_key_env)"
            return f"; the endpoint needs a key, or another one: give a key with --api-key-env NAME {where}"
        case 404:
            return f"; check that the URL ends with /v1 and that the server knows the model {model!r}"
    return ""
