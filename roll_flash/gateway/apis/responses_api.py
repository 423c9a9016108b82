"""`/v1/responses`: parse and render OpenAI's Responses API.

A request contains the whole conversation, or only the new items after `previous_response_id`; the gateway sees the same
conversation in both cases.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from roll_flash.gateway.apis.api_error import ApiError, bad_request, unsupported
from roll_flash.gateway.apis.chat_completions import tool_choice
from roll_flash.gateway.apis.event_stream import Event, pieces
from roll_flash.gateway.apis.request_fields import (
    content_text,
    function_tool,
    number,
    objects,
    refuse,
    require_conversation,
    text,
    whole,
)
from roll_flash.gateway.model_call import Answer, ModelCall, Reply, RequestedSampling
from roll_flash.gateway.sessions.history import CallRecord
from roll_flash.types import Message


def parse(body: Mapping[str, Any], earlier: Mapping[str, CallRecord]) -> ModelCall:
    """Parse a request; `earlier`: the session's answers by response id. Raises ApiError for an invalid field."""
    refuse(body, "conversation", [], "none is kept here: send the whole input, or previous_response_id")
    refuse(body, "prompt", [], "no prompt templates are kept here: send the text as input")
    refuse(body, "background", [False], "an answer comes at once or not at all: leave it out")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text(body, "instructions")})
    if previous := body.get("previous_response_id"):
        if not isinstance(previous, str) or previous not in earlier:
            raise ApiError(404, "response_not_found", f"no response {previous!r} in this session")
        # Instructions are not carried over: the new ones replace them.
        before = earlier[previous].conversation()
        has_old = bool(messages) and bool(before) and before[0]["role"] == "system"
        messages += before[1:] if has_old else before
    messages += _input(body.get("input"))
    form = (body.get("text") or {}).get("format") if isinstance(body.get("text"), dict) else None
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        raise unsupported("text.format", "sampling cannot be constrained here; ask for the format in the prompt")
    return ModelCall(
        messages=require_conversation(messages, "input"),
        tools=tuple(_tool(tool) for tool in objects(body, "tools")),
        tool_choice=tool_choice(body.get("tool_choice")),
        requested=RequestedSampling(
            temperature=number(body, "temperature", 0, 2),
            top_p=number(body, "top_p", 0, 1),
            max_tokens=whole(body, "max_output_tokens"),
        ),
    )


def earlier_characters(body: Mapping[str, Any], earlier: Mapping[str, CallRecord]) -> int:
    """Characters of the conversation that a request continues: it may be large although the request is small."""
    previous = body.get("previous_response_id")
    return earlier[previous].characters if isinstance(previous, str) and previous in earlier else 0


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def render(reply: Reply, model: str, response_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = reply.answers[0]
    usage = reply.usage
    is_cut = answer.finish_reason == "length"
    return {
        **_envelope(model, response_id, body),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer, response_id),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def events(reply: Reply, model: str, response_id: str, body: Mapping[str, Any]) -> Iterator[Event]:
    whole_response = render(reply, model, response_id, body)
    begun = {**whole_response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    ending = "response.incomplete" if whole_response["status"] == "incomplete" else "response.completed"
    named: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(whole_response["output"]):
        named += _item_events(item, index)
    named.append((ending, {"response": whole_response}))
    for sequence, (name, fields) in enumerate(named):
        yield Event({"type": name, "sequence_number": sequence, **fields}, name)


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"item_id": item["id"], "output_index": index}
    match item["type"]:
        case "message":
            part = item["content"][0]
            within = {**at, "content_index": 0}
            yield "response.output_item.added", {**at, "item": {**item, "status": "in_progress", "content": []}}
            yield "response.content_part.added", {**within, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield "response.output_text.delta", {**within, "delta": piece, "logprobs": []}
            yield "response.output_text.done", {**within, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**within, "part": part}
        case "function_call":
            yield "response.output_item.added", {**at, "item": {**item, "status": "in_progress", "arguments": ""}}
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {**at, "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        case _:
            yield "response.output_item.added", {**at, "item": item}
    yield "response.output_item.done", {**at, "item": item}


def _input(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request("input must be a string or a list of items", "input")
    found: list[Message] = []
    for index, item in enumerate(value):
        _take_item(found, item, f"input[{index}]")
    return found


def _take_item(found: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Append an item; one model turn is several items: its text and each of its calls."""
    match item.get("type", "message"):
        case "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            if role not in ("system", "user", "assistant"):
                raise bad_request(f"{where}.role must be system, user or assistant, not {role!r}", f"{where}.role")
            found.append({"role": role, "content": content_text(item.get("content"), f"{where}.content")})
        case "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            function = {"name": text(item, "name", f"{where}."), "arguments": text(item, "arguments", f"{where}.")}
            call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = content_text(item.get("output"), f"{where}.output")
            found.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id") or "")})
        case "reasoning":
            pass
        case other:
            raise unsupported(where, f"items of type {other!r} cannot be given to this model")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported("tools", f"a tool of type {tool.get('type')!r} is run by OpenAI's servers, not by this model")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _items(answer: Answer, response_id: str) -> list[dict[str, Any]]:
    suffix = response_id.removeprefix("resp_")
    items: list[dict[str, Any]] = []
    if answer.thinking:
        content = [{"type": "reasoning_text", "text": answer.thinking}]
        items.append({"id": f"rs_{suffix}", "type": "reasoning", "summary": [], "content": content})
    if answer.content or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        items.append({"id": f"msg_{suffix}", **message})
    for index, call in enumerate(answer.tool_calls):
        function = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append({"id": f"fc_{suffix}_{index}", "type": "function_call", **function})
    return items


def _envelope(model: str, response_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }
