"""OpenEnv servers: real ones of openenv-core on loopback, played through their WebSocket."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from served_app import served

from roll_flash.envs.adapters.openenv import connection
from roll_flash.envs.adapters.openenv.client import OpenEnv
from roll_flash.envs.check.checks import check_environment
from roll_flash.errors import ConfigError, EnvError

Steps = list[tuple[str, float, bool, dict[str, Any]]]


def guessing_server(sessions: int = 4, *, number_only: bool = True) -> Any:
    """Guess a number from 1 to 9; each guess that is nearer earns 0.1, the right one the rest of 1."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        guess: int

    class Bet(Action):
        guess: int
        stake: float

    class Told(Observation):
        text: str
        left: int = 0

    class Guessing(Environment):  # type: ignore[type-arg]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 9, **_: Any) -> Told:
            self.number, self.left = random.Random(seed).randint(1, most), 4
            return Told(text=f"I think of a number from 1 to {most}.")

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Told:
            if action.guess < 0:
                raise RuntimeError("the guessing machine broke")
            self.left -= 1
            if action.guess == self.number:
                return Told(text="Right!", reward=1.0, done=True)
            hint = "higher" if action.guess < self.number else "lower"
            return Told(text=f"It is {hint}.", left=self.left, done=self.left == 0)

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(Guessing, Guess if number_only else Bet, Told, max_concurrent_envs=sessions)


def tool_server() -> Any:
    from fastmcp import FastMCP
    from openenv.core.env_server import CallToolAction, Observation, State, create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    class Shop(MCPEnvironment):
        def __init__(self) -> None:
            tools = FastMCP("shop")

            @tools.tool()
            def price(fruit: str) -> int:
                """Tell the price of one fruit."""
                return {"fig": 3}[fruit]

            super().__init__(tools)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
            return Observation(metadata={})

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
            return Observation()

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(Shop, CallToolAction, Observation)


def play(env: OpenEnv, *actions: str, seed: int = 1) -> tuple[str, Steps]:
    """The whole prompt, and what followed each action."""

    async def run() -> tuple[str, Steps]:
        steps: Steps = []
        try:
            messages, _ = await env.reset(seed=seed)
            for action in actions:
                news, earned, terminated, truncated, info = await env.step(action)
                assert not isinstance(news, str)
                steps.append(("".join(str(message["content"]) for message in news), earned, terminated, info))
                if terminated or truncated:
                    break
        finally:
            await env.close()
        return "\n".join(str(message["content"]) for message in messages), steps

    return asyncio.run(run())


@pytest.mark.adapters
def test_a_server_is_fit_to_train_on() -> None:
    with served(guessing_server()) as url:
        report = check_environment("OpenEnv-v0", {"url": url, "observation_field": "text"}, seeds=3, timeout_s=120)
    assert report.ok, report.as_table()


@pytest.mark.adapters
def test_an_action_of_one_field_is_the_text_and_the_same_seed_gives_the_same_task() -> None:
    number = random.Random(7).randint(1, 9)
    with served(guessing_server()) as url:
        prompt, steps = play(OpenEnv(url, observation_field="text"), "0", "seven", f"<think>?</think>{number}", seed=7)
        assert "guess" in prompt
        assert "number from 1 to 9" in prompt
        assert steps[0][:3] == ("It is higher.", 0.0, False)
        assert "guess must be of the type integer" in steps[1][0]
        assert steps[2] == ("Right!", 1.0, True, {"success": True, "wrong_actions": 1})
        prompt, _ = play(OpenEnv(url.replace("http", "ws") + "/ws", reset_kwargs={"most": 2}))
        assert "number from 1 to 2" in prompt


@pytest.mark.adapters
def test_an_action_of_several_fields_is_a_json_object_whose_faults_are_told() -> None:
    number = random.Random(1).randint(1, 9)
    with served(guessing_server(number_only=False)) as url:
        right = f'I bet. {{"guess": {number}, "stake": 0.5}}'
        prompt, steps = play(OpenEnv(url), "no idea", '{"guess": 3}', right)
    assert '"stake"' in prompt
    assert "no JSON object" in steps[0][0]
    assert "stake: Field required" in steps[1][0]
    assert (steps[2][1], steps[2][3]["wrong_actions"]) == (1.0, 2)


@pytest.mark.adapters
def test_tools_of_a_server_are_described_and_called() -> None:
    call = '<tool_call>{"name": "%s", "arguments": {"fruit": "%s"}}</tool_call>'
    with served(tool_server()) as url:
        env = OpenEnv(url, tool_format="hermes")
        prompt, steps = play(env, call % ("price", "fig"), call % ("cost", "fig"), call % ("price", "x"), "3")
    assert "Tell the price of one fruit." in prompt
    assert "\n3\n" in steps[0][0]
    assert "There is no tool 'cost'" in steps[1][0]
    assert "Error" in steps[2][0]
    assert steps[3][2] is True


@pytest.mark.adapters
def test_a_server_without_a_free_session_is_waited_for_and_then_named() -> None:
    with served(guessing_server(sessions=1)) as url:

        async def run() -> None:
            first, second = OpenEnv(url), OpenEnv(url, timeout_s=30)
            await first.reset(seed=1)
            waiting = asyncio.ensure_future(second.reset(seed=2))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            hurried = OpenEnv(url, timeout_s=1)
            with pytest.raises(EnvError, match=r"no free session for 1 s .*max_concurrent_envs"):
                await hurried.reset(seed=3)
            await first.close()
            await waiting
            await second.close()
            await hurried.close()

        asyncio.run(run())


