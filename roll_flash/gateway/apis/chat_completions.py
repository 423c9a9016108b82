"""`/v1/chat/completions`: parse and render OpenAI's Chat Completions API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from roll_flash.gateway.apis.answer_text import new_call_id
from roll_flash.gateway.apis.api_error import bad_request, unsupported
from roll_flash.gateway.apis.event_stream import Event, pieces
from roll_flash.gateway.apis.request_fields import (
    MAX_ANSWERS,
    MAX_TOP_K,
    content_text,
    flag,
    function_tool,
    number,
    objects,
    refuse,
    require_conversation,
    strings,
    text,
    whole,
)
from roll_flash.gateway.model_call import Answer, ModelCall, Reply, RequestedSampling
from roll_flash.types import Message

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN = ("system", "user", "assistant", "tool")
_UNDERSTOOD = frozenset(
    {"model", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n"}
    | {"max_completion_tokens", "logprobs", "top_logprobs", "stream", "stream_options", "parallel_tool_calls"}
)
"""Fields that are not forwarded unchanged to an endpoint behind the gateway."""


def parse(body: Mapping[str, Any], *, forwards: bool) -> ModelCall:
    """Parse a request. Raises ApiError for a field that is invalid, or would be ignored. `forwards`: an endpoint gets
    all other fields as they are."""
    if not forwards:
        _refuse_what_changes_sampling(body)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(objects(body, "messages"))]
    tools = tuple(_tool(tool) for tool in objects(body, "tools"))
    limit = whole(body, "max_completion_tokens") or whole(body, "max_tokens")
    if whole(body, "top_logprobs", 0):
        raise unsupported("top_logprobs", "only the sampled tokens' own logprobs are known: ask for logprobs alone")
    return ModelCall(
        messages=require_conversation(messages, "messages"),
        tools=tools,
        tool_choice=tool_choice(body.get("tool_choice")),
        requested=RequestedSampling(
            temperature=number(body, "temperature", 0, 2),
            top_p=number(body, "top_p", 0, 1),
            top_k=whole(body, "top_k", -1, MAX_TOP_K),
            max_tokens=limit,
            stop=strings(body, "stop"),
            seed=whole(body, "seed", 0),
        ),
        n=whole(body, "n", 1, MAX_ANSWERS) or 1,
        wants_logprobs=flag(body, "logprobs"),
        extra={name: value for name, value in body.items() if name not in _UNDERSTOOD} if forwards else {},
    )


def tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    if value in ("auto", "none", "required"):
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return f"name:{name}"
    raise bad_request('tool_choice must be "auto", "none", "required" or name a function', "tool_choice")


def wants_usage(body: Mapping[str, Any]) -> bool:
    """True if the last event of a stream contains the token usage."""
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def render(reply: Reply, model: str) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": None, **_message_fields(answer)},
            "logprobs": _logprobs(answer),
            "finish_reason": finish_reason(answer),
        }
        for index, answer in enumerate(reply.answers)
    ]
    return {**_envelope("chat.completion", model), "choices": choices, "usage": _usage(reply)}


def events(reply: Reply, model: str, *, with_usage: bool) -> Iterator[Event]:
    """Like `render`, as a stream of chunks."""
    envelope = _envelope("chat.completion.chunk", model)
    for index, answer in enumerate(reply.answers):

        def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, index: int = index) -> Event:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return Event({**envelope, "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""}, logprobs=_logprobs(answer))
        for piece in pieces(answer.thinking):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(answer.content):
            yield chunk({"content": piece})
        for number_, call in enumerate(answer.tool_calls):
            head = {**call.as_dict(), "index": number_}
            yield chunk({"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]})
            for piece in pieces(call.arguments):
                yield chunk({"tool_calls": [{"index": number_, "function": {"arguments": piece}}]})
        yield chunk({}, finish_reason(answer))
    if with_usage:
        yield Event({**envelope, "choices": [], "usage": _usage(reply)})
    yield Event("[DONE]")


def finish_reason(answer: Answer) -> str:
    if answer.tool_calls:
        return "tool_calls"
    return "length" if answer.finish_reason == "length" else "stop"


def _refuse_what_changes_sampling(body: Mapping[str, Any]) -> None:
    for name in ("frequency_penalty", "presence_penalty"):
        refuse(body, name, [0], "it changes the distribution that is sampled from; leave it out")
    refuse(body, "logit_bias", [{}], "it changes the distribution that is sampled from; leave it out")
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise unsupported("response_format", "sampling cannot be constrained here; ask for the format in the prompt")
    refuse(body, "functions", [[]], "declare them as tools")


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = _ROLES.get(str(message.get("role")), message.get("role"))
    if role not in _KNOWN:
        raise bad_request(f"{where}.role must be one of {', '.join(_KNOWN)}, not {role!r}", f"{where}.role")
    found: Message = {"role": role, "content": content_text(message.get("content"), f"{where}.content")}
    if role == "tool":
        found["tool_call_id"] = str(message.get("tool_call_id") or "")
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "assistant" and message.get("tool_calls"):
        found["tool_calls"] = [_call(call, where) for call in objects(message, "tool_calls")]
    return found


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.tool_calls: a call must have a function", f"{where}.tool_calls")
    name, arguments = text(function, "name", f"{where}.tool_calls."), function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise bad_request(f"{where}.tool_calls: the arguments of {name} must be JSON text", f"{where}.tool_calls")
    call_id = str(call.get("id") or new_call_id())
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise unsupported("tools", "only tools of type function can be declared")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _message_fields(answer: Answer) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": answer.content if answer.content or not answer.tool_calls else None}
    if answer.tool_calls:
        fields["tool_calls"] = [call.as_dict() for call in answer.tool_calls]
    if answer.thinking:
        fields["reasoning_content"] = answer.thinking
    return fields


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if not answer.tokens:
        return None
    content = [
        {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []}
        for t in answer.tokens
    ]
    return {"content": content, "refusal": None}


def _envelope(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(reply: Reply) -> dict[str, int]:
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
