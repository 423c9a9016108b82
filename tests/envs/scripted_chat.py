"""A stand-in for the gateway: answers chat completions from a script, and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = dict[str, Any]
Script = Callable[[int, dict[str, Any]], Answer]
"""From the number of the call (0 is the first) and its body to the assistant's message."""


@dataclass(frozen=True)
class Access:
    port: int
    asked: list[dict[str, Any]]
    keys: list[str]
    api_key: str = "the-key-of-this-episode"
    model: str = "policy"
    said: list[Answer] = field(default_factory=list)
    policy_keys: dict[str, str] = field(default_factory=dict)

    def answers(self) -> list[Any]:
        return self.said


def says(text: str) -> Answer:
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: Any) -> Answer:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@asynccontextmanager
async def scripted_chat(script: Script) -> AsyncIterator[Access]:
    asked: list[dict[str, Any]] = []
    keys: list[str] = []
    said: list[Answer] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        keys.append(request.headers.get("Authorization", ""))
        message = script(len(asked), body)
        asked.append(body)
        said.append(message)
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        common = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**common, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Access(runner.addresses[0][1], asked, keys, said=said)
    finally:
        await runner.cleanup()
