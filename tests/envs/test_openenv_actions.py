"""What a model can write and JSON cannot say is told to the model, and never reaches an OpenEnv server.

The server here breaks as those of openenv-core do; they themselves are played with in test_openenv.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from roll_flash.envs.adapters.openenv.client import OpenEnv

FIELDS = {name: {"type": "number"} for name in ("guess", "stake")}


async def schema(_: web.Request) -> web.Response:
    return web.json_response({"action": {"properties": FIELDS, "required": list(FIELDS)}})


async def strict(request: web.Request) -> web.WebSocketResponse:
    """Ends the session for what is no JSON, is deeper than it can read, or is refused in words that it cannot send."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        assert message.type is WSMsgType.TEXT
        if any(word in message.data for word in ("NaN", "Infinity", "[" * 65, r"\ud800")):
            break
        asked = json.loads(message.data)
        if asked["data"].get("stake") == -1:
            said = {"code": "SESSION_ERROR", "message": "Unable to serialize unknown type"}
            await socket.send_json({"type": "error", "data": said})
            break
        kind = asked["type"]
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
    async def play(env: OpenEnv) -> None:
        news, _, _, _, _ = await env.step(f'{{"guess": 1, "stake": {value}}}')
        assert told in str(news)
        news, _, _, _, _ = await env.step('{"guess": 1, "stake": 2.5}')
        assert "step" in str(news)
        assert (await env.conclude())[1]["wrong_actions"] == 1

    with_session(play)


def test_half_characters_in_an_action_are_replaced() -> None:
    async def play(env: OpenEnv) -> None:
        news, _, terminated, _, _ = await env.step(r'{"guess": "\ud800", "\udfff": 1}')
        assert "step" in str(news)
        assert not terminated

    with_session(play)


def test_an_action_that_a_server_refuses_by_ending_the_session_ends_the_episode_as_a_sample() -> None:
    async def play(env: OpenEnv) -> None:
        news, reward, terminated, _, info = await env.step('{"guess": 1, "stake": -1}')
        assert "Unable to serialize" in str(news)
        assert (reward, terminated, info) == (0.0, True, {"success": False, "wrong_actions": 1})

    with_session(play)


def test_calls_that_take_more_than_a_step_may_are_not_all_made_and_the_sample_is_kept() -> None:
    made: list[dict[str, Any]] = []

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"tool_name": {}, "arguments": {}}}})

    async def slow(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)["data"]
            if asked.get("type") == "call_tool":
                made.append(asked)
                await asyncio.sleep(0.05)
            said = {"tools": [{"name": "look", "input_schema": {}}], "result": "nothing"}
            await socket.send_json({"type": "observation", "data": {"observation": said}})
        return socket

    async def play(env: OpenEnv) -> None:
        env.step_timeout_s = 1.0
        news, _, terminated, _, _ = await env.step('<tool_call>{"name": "look"}</tool_call>' * 100)
        assert "nothing" in str(news)
        assert "not run" in str(news)
        assert len(made) < 100
        assert not terminated

    with_session(play, web.get("/schema", schema), web.get("/ws", slow))


def with_session(play: Callable[[OpenEnv], Awaitable[None]], *routes: web.RouteDef) -> None:
    async def whole() -> None:
        app = web.Application()
        app.add_routes(routes or [web.get("/schema", schema), web.get("/ws", strict)])
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        env = OpenEnv(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            await env.reset(seed=1)
            await play(env)
        finally:
            await env.close()
            await runner.cleanup()

    asyncio.run(whole())
