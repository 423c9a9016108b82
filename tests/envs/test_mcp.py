"""Tools of MCP servers: a small server in real sandboxes and one on loopback, good and hostile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from roll_flash.cli.main import main
from roll_flash.config.tree import EnvConfig
from roll_flash.envs import SandboxToolEnv, ToolEnv, make_env, reward, tool
from roll_flash.envs.agents.presets import AGENTS_IMAGE
from roll_flash.envs.base import SandboxEnv
from roll_flash.envs.datasets.columns import task_arguments
from roll_flash.envs.hosting.environments import is_deterministic
from roll_flash.envs.tools.functions import ToolError
from roll_flash.envs.tools.mcp.client import content_as_text
from roll_flash.envs.tools.mcp.connections import MAX_ANSWER_BYTES, PART_BYTES
from roll_flash.envs.tools.mcp.servers import McpServer, _make_tool
from roll_flash.errors import ConfigError, EnvError
from roll_flash.sandboxes import Sandbox, SandboxDied, SandboxSpec, open_sandbox

SERVER = (Path(__file__).with_name("mcp_server.py")).read_bytes()
SPEC = SandboxSpec(image=AGENTS_IMAGE, files=(("server.py", SERVER),), memory_mb=64)
"""The image has all of Python's standard library."""
Steps = list[tuple[str, float, bool, dict[str, Any]]]


class Desk(SandboxToolEnv):
    """A tool of its own beside those of servers."""

    tool_format = "hermes"
    sandbox_spec = SPEC

    async def begin(self, seed: int) -> str:
        return "Do it."

    @tool()
    def own(self) -> str:
        """Say who we are."""
        return "the environment"

    @reward()
    def said_done(self) -> bool:
        return self.final_answer == "done"


class Alarm(Desk):
    @tool()
    async def wake(self) -> None:
        """Let a server that sleeps go on."""
        await self.sandbox.write("awake", "")


class Office(ToolEnv):
    """Only tools of servers."""

    tool_format = "hermes"

    async def begin(self, seed: int) -> str:
        return "Do it."


def server(*wrong: str, **options: Any) -> dict[str, Any]:
    return {"command": ["python3", "server.py", *wrong], **options}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def steps_of(env: Any, *actions: str) -> tuple[str, Steps]:
    """The first messages, and what followed each action."""
    messages, _ = await env.reset(seed=1)
    steps: Steps = []
    for action in actions:
        observation, earned, terminated, _, info = await env.step(action)
        text = observation if isinstance(observation, str) else "\n".join(str(one["content"]) for one in observation)
        steps.append((text, earned, terminated, info))
    return "\n".join(str(message["content"]) for message in messages), steps


def play(env: Any, *actions: str, then: Callable[[Sandbox], Awaitable[None]] | None = None) -> tuple[str, Steps]:
    """An episode in a sandbox of its own; afterwards no server runs there."""

    async def run() -> tuple[str, Steps]:
        async with open_sandbox(env.sandbox_spec) as sandbox:
            env.sandbox = sandbox
            try:
                return await steps_of(env, *actions)
            finally:
                await env.close()
                await require_no_server(sandbox)
                if then is not None:
                    await then(sandbox)

    return asyncio.run(run())


async def require_no_server(sandbox: Sandbox) -> None:
    deadline_s = time.monotonic() + 60
    while b"server.py" in (await sandbox.exec("cat /proc/[0-9]*/cmdline 2>/dev/null")).stdout:
        assert time.monotonic() < deadline_s, "the server outlived the episode"
        await asyncio.sleep(0.05)


