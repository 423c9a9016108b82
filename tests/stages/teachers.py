"""A stand-in for a teacher behind vLLM's routes, on loopback: says what it is told, well or badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Say = Callable[[list[int]], Any]


def logprob_of(token: int) -> float:
    """What `honest` says of a token, whatever comes before it."""
    return -(token % 7) / 4 - 0.25


def honest(token_ids: list[int]) -> Any:
    scores = [None, *({str(token): {"logprob": logprob_of(token), "rank": 1}} for token in token_ids[1:])]
    return {"choices": [{"text": "x", "prompt_logprobs": scores}]}


def with_logprob(text: str) -> Say:
    """Says `text`, as JSON or not, of the last token."""

    def say(token_ids: list[int]) -> str:
        answer = honest(token_ids)
        answer["choices"][0]["prompt_logprobs"][-1][str(token_ids[-1])]["logprob"] = "[[here]]"
        return json.dumps(answer).replace('"[[here]]"', text)

    return say


class Asked:
    """What a stand-in was asked, and how it answers."""

    def __init__(self, say: Say, tokenizer: Any, longest: int | None) -> None:
        self.say = say
        self.tokenizer = tokenizer
        self.longest = longest
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.prompts.append(body["prompt"])
        said = self.say(body["prompt"])
        if said is None:  # no answer
            await asyncio.sleep(60)
        if isinstance(said, web.Response):
            return said
        text = said if isinstance(said, str) else json.dumps(said)
        return web.Response(text=text, content_type="application/json")

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.longest})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.tokenizer.decode((await request.json())["tokens"])})


@asynccontextmanager
async def teaching(say: Say, tokenizer: Any = None, longest: int | None = None) -> AsyncIterator[Asked]:
    """Serve a teacher; without a `tokenizer` it has no routes for one."""
    asked, app = Asked(say, tokenizer, longest), web.Application()
    app.router.add_post("/v1/completions", asked.completions)
    if tokenizer is not None:
        app.router.add_post("/tokenize", asked.tokenize)
        app.router.add_post("/detokenize", asked.detokenize)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    asked.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield asked
    finally:
        await runner.cleanup()