@pytest.mark.adapters
def test_an_environment_that_fails_fails_the_episode() -> None:
    with served(guessing_server()) as url, pytest.raises(EnvError, match=r"reset: EXECUTION_ERROR: .*empty range"):
        play(OpenEnv(url, reset_kwargs={"most": 0}))


@pytest.mark.adapters
def test_an_action_for_which_an_environment_raises_is_told_and_a_sample() -> None:
    """As many do for a move that is not allowed; no sample would be better for a policy than the 0 it deserves."""
    with served(guessing_server()) as url:
        _, steps = play(OpenEnv(url, max_turns=3), "-1", "-1", "-1")
    assert "the guessing machine broke" in steps[0][0]
    assert [reward for _, reward, _, _ in steps] == [0.0, 0.0, 0.0]
    assert steps[-1][3] == {"success": False, "wrong_actions": 3}


@pytest.mark.parametrize("limit", ["timeout_s", "step_timeout_s", "episode_timeout_s"])
def test_an_action_that_never_ends_ends_the_episode_and_is_a_sample(limit: str) -> None:
    """No sample would be better for a policy than the 0 it deserves. Where the server answers nobody, it is none."""
    is_stuck = False

    async def schema(request: web.Request) -> web.Response:
        if is_stuck:
            raise web.HTTPServiceUnavailable
        return web.json_response({"action": {"properties": {"code": {"type": "string"}}, "required": ["code"]}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if "loop" in message.data:
                await asyncio.sleep(1.0)  # as an environment in a thread: the server answers others
            told = {"observation": {"text": "ran"}, "reward": 0.25, "done": False}
            await socket.send_json({"type": "observation", "data": told})
        return socket

    async def run() -> None:
        nonlocal is_stuck
        app = web.Application()
        app.router.add_get("/schema", schema)
        app.router.add_get("/ws", session)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            for breaks in (False, True) if limit == "timeout_s" else (False,):
                env = OpenEnv(url, timeout_s=0.5 if limit == "timeout_s" else 30.0)
                is_stuck = False
                await env.reset(seed=1)
                assert (await env.step("print(1)"))[1] == 0.25
                if limit != "timeout_s":
                    setattr(env, limit, 0.6)
                is_stuck = breaks
                if breaks:
                    with pytest.raises(EnvError, match="did not answer"):
                        await env.step("loop")
                else:
                    news, earned, terminated, _, info = await env.step("loop")
                    assert "given up" in str(news)
                    assert (earned, terminated) == (0.0, True)
                    assert info == {"success": False, "wrong_actions": 1}
                await env.close()
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_an_answer_that_an_action_made_too_large_ends_the_episode_and_is_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of an environment that runs programs: a policy that prints without end would avoid each 0."""
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 1 << 16)

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"code": {"type": "string"}}, "required": ["code"]}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            text = "x" * (1 << 17) if "print" in message.data or "large" in message.data else "ready"
            told = {"observation": {"text": text}, "reward": 0.0, "done": False}
            await socket.send_json({"type": "observation", "data": told})
        return socket

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/schema", schema)
        app.router.add_get("/ws", session)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        env, too_large_at_once = OpenEnv(url), OpenEnv(url, reset_kwargs={"task": "large"})
        try:
            await env.reset(seed=1)
            news, earned, terminated, _, info = await env.step("print('x' * 10**9)")
            assert "its result is larger than" in str(news)
            assert (earned, terminated, info) == (0.0, True, {"success": False, "wrong_actions": 1})
            with pytest.raises(EnvError, match="ended the session during reset"):
                await too_large_at_once.reset(seed=1)
        finally:
            await env.close()
            await too_large_at_once.close()
            await runner.cleanup()

    asyncio.run(run())


def test_a_server_that_is_away_or_is_none_is_one_line() -> None:
    with pytest.raises(EnvError, match=r"no server answers at http://127.0.0.1:9 .*start it"):
        play(OpenEnv("http://127.0.0.1:9"))
    for url in ("localhost:8000", "ftp://host", ""):
        with pytest.raises(ConfigError, match="no address of a server"):
            OpenEnv(url)

    async def something_else(answer: Callable[..., Any]) -> None:
        app = web.Application()
        app.router.add_get("/schema", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        env = OpenEnv(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            with pytest.raises(
                EnvError, match=r"is that an OpenEnv server|not a schema|larger than 8 MiB|values"
            ) as said:
                await env.reset(seed=1)
            assert len(str(said.value)) < 1000
        finally:
            await env.close()
            await runner.cleanup()

    async def missing(request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def empty(request: web.Request) -> web.Response:
        return web.json_response([])

    async def packed(request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=gzip.compress(b'{"action": {}}' + b" " * (64 << 20)), headers=headers)

    async def huge(request: web.Request) -> web.Response:
        return web.Response(body=b'{"action": {}}' + b" " * (9 << 20))

    async def deep(request: web.Request) -> web.Response:
        return web.Response(body=b"[" * 100_000)

    async def many(request: web.Request) -> web.Response:
        return web.Response(body=b'{"action": [' + b"[]," * 1_000_000 + b"0]}")

    for answer in (missing, empty, packed, huge, deep, many):
        asyncio.run(something_else(answer))