@pytest.mark.docker
def test_tools_of_a_server_are_shown_called_and_counted_like_others() -> None:
    env = Desk(mcp_servers={"desk": server()})
    prompt, steps = play(env, call("add", a=2, b="3") + call("own"), call("_2_with_dots", x=[1]), "done")
    assert '"name": "add", "description": "Add two numbers."' in prompt
    assert '"name": "_2_with_dots"' in prompt, "a name that models can write"
    assert "\n5\n" in steps[0][0]
    assert "the environment" in steps[0][0]
    assert '{"x": [1]}' in steps[1][0]
    _, earned, terminated, info = steps[-1]
    assert (earned, terminated, info["success"]) == (1.0, True, True)
    counted = {name: (use["calls"], use["errors"]) for name, use in info["tools"].items()}
    assert counted == {"add": (1, 0), "own": (1, 0), "_2_with_dots": (1, 0)}
    assert "mcp_ignored" not in info


@pytest.mark.docker
def test_each_episode_has_a_server_of_its_own() -> None:
    env = Desk(mcp_servers={"desk": server()})
    _, steps = play(env, call("do", what="die"))
    assert "exit code 7" in steps[0][0]
    _, steps = play(env, call("add", a=1, b=1))
    assert "\n2\n" in steps[0][0]
    assert env.used("do").calls == 0


@pytest.mark.docker
def test_what_a_result_holds_is_shown_as_text_within_bounds() -> None:
    asked = ("image", "structure", "long", "parts", "surrogate", "nonsense")
    _, steps = play(Desk(mcp_servers={"desk": server(max_characters=1000)}), *(call("do", what=one) for one in asked))
    image, structure, long, parts, surrogate, nonsense = (text for text, *_ in steps)
    assert "(image of type image/png, not shown)\nsee\n(a link to file:///x)\n(content that is no text" in image
    assert '{"sum": 5}' in structure
    assert "characters left out" in long
    assert len(long) < 1200
    assert "(50 more parts are not shown)" in parts
    assert surrogate
    assert "(no output)" in nonsense


@pytest.mark.docker
def test_calls_that_fail_are_told_and_the_server_goes_on() -> None:
    _, steps = play(
        Desk(mcp_servers={"desk": server()}),
        call("do", what="fail"),
        call("do", what="refuse"),
        call("add", a="x", b=1),
        call("add", a=1),
        call("add", a=1, b=2, c=3),
        call("_2_with_dots", x=float("nan")),
        call("add", a=1, b=2),
    )
    said = [text for text, *_ in steps]
    assert "Error: no such thing" in said[0]
    assert "Error: I will not" in said[1]
    assert "add: argument a: Input should be a valid integer" in said[2]
    assert "add: the argument b is missing. It takes a, b" in said[3]
    assert "add: there is no argument c" in said[4]
    assert "the numbers in its arguments must be finite" in said[5]
    assert "\n3\n" in said[6]
    assert steps[-1][3]["tools"]["add"]["errors"] == 3


@pytest.mark.docker
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("die", "it ended with exit code 7: I am dying"),
        ("flood", f"it sent more than {MAX_ANSWER_BYTES >> 20} MiB"),
        ("chatter", f"it sent more than {MAX_ANSWER_BYTES >> 20} MiB"),
        ("eat", "it ended with exit code"),
    ],
)
def test_a_server_that_the_model_breaks_is_told_and_the_episode_is_scored(what: str, says: str) -> None:
    _, steps = play(Desk(mcp_servers={"desk": server()}), call("do", what=what), call("add", a=1, b=1), "done")
    assert says in steps[0][0]
    assert says in steps[1][0], "it stays lost"
    assert steps[2][1] == 1.0
    assert {name: use["errors"] for name, use in steps[2][3]["tools"].items()} == {"do": 1, "add": 1}


@pytest.mark.docker
def test_an_answer_that_comes_too_late_is_not_taken_for_another() -> None:
    env = Desk(mcp_servers={"desk": server(timeout_s=2.0)})
    _, steps = play(env, call("do", what="wait"), call("do", what="lie"), call("add", a=20, b=2))
    assert "do took longer than 2 s and was given up" in steps[0][0]
    assert "do took longer than 2 s" in steps[1][0], "it said neither result nor error"
    assert "\n22\n" in steps[2][0]
    info = steps[2][3]
    assert info["tools"]["do"]["timeouts"] == 2
    assert info["mcp_ignored"] == 2


