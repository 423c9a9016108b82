"""Pass-through to an endpoint that takes messages. Its episodes can be evaluated, not trained.

Calls of every API are forwarded as chat completions. If the endpoint rejects a request as invalid, the agent gets that
error unchanged; any other failure is recorded as trouble, which masks the episode.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from roll_flash.chat.model_text import encodable
from roll_flash.chat.openai_client import (
    ANSWER_ERRORS,
    EndpointRefusedError,
    OpenAIChatClient,
    excerpt,
    text_of_content,
    token_count,
)
from roll_flash.errors import InferenceError
from roll_flash.gateway.apis.answer_text import new_call_id
from roll_flash.gateway.apis.api_error import ApiError, unsupported
from roll_flash.gateway.backend import require_mostly_shown
from roll_flash.gateway.model_call import Answer, ModelCall, Reply, SampledToken, ToolCall, Usage
from roll_flash.gateway.sessions.history import CallRecord
from roll_flash.gateway.sessions.session import Session
from roll_flash.processes.background import gather_or_cancel

CLIENT_ERROR_STATUSES = frozenset({400, 413, 422})
"""Status codes caused by the agent's request; a wrong key or an unknown model is the gateway's fault."""


class EndpointBackend:
    """`Backend` over any OpenAI-compatible endpoint. Belongs to one event loop."""

    def __init__(self, client: OpenAIChatClient, name: str | None = None) -> None:
        """The caller closes the client. `name`: model name for agents; default: the model's name at the endpoint."""
        self._client = client
        self._name = name or client.model

    @property
    def model(self) -> str:
        return self._name

    @property
    def max_length(self) -> int | None:
        return None

    async def complete(self, call: ModelCall, session: Session, number: int) -> tuple[Reply, list[CallRecord]]:
        started_s = session.history.clock.now_s()
        place = session.history.find(call)
        try:
            bodies = await self._ask(call, session, number)
        except EndpointRefusedError as error:
            if error.status in CLIENT_ERROR_STATUSES:
                raise _as_refused(error, session) from None
            raise
        try:
            answers = tuple(_answer(choice) for body in bodies for choice in body["choices"])
            usages = [_usage(body) for body in bodies]
            usage = Usage(usages[0].prompt_tokens, sum(each.completion_tokens for each in usages))
        except ANSWER_ERRORS:
            raise InferenceError(f"{self._client.url}: not a chat completion: {excerpt(bodies)}") from None
        if not answers:
            raise InferenceError(f"{self._client.url}: a chat completion without choices")
        if usage.prompt_tokens:
            require_mostly_shown(place, usage.prompt_tokens)
        session.require_open()
        records = [
            session.history.add_answer(
                place,
                answer,
                given_ids=[],
                generation=None,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens // len(answers),
                started_s=started_s,
            )
            for answer in answers
        ]
        return Reply(answers, usage), records

    async def _ask(self, call: ModelCall, session: Session, number: int) -> list[Any]:
        """Ask for all answers of a call; if the run decides about sampling, for each by itself, as our own servers are
        asked: many answers at once would exceed a deadline, which saves an agent from its score."""
        ruled = session.settings.sampling
        request = partial(_encoded, self._client.model, replace(call, n=1) if ruled else call, session)
        # Once for all answers, in a thread: a body may take a tenth of a second.
        encoded = await session.work.do(request, call.keys.characters(0))

        async def one(seed: int | None) -> Any:
            async with session.generating:
                body = encoded if seed is None else b'%b, "seed": %d}' % (encoded[:-1], seed)
                return await self._client.complete(body, timeout_s=session.timeout_s)

        if ruled is None:
            return [await one(call.requested.seed)]
        return await gather_or_cancel(*(one(ruled.with_own_seed(number + index).seed) for index in range(call.n)))

    async def count_tokens(self, call: ModelCall, session: Session) -> int:
        raise unsupported("count_tokens", "the endpoint behind this gateway reports no tokens")


def _usage(body: dict[str, Any]) -> Usage:
    reported = body.get("usage") or {}
    return Usage(*(token_count(reported.get(f"{kind}_tokens")) or 0 for kind in ("prompt", "completion")))


def _encoded(model: str, call: ModelCall, session: Session) -> bytes:
    """Return the body of a request as JSON, without the seed."""
    wanted, ruled = call.requested, session.settings.sampling
    body: dict[str, Any] = {**call.extra, "model": model, "messages": list(call.messages)}
    if call.tools:
        body["tools"] = list(call.tools)
        body["tool_choice"] = _tool_choice(call.tool_choice)
    limits = [limit for limit in (wanted.max_tokens, ruled.max_new_tokens if ruled else None) if limit is not None]
    settings: dict[str, Any] = {
        "temperature": ruled.temperature if ruled else wanted.temperature,
        "top_p": (ruled.top_p if ruled.top_p != 1 else None) if ruled else wanted.top_p,
        "top_k": (ruled.top_k or None) if ruled else wanted.top_k,
        "max_tokens": min(limits, default=None),
        "stop": [*(ruled.stop if ruled else ()), *wanted.stop] or None,
        "n": call.n if call.n > 1 else None,
        "logprobs": True if call.wants_logprobs else None,
    }
    return json.dumps(body | {name: value for name, value in settings.items() if value is not None}).encode()


def _tool_choice(choice: str) -> Any:
    kind, _, name = choice.partition(":")
    return {"type": "function", "function": {"name": name}} if name else kind


def _answer(choice: dict[str, Any]) -> Answer:
    message = choice["message"]
    calls = tuple(_tool_call(call) for call in message.get("tool_calls") or ())
    content = text_of_content(message.get("content"))
    scored = (choice.get("logprobs") or {}).get("content") or ()
    return Answer(
        raw=content,
        content=content,
        thinking=encodable(str(message.get("reasoning_content") or message.get("reasoning") or "")),
        tool_calls=calls,
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        stop_string=None,
        tokens=tuple(SampledToken(encodable(str(entry["token"])), float(entry["logprob"])) for entry in scored),
    )


def _tool_call(call: dict[str, Any]) -> ToolCall:
    arguments = call["function"].get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    name = encodable(str(call["function"]["name"]))
    return ToolCall(encodable(str(call.get("id") or new_call_id())), name, encodable(text))


def _as_refused(error: EndpointRefusedError, session: Session) -> ApiError:
    is_long = "context length" in error.said or "context_length_exceeded" in error.said
    session.context_was_full |= is_long
    return ApiError(error.status, "context_length_exceeded" if is_long else "endpoint_refused", error.said)
