"""What a model can write and JSON cannot say is told to the model, and never reaches an OpenEnv server.

The server here breaks as those of openenv-core do; they themselves are played with in test_openenv.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, web

from roll_flash.envs.adapters.openenv import client, connection
from roll_flash.envs.adapters.openenv.client import OpenEnv
from roll_flash.errors import EnvError

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


def answers(*observations: str, heartbeat_s: float | None = None) -> list[web.RouteDef]:
    """A server whose answers are these messages, one after the other. It ends a session that answers no ping."""
    said = iter(observations)

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=heartbeat_s)
        await socket.prepare(request)
        async for _ in socket:
            await socket.send_str(next(said))
        return socket

    return [web.get("/schema", schema), web.get("/ws", session)]


def observation(inner: str = '{"text": "ran"}', reward: str = "0.5") -> str:
    return f'{{"type": "observation", "data": {{"observation": {inner}, "reward": {reward}, "done": false}}}}'


ACTION = '{"guess": 1, "stake": 1}'


def test_a_model_that_writes_for_longer_than_a_server_waits_for_an_answer_to_its_pings_keeps_its_session() -> None:
    """Most servers wait for 20 s. No turn that took longer gave a sample: a policy could avoid each 0."""

    async def play(env: OpenEnv) -> None:
        for _ in range(2):
            await asyncio.sleep(1.0)
            news, reward, terminated, _, _ = await env.step(ACTION)
            assert (news, reward, terminated) == ([{"role": "user", "content": "ran"}], 0.5, False)

    with_session(play, *answers(observation(), observation(), observation(), heartbeat_s=0.3))


def test_a_server_that_floods_a_session_with_pings_holds_up_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered; without a pause, nothing else was done for seconds."""
    answered: list[bytes] = []

    async def pong(_: Any, message: bytes = b"") -> None:
        answered.append(message)

    monkeypatch.setattr(ClientWebSocketResponse, "pong", pong)

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(observation())
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.gather(*(socket.ping() for _ in range(1000)))
        return socket

    async def play(env: OpenEnv) -> None:
        began_s = time.monotonic()
        await asyncio.sleep(1.0)
        assert 1 <= len(answered) <= 1 + (time.monotonic() - began_s) / connection.PING_S
        await env.close()

    with_session(play, web.get("/schema", schema), web.get("/ws", session))


def test_the_end_of_a_session_that_is_flooded_with_pings_holds_up_no_worker() -> None:
    """At its end all of them were read without a pause, for up to three seconds."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(observation())
        assert request.transport is not None
        request.transport.write(b"\x89\x00" * 1_000_000)
        await asyncio.sleep(20)
        return socket

    async def play(env: OpenEnv) -> None:
        ending = asyncio.create_task(env.close())
        longest_s, before_s = 0.0, time.monotonic()
        while not ending.done():
            await asyncio.sleep(0.01)
            longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
        await ending
        assert longest_s < 0.5

    with_session(play, web.get("/schema", schema), web.get("/ws", session))


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param('{"text": [' + "0," * 600_000 + "0]}", id="values"),
        pytest.param('{"text": ' + "9" * 5_000 + "}", id="digits"),
        pytest.param('{"text": ' + "[" * 100 + "]" * 100 + "}", id="nesting"),
        pytest.param('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", id="nesting without end"),
    ],
)
def test_an_answer_that_an_action_made_unreadable_ends_the_episode_and_is_a_sample(inner: str) -> None:
    """Millions of values held up the loop of a worker for seconds; the others were no sample."""

    async def play(env: OpenEnv) -> None:
        news, reward, terminated, _, info = await env.step(ACTION)
        assert "its result" in str(news)
        assert (reward, terminated, info) == (0.0, True, {"success": False, "wrong_actions": 1})

    with_session(play, *answers(observation(), observation(inner)))


def test_what_is_no_message_of_openenv_fails_the_episode() -> None:
    async def play(env: OpenEnv) -> None:
        with pytest.raises(EnvError, match="answered step with '<html>'"):
            await env.step(ACTION)

    with_session(play, *answers(observation(), "<html>"))


@pytest.mark.parametrize(
    ("given", "earned"),
    [("NaN", 0.0), ("-1e999", 0.0), ("-1e9", -1e6), ("1" * 400, 1e6), ("null", 0.0), ("true", 1.0)],
)
def test_a_reward_that_cannot_be_trained_is_a_sample(given: str, earned: float) -> None:
    """As for an action that is wrong by a billion, or of which an environment makes NaN."""

    async def play(env: OpenEnv) -> None:
        assert (await env.step(ACTION))[1] == earned

    with_session(play, *answers(observation(), observation(reward=given)))


def test_rewards_of_an_episode_are_together_no_more_than_can_be_trained() -> None:
    """Two calls that were wrong by a billion were no sample, in one turn or in two."""
    rewards = [None, None, -1e9, -1e9, -1e9, 5e5, 1e9]

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"tool_name": {}, "arguments": {}}}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            said = {"tools": [{"name": "guess", "input_schema": {}}], "result": "no"}
            await socket.send_json({"type": "observation", "data": {"observation": said, "reward": rewards.pop(0)}})
        return socket

    async def play(env: OpenEnv) -> None:
        call = '<tool_call>{"name": "guess"}</tool_call>'
        earned = [(await env.step(action))[1] for action in (call * 2, call, call, call)]
        assert earned == [-1e6, 0.0, 5e5, 1e6]

    with_session(play, web.get("/schema", schema), web.get("/ws", session))


def test_the_results_of_a_turn_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CHARACTERS", 3_000)
    made: list[str] = []

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"tool_name": {}, "arguments": {}}}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            made.append(message.data)
            told = {"tools": [{"name": "look", "input_schema": {}}], "result": "x" * 1_000}
            await socket.send_json({"type": "observation", "data": {"observation": told}})
        return socket

    async def play(env: OpenEnv) -> None:
        made.clear()
        news, _, terminated, _, _ = await env.step('<tool_call>{"name": "look"}</tool_call>' * 100)
        assert (len(made), len(news), terminated) == (4, 5, False)
        assert "too long already" in str(news[-1])

    with_session(play, web.get("/schema", schema), web.get("/ws", session))


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