@pytest.mark.docker
def test_a_call_that_was_given_up_while_it_was_sent_does_not_spoil_the_next() -> None:
    """What the server says of its half line is no answer to another call either."""
    env = Alarm(mcp_servers={"desk": server(timeout_s=2.0)})
    large = call("do", what="y" * 2_000_000)
    _, steps = play(env, call("do", what="sleep"), large, call("wake"), call("add", a=1, b=2), call("add", a=3, b=4))
    assert "do took longer than 2 s" in steps[1][0]
    assert "\n3\n" in steps[3][0]
    assert "\n7\n" in steps[4][0]
    assert steps[4][3]["tools"]["add"]["errors"] == 0


@pytest.mark.docker
def test_a_server_may_ask_whether_we_are_there_and_nothing_else() -> None:
    _, steps = play(Desk(mcp_servers={"desk": server()}), call("do", what="ask"))
    assert "answered: True" in steps[0][0]


@pytest.mark.docker
def test_lines_that_are_no_answer_are_left_out_and_counted() -> None:
    _, steps = play(Desk(mcp_servers={"desk": server("noisy")}), call("add", a=1, b=1))
    assert "\n2\n" in steps[0][0]
    assert steps[0][3]["mcp_ignored"] == 12, "three lines for each of initialize, initialized, list and call"


@pytest.mark.docker
def test_what_comes_with_an_answer_is_read_before_the_next() -> None:
    _, steps = play(Desk(mcp_servers={"desk": server()}), call("do", what="remark"), call("add", a=1, b=1))
    assert '{"sum": 5}' in steps[0][0]
    assert "\n2\n" in steps[1][0]
    assert steps[1][3]["mcp_ignored"] == 1


@pytest.mark.docker
def test_pages_of_tools_are_joined_and_the_config_chooses_among_them() -> None:
    prompt, _ = play(Desk(mcp_servers={"desk": server("two-pages")}))
    assert prompt.count('"type": "function"') == 4
    prompt, _ = play(Desk(mcp_servers={"desk": server("rather-many", tools=["add7", "add9"])}))
    assert prompt.count('"type": "function"') == 3


@pytest.mark.docker
def test_a_name_has_that_of_its_server_before_it_if_it_would_not_be_the_only_one() -> None:
    _, steps = play(
        Desk(mcp_servers={"one": server(tools=["add"]), "two": server(prefix=True)}),
        call("add", a=1, b=1) + call("two_add", a=2, b=2) + call("two_do", what="structure"),
    )
    assert "\n2\n" in steps[0][0]
    assert "\n4\n" in steps[0][0]
    assert '{"sum": 5}' in steps[0][0]
    _, steps = play(
        Desk(mcp_servers={"one": server(tools=["add"]), "two": server(tools=["add"])}),
        call("one_add", a=1, b=1) + call("two_add", a=2, b=2) + call("add", a=1, b=1),
    )
    assert "\n2\n" in steps[0][0]
    assert "\n4\n" in steps[0][0]
    assert "There is no tool 'add'" in steps[0][0]


@pytest.mark.docker
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("dead", "it ended with exit code 1: there is no database"),
        ("silent", "not ready after 1.8 s"),
        ("version", "it speaks version '1999-01-01' of the protocol"),
        ("many", "it lists more than 1000 tools"),
        ("rather-many", "it lists 200 tools, more than 128; choose some with `tools`"),
        ("pages", "or more than 100 pages"),
        ("large-pages", "or 8 MiB of them"),
        ("nested", "nested too deep"),
        ("large", "has more than 20000 characters"),
        ("wide", "has more than 128 arguments"),
        ("nameless", "an entry in its list has no name"),
        ("twice", "two tools are named desk_add"),
        ("no-object", "is none of an object"),
    ],
)
def test_a_server_that_is_unfit_fails_the_episode_before_it_begins(wrong: str, says: str) -> None:
    """The model has done nothing yet, so this is no reward of 0."""
    env = Desk(mcp_servers={"desk": server(wrong)})
    env.step_timeout_s = 2.0 if wrong == "silent" else 120.0
    with pytest.raises(EnvError, match="MCP server desk: ") as raised:
        play(env)
    assert says in str(raised.value)


