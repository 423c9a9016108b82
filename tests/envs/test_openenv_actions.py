"""What a model can write and JSON cannot say is told to the model, and never reaches an OpenEnv server."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import WSMsgType, web

from roll_flash.envs.adapters.openenv.client import OpenEnv

FIELDS = {name: {"type": "number"} for name in ("guess", "stake")}


async def schema(_: web.Request) -> web.Response:
    return web.json_response({"action": {"properties": FIELDS, "required": list(FIELDS)}})


async def strict(request: web.Request) -> web.WebSocketResponse:
    """Ends the session for what is no JSON, or is deeper than it can read."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        assert message.type is WSMsgType.TEXT
        if any(word in message.data for word in ("NaN", "Infinity", "[" * 65)):
            break
        kind = json.loads(message.data)["type"]
        observation = {"type": "observation", "data": {"observation": {"text": kind}, "reward": 0.0, "done": False}}
        await socket.send_json(observation)
    await socket.close()
    return socket


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("NaN", "must be finite"),
        ("-1e999", "must be finite"),
        ("[" * 70 + "]" * 70, "nested more than 64 deep"),
        ("[" * 400 + "]" * 400, "nested more than 64 deep"),
    ],
)
def test_an_action_that_json_cannot_say_is_a_wrong_action_and_a_sample(value: str, told: str) -> None:
    async def play() -> None:
        app = web.Application()
        app.add_routes([web.get("/schema", schema), web.get("/ws", strict)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        env = OpenEnv(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            await env.reset(seed=1)
            news, _, _, _, _ = await env.step(f'{{"guess": 1, "stake": {value}}}')
            assert told in str(news)
            news, _, _, _, _ = await env.step('{"guess": 1, "stake": 2.5}')
            assert "step" in str(news)
            assert (await env.conclude())[1]["wrong_actions"] == 1
        finally:
            await env.close()
            await runner.cleanup()

    asyncio.run(play())
