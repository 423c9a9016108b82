"""`/v1/messages`: parse and render Anthropic's Messages API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from roll_flash.gateway.apis.api_error import bad_request, unsupported
from roll_flash.gateway.apis.event_stream import Event, pieces
from roll_flash.gateway.apis.request_fields import (
    MAX_TOP_K,
    content_text,
    function_tool,
    number,
    objects,
    require_conversation,
    strings,
    text,
    whole,
)
from roll_flash.gateway.model_call import Answer, ModelCall, Reply, RequestedSampling, input_of
from roll_flash.types import Message

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse(body: Mapping[str, Any]) -> ModelCall:
    """Parse a request. Raises ApiError for an invalid field."""
    messages: list[Message] = []
    if system := content_text(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(objects(body, "messages")):
        messages += _messages(message, f"messages.{index}")
    return ModelCall(
        messages=require_conversation(messages, "messages"),
        tools=tuple(_tool(tool) for tool in objects(body, "tools")),
        tool_choice=_tool_choice(body.get("tool_choice")),
        requested=RequestedSampling(
            temperature=number(body, "temperature", 0, 2),
            top_p=number(body, "top_p", 0, 1),
            top_k=whole(body, "top_k", 0, MAX_TOP_K),
            max_tokens=whole(body, "max_tokens"),
            stop=strings(body, "stop_sequences"),
        ),
    )


def render(reply: Reply, model: str) -> dict[str, Any]:
    answer = reply.answers[0]
    return {
        **_envelope(reply, model),
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop_string,
    }


def events(reply: Reply, model: str) -> Iterator[Event]:
    answer = reply.answers[0]
    begun = {**_envelope(reply, model), "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**begun["usage"], "output_tokens": 0}
    yield _event("message_start", message=begun)
    for index, block in enumerate(_blocks(answer)):
        yield _event("content_block_start", index=index, content_block=_emptied(block))
        for delta in _deltas(block):
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ending = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
    yield _event("message_delta", delta=ending, usage={"output_tokens": reply.usage.completion_tokens})
    yield _event("message_stop")


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be user or assistant, not {role!r}", f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content_text(content, f"{where}.content")}]
    blocks = [block if isinstance(block, dict) else {"type": "text", "text": block} for block in content]
    said = [block for block in blocks if block.get("type") == "text"]
    found: list[Message] = []
    calls = []
    for block in blocks:
        match block.get("type"):
            case "tool_use" if role == "assistant":
                calls.append(_call(block, where))
            case "tool_result" if role == "user":
                found.append(_result(block, where))
            case "text" | "thinking" | "redacted_thinking":
                pass
            case other:
                raise unsupported(f"{where}.content", f"blocks of type {other!r} cannot be given to this model")
    spoken: Message = {"role": role, "content": content_text(said, f"{where}.content")}
    if calls:
        spoken["tool_calls"] = calls
    if said or calls or not found:
        found.append(spoken)
    return found


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    name = text(block, "name", f"{where}.content.")
    return {"id": str(block.get("id")), "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Mapping[str, Any], where: str) -> Message:
    result = content_text(block.get("content"), f"{where}.content")
    return {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id") or "")}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise unsupported("tools", f"a tool of type {tool['type']!r} is run by Anthropic's servers, not by this model")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _tool_choice(value: Any) -> str:
    if value is None:
        return "auto"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool" and isinstance(value.get("name"), str):
        return f"name:{value['name']}"
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_request("tool_choice must be of type auto, any, none or tool", "tool_choice")
    return _CHOICES[kind]


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.thinking:
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    uses = [(call.call_id, call.name, input_of(call.arguments)) for call in answer.tool_calls]
    return blocks + [{"type": "tool_use", "id": id_, "name": name, "input": given} for id_, name, given in uses]


def _emptied(block: dict[str, Any]) -> dict[str, Any]:
    match block["type"]:
        case "text":
            return {**block, "text": ""}
        case "thinking":
            return {**block, "thinking": ""}
    return {**block, "input": {}}


def _deltas(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    match block["type"]:
        case "text":
            yield from ({"type": "text_delta", "text": piece} for piece in pieces(block["text"]))
        case "thinking":
            yield from ({"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"]))
        case _:
            given = json.dumps(block["input"], ensure_ascii=False)
            yield from ({"type": "input_json_delta", "partial_json": piece} for piece in pieces(given))


def _stop_reason(answer: Answer) -> str:
    if answer.tool_calls:
        return "tool_use"
    if answer.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if answer.stop_string is not None else "end_turn"


def _envelope(reply: Reply, model: str) -> dict[str, Any]:
    usage = {"input_tokens": reply.usage.prompt_tokens, "output_tokens": reply.usage.completion_tokens}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model, "usage": usage}


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name)