@pytest.mark.docker
def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(EnvError, match=r"MCP server desk: it ended with exit code 127.*mcp-server-nowhere"):
        play(Desk(mcp_servers={"desk": {"command": ["mcp-server-nowhere"]}}))


@pytest.mark.docker
def test_a_sandbox_that_dies_is_no_sample() -> None:
    async def run() -> None:
        env = Desk(mcp_servers={"desk": server()})
        async with open_sandbox(SPEC) as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=1)
            await sandbox.close(reason="killed")
            with pytest.raises(SandboxDied):
                await env.step(call("add", a=1, b=1))
            await env.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("servers", "allow", "says"),
    [
        ({"a b": server()}, (), "mcp_servers.a b: the name of a server has up to 32 letters"),
        ({"a": {"comand": ["x"]}}, (), "mcp_servers.a.comand: Extra inputs are not permitted"),
        ({"a": server(timeout_s=0)}, (), "mcp_servers.a.timeout_s: Input should be greater than 0"),
        ({"a": {}}, (), "mcp_servers.a: give either a command, which runs in the sandbox, or a url"),
        ({"a": server(url="http://x/mcp")}, ("x:80",), "give either a command"),
        ({"a": server()}, (), "mcp_servers.a: a command needs a sandbox"),
        ({"a": {"url": "https://x.org/mcp"}}, ("x.org:80",), "mcp_allow has no entry for x.org, port 443"),
        ({"a": {"url": "ftp://x.org"}}, ("x.org:80",), "is no address of a server"),
        ({"a": {"url": "http://u:p@x.org"}}, ("x.org:80",), "is no address of a server"),
        ({"a": {"url": "http://x.org:99999"}}, (), "mcp_servers.a: Port out of range"),
        ({"a": {"url": "http://x.org"}}, ("https://x.org",), "allow: 'https://x.org'"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_with_its_key(servers: Any, allow: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Office(mcp_servers=servers, mcp_allow=allow)
    assert says in str(raised.value)
    assert str(raised.value).startswith("Office: mcp_servers.a")


def test_one_host_that_is_no_list_is_said_to_be_none() -> None:
    """Each of its letters was a host, and the line said that there is no entry for the host that stands there."""
    with pytest.raises(ConfigError, match=r'Office: mcp_allow is a list; write mcp_allow: \["x\.org:443"\]'):
        Office(mcp_servers={"a": {"url": "https://x.org/mcp"}}, mcp_allow="x.org:443")


def test_a_class_may_name_its_servers_and_a_data_set_may_but_none_of_its_rows() -> None:
    class Shop(SandboxToolEnv):
        mcp_servers: Mapping[str, Any] = {"desk": {"command": ["python3", "server.py"], "envs": {}}}

    with pytest.raises(ConfigError, match=r"mcp_servers.desk.envs"):
        Shop()
    assert isinstance(make_env("Dataset-v0", mcp_servers={"desk": server()}).unwrapped, SandboxEnv)
    entry = {"id": "Dataset-v0", "data": {"path": "x.jsonl", "kwargs_column": "with"}, "reward": "exact"}
    row = {"prompt": "?", "answer": "!", "with": {"mcp_servers": {"desk": server()}}}
    with pytest.raises(ConfigError, match="'with' has 'mcp_servers'; a row can set answer_in"):
        task_arguments(EnvConfig.model_validate(entry), row, "x.jsonl:1")


@pytest.mark.parametrize("column", [None, "with"])
def test_rows_of_other_environments_cannot_name_servers_either(column: str | None) -> None:
    """A data set from elsewhere could make the worker call any host."""
    entry = {"id": "my.py:Shop", "data": {"path": "x.jsonl", **({"kwargs_column": column} if column else {})}}
    arguments = {"mcp_servers": {"a": {"url": "http://10.0.0.1/mcp"}}, "mcp_allow": ["10.0.0.1:80"]}
    row = {"with": arguments} if column else arguments
    with pytest.raises(ConfigError, match=r"x\.jsonl:1: a row cannot set 'mcp_servers'"):
        task_arguments(EnvConfig.model_validate(entry), row, "x.jsonl:1")


@pytest.mark.docker
def test_yaml_alone_makes_an_environment_that_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the image of the config: without it the server would not start."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "1 + 2?", "answer": "3"}\n')
    entry = {"id": "Dataset-v0", "data": "rows.jsonl", "reward": "exact"}
    servers = {"desk": {"command": ["python3", "-c", SERVER.decode()], "tools": ["add"]}}
    config = {"model": {"path": "tiny"}, "sandbox": {"image": AGENTS_IMAGE}}
    envs = [{**entry, "kwargs": {"mcp_servers": servers}}]
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump({**config, "envs": envs}))
    monkeypatch.chdir(tmp_path)
    code = main(["envs", "check", "sums.yaml", "--seeds", "2"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "ok    the oracle earns the full reward" in said


def test_recorded_calls_are_not_repeated_at_a_server_outside() -> None:
    assert not is_deterministic(Office(mcp_servers={"a": {"url": "http://x/mcp"}}, mcp_allow=["x:80"]))
    assert is_deterministic(Desk(mcp_servers={"a": server()}))


class Outside:
    """A server on loopback, whose answers a test chooses. A stand-in for what real servers answer seldom."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.result: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.events = True

    async def handle(self, request: web.Request) -> web.StreamResponse:
        message = await request.json() if request.method == "POST" else None
        self.seen.append((request.method, dict(request.headers), message))
        if message is None or not {"id", "method"} <= message.keys():
            return web.Response(status=202)
        if message["method"] == "tools/call" and self.result is not None:
            return await self.result(request)
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}},
            "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "found"}]},
        }
        answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}, indent=1)
        headers = {"Mcp-Session-Id": "s1"} if message["method"] == "initialize" else {}
        if not self.events:
            return web.Response(text=answer, content_type="application/json", headers=headers)
        note = 'event: message\r\ndata: {"jsonrpc": "2.0", "method": "notifications/progress"}\r\n\r\n: a comment\r\n'
        data = "".join(f"data: {line}\r\n" for line in answer.splitlines())
        return web.Response(text=f"{note}{data}\r\n", content_type="text/event-stream", headers=headers)


@asynccontextmanager
async def served(outside: Outside) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/mcp", outside.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def play_outside(outside: Outside, *actions: str, host: str = "127.0.0.1", **options: Any) -> Steps:
    async def run() -> Steps:
        async with served(outside) as port:
            url = f"http://{host}:{port}/mcp"
            env = Office(mcp_servers={"out": {"url": url, **options}}, mcp_allow=[f"{host}:{port}"])
            try:
                return (await steps_of(env, *actions))[1]
            finally:
                await env.close()

    return asyncio.run(run())


@pytest.mark.parametrize("events", [True, False])
def test_a_server_outside_is_called_in_one_session_that_ends_with_the_episode(
    events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TEST_KEY", "secret")
    outside = Outside()
    outside.events = events
    steps = play_outside(outside, call("look", deep=True), api_key_env="MCP_TEST_KEY")
    assert "found" in steps[0][0]
    assert [(method, message and message["method"]) for method, _, message in outside.seen] == [
        ("POST", "initialize"),
        ("POST", "notifications/initialized"),
        ("POST", "tools/list"),
        ("POST", "tools/call"),
        ("DELETE", None),
    ]
    for _, headers, _ in outside.seen[1:]:
        assert headers["Mcp-Session-Id"] == "s1"
        assert headers["MCP-Protocol-Version"] == "2025-06-18"
        assert headers["Authorization"] == "Bearer secret"
    assert steps[0][3].get("mcp_ignored", 0) == (3 if events else 0)


def test_a_name_leads_only_to_addresses_that_the_list_permits() -> None:
    outside = Outside()
    with pytest.raises(EnvError, match=r"MCP server out: .*is not public, and mcp_allow does not name it"):
        play_outside(outside, host="localhost")
    assert outside.seen == []


@pytest.mark.parametrize("status", [401, 404, 429, 502, 503, 307])
def test_a_server_outside_that_fails_is_no_sample(status: int) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    outside = Outside()
    outside.result = fail
    with pytest.raises(EnvError, match=f"MCP server out: it answered with HTTP status {status}"):
        play_outside(outside, call("look"))


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("<html>", "text/html", "it answered neither with a result nor with an error"),
        ("", "application/json", "it answered neither with a result nor with an error"),
    ],
)
def test_a_server_outside_that_speaks_nonsense_is_no_sample(text: str, kind: str, says: str) -> None:
    async def speak(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind)

    outside = Outside()
    outside.result = speak
    with pytest.raises(EnvError, match=says):
        play_outside(outside, call("look"))


def test_a_connection_that_breaks_is_no_sample() -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    outside = Outside()
    outside.result = hang_up
    with pytest.raises(EnvError, match="MCP server out: "):
        play_outside(outside, call("look"))


def test_what_a_call_causes_outside_is_told() -> None:
    """A call that is refused, or that asks for too much, must not make an episode that would score 0 no sample."""

    async def flood(request: web.Request) -> web.StreamResponse:
        return web.Response(text="data: x\n\n" + "y" * (MAX_ANSWER_BYTES + 1), content_type="text/event-stream")

    async def brackets(request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"[{'[],' * (MAX_ANSWER_BYTES // PART_BYTES)}0]", content_type="application/json")

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=422)

    async def break_down(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    async def refuse_unread(request: web.Request) -> web.StreamResponse:
        error = {"code": -32700, "message": "an argument is too large"}
        return web.json_response({"jsonrpc": "2.0", "id": None, "error": error})

    async def unreadable(request: web.Request) -> web.StreamResponse:
        number = (await request.json())["id"]
        content = f'{{"content": [], "structuredContent": {{"value": {next(values)}}}}}'
        asked = 'data: {"jsonrpc": "2.0", "id": "q1", "method": "ping"}\n\n'
        text = f'{asked}data: {{"jsonrpc": "2.0", "id": {number}, "result": {content}}}\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    async def no_json(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"text": "caf\xe9"}', content_type="application/json")

    outside = Outside()
    values = iter(["9" * 5_000, "[" * 50_000 + "]" * 50_000])
    answers = iter([flood, brackets, refuse, refuse_unread, break_down, unreadable, unreadable, no_json])

    async def next_answer(request: web.Request) -> web.StreamResponse:
        return await next(answers)(request)

    outside.result = next_answer
    steps = play_outside(outside, *[call("look")] * 8, "done")
    assert "Error: it sent more than 8 MiB" in steps[0][0]
    assert "Error: it sent more than 8 MiB, or very many lines or brackets" in steps[1][0]
    assert "Error: it answered with HTTP status 422" in steps[2][0]
    assert "Error: an argument is too large" in steps[3][0]
    assert "Error: it answered with HTTP status 500" in steps[4][0]
    assert all("Error: its answer cannot be read" in text for text, *_ in steps[5:8])
    assert steps[8][2]
    assert steps[8][3]["tools"]["look"]["errors"] == 8


def test_the_id_of_a_session_is_sent_back_only_if_it_can_be() -> None:
    async def begin(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        body = json.dumps({"id": 1, "result": {"protocolVersion": "2025-06-18"}}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nMcp-Session-Id: a\x01b\r\n\r\n"
        request.transport.write(head.encode() + body)
        request.transport.close()
        return web.Response()

    outside = Outside()
    outside.handle = begin  # type: ignore[method-assign]
    with pytest.raises(EnvError, match="MCP server out: its Mcp-Session-Id is not made of visible ASCII"):
        play_outside(outside)


def test_the_end_of_a_session_is_not_sent_on_to_another_address() -> None:
    """A server could have the worker delete what it liked, at any public address and at those that the list names."""
    outside, asked = Outside(), []
    answer = outside.handle

    async def send_on(request: web.Request) -> web.StreamResponse:
        asked.append((request.method, request.path_qs))
        if request.method == "DELETE":
            return web.Response(status=307, headers={"Location": "/mcp?elsewhere"})
        return await answer(request)

    outside.handle = send_on  # type: ignore[method-assign]
    play_outside(outside, call("look"))
    assert asked[-1] == ("DELETE", "/mcp")


@pytest.mark.parametrize("kind", ["text/event-stream; x*", f"Text/Event-Stream; x*{'9' * 5000}=y"])
def test_what_follows_the_content_type_does_not_matter(kind: str) -> None:
    async def speak(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None  # aiohttp's own answers cannot have such a type
        said = {"id": (await request.json())["id"], "result": {"content": [{"type": "text", "text": "seen"}]}}
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        request.transport.write(f"{head}data: {json.dumps(said)}\n\n".encode())
        request.transport.close()
        return web.Response()

    outside = Outside()
    outside.result = speak
    assert "seen" in play_outside(outside, call("look"))[0][0]


async def flooded(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, before: bytes, flood: bytes, ended: asyncio.Event
) -> None:
    """Answer as a good server does; to a call `before`, and after it `flood` without end, until the client `ended`."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            message = json.loads(await reader.readexactly(length) or "{}")
            results: dict[str, Any] = {
                "initialize": {"protocolVersion": "2025-06-18"},
                "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
                "tools/call": {"content": [{"type": "text", "text": "found"}]},
            }
            method = message.get("method")
            body = json.dumps({"id": message.get("id"), "result": results.get(method)}).encode()
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            if method != "tools/call":
                writer.write(answer)
                continue
            writer.write(before or answer)
            await writer.drain()
            await asyncio.sleep(0.2)  # so that a whole answer has been read
            with contextlib.suppress(OSError):
                while True:
                    writer.write(flood)
                    await writer.drain()
            ended.set()
            break
    writer.close()


@pytest.mark.parametrize(
    ("before", "piece"),
    [
        (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        (b"HTTP/1.1 103 Early\r\n\r\n", b"HTTP/1.1 103 Early\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x" * 64),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ", b"x" * 64),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n%b"
            % (b'data: {"id":9,"method":"ping"}\n\n' * 2000),
            b"x" * 64,
        ),
    ],
    ids=["answers that nobody asked for", "provisional answers", "an extension of a chunk", "an event", "after pings"],
)
def test_a_server_outside_that_sends_what_is_no_message_is_not_read_on(before: bytes, piece: bytes) -> None:
    """aiohttp reads all of it, also between calls: 16 MB of small answers took 5 s of processor time and 550 MB."""

    async def run() -> Steps:
        flood, ended = piece * (65_536 // len(piece)), asyncio.Event()
        server = await asyncio.start_server(lambda r, w: flooded(r, w, before, flood, ended), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        servers = {"out": {"url": f"http://127.0.0.1:{port}/mcp", "timeout_s": 20}}
        env = Office(mcp_servers=servers, mcp_allow=[f"127.0.0.1:{port}"])
        try:
            _, steps = await steps_of(env, call("look"))
            async with asyncio.timeout(5):
                await ended.wait()
            return steps
        finally:
            await env.close()
            server.close()

    assert ("it sent more than 8 MiB" if before else "found") in asyncio.run(run())[0][0]


@pytest.mark.parametrize("where", ["schema", "result"])
def test_a_server_that_sends_millions_of_values_holds_up_no_worker(where: str) -> None:
    """In 8 MiB there are 4 million numbers, which took a second to look through and to write again."""
    values = {"x": [1] * 3_000_000}
    began = time.process_time()
    if where == "result":
        assert "too large" in content_as_text({"structuredContent": values})
    else:
        about = McpServer(url="http://127.0.0.1/mcp")
        client: Any = None
        with pytest.raises(ToolError, match="has more than 20000 characters"):
            _make_tool("Office", about, client, {"name": "look", "inputSchema": values})
    assert time.process_time() - began < 0.1
