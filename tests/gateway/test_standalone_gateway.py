"""`roll-flash serve-gateway`: sessions over HTTP, episodes on disk, clear words when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from conftest import until
from scripted_model import END, ScriptedClient, TinyModel

from roll_flash.cli.main import main
from roll_flash.errors import ConfigError
from roll_flash.gateway.apis.request_fields import decode_object
from roll_flash.gateway.server import GatewayServer
from roll_flash.gateway.sessions import routes as session_routes
from roll_flash.gateway.sessions.routes import SessionRoutes
from roll_flash.gateway.sessions.session import Session
from roll_flash.gateway.sessions.verifier import Verifier
from roll_flash.gateway.token_backend import TokenBackend
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import EpisodesWriter, read_episodes
from roll_flash.serving import GatewayRequest, RunningGateway, _address, open_gateway

HELLO = [{"role": "user", "content": "Hi"}]
Scenario = Callable[[httpx.AsyncClient, SessionRoutes], Awaitable[None]]
VERIFIER = """
import asyncio
import pathlib

async def length(episode):
    said = episode.messages[-1]["content"]
    return len(said), {"success": episode.task.kwargs.get("wanted") == said}

async def slow(episode):
    while not pathlib.Path(episode.task.kwargs["go"]).exists():
        await asyncio.sleep(0.01)
    return 1

def broken(episode):
    raise ValueError("no idea")

def huge(episode):
    return 10**400
"""


def alone(tiny: TinyModel, folder: Path, scenario: Scenario, **options: Any) -> list[dict[str, Any]]:
    """Run `scenario` with a gateway that stands alone; returns the episodes it wrote."""
    settings: dict[str, Any] = {"verifier": None, "idle_s": 60.0, **options}
    admin_key = settings.pop("admin_key", "admin")

    async def run() -> None:
        tokenizer = tiny.tokenizer("chatml")
        client = ScriptedClient(tiny, tokenizer, lambda number: "Hello.", END["chatml"])
        backend = TokenBackend(client, tokenizer, model="m", max_length=512)
        gateway = GatewayServer(backend, call_timeout_s=10.0, admin_key=admin_key)
        with EpisodesWriter(folder) as episodes:
            routes = SessionRoutes(gateway, episodes, **settings)
            url = f"http://127.0.0.1:{await gateway.start()}"
            sweeping = asyncio.create_task(routes.sweep())
            try:
                headers = {"Authorization": f"Bearer {admin_key}".strip()}
                async with asyncio.timeout(30), httpx.AsyncClient(base_url=url, timeout=20, headers=headers) as http:
                    await scenario(http, routes)
            finally:
                sweeping.cancel()
                await routes.close()
                await gateway.close()

    asyncio.run(run())
    return read_episodes(folder)


async def opened(http: httpx.AsyncClient, **fields: Any) -> tuple[str, dict[str, str]]:
    answer = await http.post("/v1/sessions", json=fields)
    assert answer.status_code == 201
    session = answer.json()
    assert session["base_url"] == f"{http.base_url}/v1"
    return session["session_id"], {"Authorization": f"Bearer {session['api_key']}"}


async def say(http: httpx.AsyncClient, key: dict[str, str]) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": "m", "messages": HELLO}, headers=key)


def test_a_session_that_is_scored_is_an_episode_as_a_run_writes_it(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        session_id, key = await opened(http, task_id="greet", seed=4, group_id="g", metadata={"level": 2})
        await say(http, key)
        listed = (await http.get("/v1/sessions")).json()
        assert listed["data"][0]["calls"] == 1
        body = {"reward": 0.5, "success": True, "info": {"why": "polite"}}
        answer = await http.post(f"/v1/sessions/{session_id}/reward", json=body, headers=key)
        assert answer.json() == {
            "session_id": session_id,
            "kind": "trajectory",
            "reward": 0.5,
            "success": True,
            "turns": 1,
            "samples": 1,
            "policy_tokens": 7,
        }
        again = await http.post("/v1/reward", json=body, headers=key)
        assert (again.status_code, again.json()["error"]["code"]) == (410, "session_ended")
        assert (await say(http, key)).status_code == 410

    (record,) = alone(tiny, tmp_path, scenario)
    assert (record["task_id"], record["seed"], record["group_id"]) == ("greet", 4, "g")
    assert (record["reward"], record["success"], record["info"]["why"]) == (0.5, True, "polite")
    assert len(record["token_ids"]) == len(record["logprobs"]) == len(record["policy_mask"])
    assert record["messages"][-1]["content"] == "Hello."


def test_every_session_ends_as_a_line_also_one_that_nobody_scored(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        session_id, _ = await opened(http, task_id="given up")
        assert (await http.delete(f"/v1/sessions/{session_id}")).json()["cause"] == "cancelled"
        _, key = await opened(http, task_id="idle")
        await say(http, key)
        await until(lambda: routes.failed == 2)
        await opened(http, task_id="open at the end")

    records = alone(tiny, tmp_path, scenario, idle_s=1.0)
    assert sorted(record["task_id"] for record in records) == ["given up", "idle", "open at the end"]
    assert {record["kind"] for record in records} == {"failure"}
    assert {record["cause"] for record in records} <= {"episode_timeout", "cancelled"}


DEEP: Any = json.loads("[" * 90 + "]" * 90)


@pytest.mark.parametrize(
    "body",
    [
        {"reward": "good"},
        {"reward": 1e999},
        {"reward": 10**400},
        {"reward": -(10**400)},
        {"reward": 1e300},
        {"reward": 1, "info": 3},
        {"reward": 1, "info": {"deep": DEEP}},
        {},
        [],
    ],
)
def test_a_reward_that_is_none_is_refused_and_may_be_given_again(tiny: TinyModel, tmp_path: Path, body: Any) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http)
        nothing_yet = await http.post("/v1/reward", json={"reward": 1}, headers=key)
        assert (nothing_yet.status_code, "nothing to score" in nothing_yet.text) == (400, True)
        await say(http, key)
        content = json.dumps(body).replace("Infinity", "1e999").encode()
        answer = await http.post("/v1/reward", content=content, headers=key)
        assert answer.status_code == 400
        assert (await http.post("/v1/reward", json={"reward": 1}, headers=key)).status_code == 200

    (record,) = alone(tiny, tmp_path, scenario)
    assert record["reward"] == 1


def test_a_verifier_scores_what_was_said(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(VERIFIER)

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http, metadata={"wanted": "Hello."})
        await say(http, key)
        answer = (await http.post("/v1/reward", json={}, headers=key)).json()
        assert (answer["reward"], answer["success"]) == (6.0, True)

    verifier = Verifier(f"{tmp_path / 'judge.py'}:length")
    assert len(alone(tiny, tmp_path / "out", scenario, verifier=verifier)) == 1


def test_what_was_said_after_the_verifier_looked_is_not_scored_by_it(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(VERIFIER)
    go = tmp_path / "go"

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http, metadata={"go": str(go)})
        await say(http, key)
        scoring = asyncio.create_task(http.post("/v1/reward", json={}, headers=key))
        await until(lambda: routes.sessions_being_scored)
        await say(http, key)
        go.touch()
        answer = await scoring
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_changed")
        assert (await http.post("/v1/reward", json={}, headers=key)).status_code == 200

    verifier = Verifier(f"{tmp_path / 'judge.py'}:slow")
    (record,) = alone(tiny, tmp_path / "out", scenario, verifier=verifier)
    assert len(record["branches"]) == 1


def test_a_verifier_may_take_longer_than_a_session_may_be_idle(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge.py").write_text(VERIFIER)
    go = tmp_path / "go"

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http, metadata={"go": str(go)})
        await say(http, key)
        scoring = asyncio.create_task(http.post("/v1/reward", json={}, headers=key))
        await until(lambda: routes.sessions_being_scored)
        (session,) = routes.gateway._sessions.values()
        session.last_activity_s -= 1000
        await asyncio.sleep(0.3)
        go.touch()
        assert (await scoring).status_code == 200

    verifier = Verifier(f"{tmp_path / 'judge.py'}:slow")
    monkeypatch.setattr(session_routes, "SWEEP_S", 0.02)
    (record,) = alone(tiny, tmp_path / "out", scenario, verifier=verifier)
    assert record["kind"] == "trajectory"


def slow_to_end(gateway: GatewayServer) -> tuple[asyncio.Event, asyncio.Event]:
    """The next session that ends sets the first event, and takes until the second is set."""
    begun, go, end_session = asyncio.Event(), asyncio.Event(), gateway.end_session

    async def end(session: Session) -> None:
        gateway.end_session = end_session  # type: ignore[method-assign]
        begun.set()
        await go.wait()
        await end_session(session)

    gateway.end_session = end  # type: ignore[method-assign]
    return begun, go


def test_a_session_is_written_though_who_scored_it_has_gone_away(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http)
        await say(http, key)
        begun, go = slow_to_end(routes.gateway)
        scoring = asyncio.create_task(http.post("/v1/reward", json={"reward": 1}, headers=key))
        await begun.wait()
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        await until(lambda: routes.gateway.metrics()["gateway_disconnects"])
        go.set()
        await until(lambda: routes.scored)

    (record,) = alone(tiny, tmp_path, scenario)
    assert (record["kind"], record["reward"]) == ("trajectory", 1)


def test_a_session_whose_agent_goes_away_from_its_only_answer_while_it_is_scored_is_written(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        session_id, key = await opened(http)
        await say(http, key)
        history = routes._opened[session_id].session.history
        begun, go = slow_to_end(routes.gateway)
        scoring = asyncio.create_task(http.post("/v1/reward", json={"reward": 1}, headers=key))
        await begun.wait()
        history.discard(history.records[0])
        go.set()
        assert (await scoring).json()["kind"] == "failure"

    (record,) = alone(tiny, tmp_path, scenario)
    assert (record["kind"], record["cause"]) == ("failure", "cancelled")


def test_a_reward_that_comes_while_the_gateway_stops_disturbs_no_other_session(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        keys = [(await opened(http, task_id=name))[1] for name in ("first", "scored", "last")]
        await say(http, keys[1])
        begun, go = slow_to_end(routes.gateway)
        stopping = asyncio.create_task(routes.close())
        await begun.wait()
        assert (await http.post("/v1/reward", json={"reward": 1}, headers=keys[1])).status_code == 200
        go.set()
        await stopping

    records = alone(tiny, tmp_path, scenario)
    kinds = {record["task_id"]: record["kind"] for record in records}
    assert kinds == {"first": "failure", "scored": "trajectory", "last": "failure"}


def test_one_stop_string_of_a_session_is_one(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        await opened(http, sampling={"stop": "END"})
        (session,) = routes.gateway._sessions.values()
        assert session.settings.sampling is not None
        assert session.settings.sampling.stop == ("END",)
        for wrong in ({"stop": 5}, {"top_p": 0}):
            assert (await http.post("/v1/sessions", json={"sampling": wrong})).status_code == 400

    assert len(alone(tiny, tmp_path, scenario)) == 1


@pytest.mark.parametrize(
    ("name", "says"), [("broken", "ValueError: no idea (judge.py:15)"), ("huge", "not a finite number")]
)
def test_a_verifier_that_raises_scores_nothing(tiny: TinyModel, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "judge.py").write_text(VERIFIER)

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http)
        await say(http, key)
        answer = await http.post("/v1/reward", json={}, headers=key)
        assert answer.status_code == 500
        assert says in answer.json()["error"]["message"]

    verifier = Verifier(f"{tmp_path / 'judge.py'}:{name}")
    (record,) = alone(tiny, tmp_path / "out", scenario, verifier=verifier)
    assert record["kind"] == "failure"


def test_with_a_key_of_its_own_only_its_holder_opens_sessions(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        del http.headers["Authorization"]
        assert (await http.post("/v1/sessions", json={})).status_code == 401
        assert (await http.get("/v1/sessions")).status_code == 401
        admin = {"Authorization": "Bearer secret"}
        session = (await http.post("/v1/sessions", json={}, headers=admin)).json()
        other = (await http.post("/v1/sessions", json={}, headers=admin)).json()
        assert (await http.delete(f"/v1/sessions/{other['session_id']}")).status_code == 401
        key = {"Authorization": f"Bearer {session['api_key']}"}
        await say(http, key)
        wrong = await http.post(f"/v1/sessions/{other['session_id']}/reward", json={"reward": 1}, headers=key)
        assert wrong.status_code == 403
        path = f"/v1/sessions/{session['session_id']}/reward"
        assert (await http.post(path, json={"reward": 1})).status_code == 401
        assert (await http.post(path, json={"reward": 1}, headers=admin)).status_code == 200

    assert len(alone(tiny, tmp_path, scenario, admin_key="secret")) == 2


def test_a_call_with_the_gateways_key_is_answered_and_belongs_to_no_session(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http)
        answers = [await say(http, {}) for _ in range(3)]
        said = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert said == ["Hello."] * 3
        body = {"model": "m", "messages": HELLO, "max_tokens": 9}
        assert (await http.post("/v1/messages", json=body)).json()["content"][0]["text"] == "Hello."
        streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
        assert "Hello." in streamed.text
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await http.get("/v1/models/m")).json()["id"] == "m"
        refused = await http.post("/v1/chat/completions", json={**body, "model": "n"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await http.post("/v1/reward", json={"reward": 1.0})).status_code == 401, "there is nothing to score"
        for wrong in ({"Authorization": "Bearer Admin"}, {"Authorization": "Bearer"}):
            assert (await say(http, wrong)).status_code == 401
        listed = (await http.get("/v1/sessions")).json()
        assert [session["calls"] for session in listed["data"]] == [0]
        assert (listed["metrics"]["gateway_sessions"], listed["metrics"]["gateway_answers"]) == (1, 5)
        await say(http, key)

    (record,) = alone(tiny, tmp_path, scenario)
    assert record["cause"] == "cancelled"


def test_without_a_key_of_its_own_a_gateway_answers_only_sessions(tiny: TinyModel, tmp_path: Path) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        for header in ("", "Bearer", "Bearer x"):
            assert (await say(http, {"Authorization": header})).status_code == 401

    alone(tiny, tmp_path, scenario, admin_key="")


NO_TEXT = [b"\xff", b"\xed\xa0\x80", b"Bearer \xff\xfe", b"http://[\xff", b"//\xff:99999", b";;=\xff", b"\xe2\x84\x80"]
NO_TEXT += [b"application/json; x*", b"application/json; x*" + b"9" * 5000 + b"=y"]


@pytest.mark.parametrize("name", ["Authorization", "x-api-key", "Origin", "Host", "Content-Type", "Content-Encoding"])
def test_a_header_that_is_no_text_is_refused_and_fills_no_log(
    tiny: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Nobody needs a key to send one: what fails here would be a traceback on this machine's disk for each."""

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        for value in NO_TEXT:
            for method, path in (("POST", "/v1/sessions"), ("POST", "/v1/reward"), ("DELETE", "/v1/sessions/x")):
                answer = await http.request(method, path, content=b"{}", headers={name.encode(): value})
                assert answer.status_code < 500, (value, path, answer.text)
        assert caplog.text == ""
        assert routes.gateway.metrics()["gateway_failed"] == 0

    alone(tiny, tmp_path, scenario)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Authorization": ""}, 401, "invalid_api_key"),
        ({"Authorization": "", "Origin": "http://evil.example", "Content-Type": "text/plain"}, 403, "foreign_origin"),
        ({"Origin": "http://evil.example"}, 403, "foreign_origin"),
        ({"Origin": "null"}, 403, "foreign_origin"),
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"Host": "evil.example"}, 403, "foreign_host"),
        ({"Host": "evil.example:8321"}, 403, "foreign_host"),
        ({"Host": "127.0.0.1.evil.example"}, 403, "foreign_host"),
        ({"Host": ""}, 403, "foreign_host"),
        ({"Host": "[::1"}, 403, "foreign_host"),
    ],
)
def test_a_web_page_opens_no_session(
    tiny: TinyModel, tmp_path: Path, headers: dict[str, str], status: int, code: str
) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        sent = {"Content-Type": "application/json", **headers}
        answer = await http.post("/v1/sessions", content=b"{}", headers=sent)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert not routes.gateway._sessions

    assert alone(tiny, tmp_path, scenario) == []


def test_the_address_of_a_session_is_the_gateways_and_not_what_the_request_calls_it(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        for host in ("localhost:1", "127.0.0.2", "[::1]:99"):
            answer = await http.post("/v1/sessions", json={}, headers={"Host": host})
            assert answer.json()["base_url"] == f"http://127.0.0.1:{routes.gateway.port}/v1"

    assert len(alone(tiny, tmp_path, scenario)) == 3

    async def told(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        assert (await http.post("/v1/sessions", json={})).json()["base_url"] == "https://outside/v1"

    assert len(alone(tiny, tmp_path, told, url="https://outside")) == 4


def test_before_an_endpoint_messages_pass_through_and_its_refusals_too(tmp_path: Path) -> None:
    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        assert request.headers["Authorization"] == "Bearer theirs"
        if len(body["messages"]) > 1:
            error = {"message": "maximum context length is 5", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        call = {"id": "c", "type": "function", "function": {"name": "go", "arguments": '{"x": 1}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})

    async def scenario(serving: RunningGateway) -> None:
        admin = {"Authorization": f"Bearer {serving.api_key}"}
        async with httpx.AsyncClient(base_url=serving.url, headers=admin) as http:
            _, key = await opened(http)
            tool = {"name": "go", "input_schema": {"type": "object"}}
            body = {"model": "theirs", "max_tokens": 9, "messages": HELLO, "tools": [tool]}
            answer = (await http.post("/v1/messages", json=body, headers=key)).json()
            assert answer["content"][0]["input"] == {"x": 1}
            long = {"model": "theirs", "messages": [*HELLO, *HELLO]}
            refused = await http.post("/v1/chat/completions", json=long, headers=key)
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            unseen = {"model": "theirs", "messages": [{**HELLO[0], "name": "x" * 100_000}]}
            refused = await http.post("/v1/chat/completions", json=unseen, headers=key)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
            assert "sees hardly any of" in refused.json()["error"]["message"]
            assert (await http.post("/v1/reward", json={"reward": 1}, headers=key)).status_code == 200

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setenv("THEIR_KEY", "theirs")
        request = GatewayRequest(
            model="theirs",
            endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
            endpoint_key_env="THEIR_KEY",
            port=0,
            out=str(tmp_path / "out"),
        )
        try:
            async with open_gateway(request, note=lambda _: None) as serving:
                await scenario(serving)
        finally:
            await runner.cleanup()

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(patch))
    (record,) = read_episodes(tmp_path / "out" / "step_000000.jsonl")
    assert record["end"] == "context_limit"
    assert record["messages"][1]["tool_calls"][0]["function"]["name"] == "go"
    assert record["token_ids"] == []


def test_an_endpoint_that_does_not_answer_is_known_before_agents_ask_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The gateway served it, and each session was a failure."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    command = ["serve-gateway", "--endpoint", url, "--model", "m", "--port", "0", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"asking {url} for one token")
    assert "no connection: Connection refused; is the server up?" in said[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to serve"),
        (["--model", "smollm-135"], "no model folder and none of smollm2-135m, tiny"),
        (["--model", "tiny", "inference.engin=vllm"], "did you mean 'inference.engine'"),
        (["--model", "tiny", "--url", "here"], "must look like http://host:port"),
        (["--model", "tiny", "--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE is not set"),
        (["--endpoint", "localhost:8000", "--model", "m"], "must look like http://host:port/v1"),
        (["--model", "tiny", "--port", "80000"], "from 0 to 65535"),
        (["--model", "tiny", "--verifier", "judge"], "module:NAME"),
        (["--model", "tiny", "--verifier", "nowhere.py:f"], "no such file"),
        (["tiny"], "a model is given with --model"),
        (["--model", "tiny", "--idle-s", "0"], "must be more than 0"),
    ],
)
def test_a_command_that_cannot_be_run_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    assert main(["serve-gateway", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_run_is_served_wherever_its_folder_is_and_one_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"name": "try", "runs": str(tmp_path), "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
    folder = tmp_path / "try #2"
    hf = folder / "checkpoints" / "step_3" / "hf"
    hf.mkdir(parents=True)
    (hf.parent / "COMPLETE").touch()
    (folder / "config.yaml").write_text(json.dumps(tree))
    command = ["serve-gateway", "--model", str(folder), "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert "holds no model folder hf/; take another step" in capsys.readouterr().err
    (hf / "config.json").write_text("{}")
    seen: list[str] = []
    monkeypatch.setattr(
        "roll_flash.serving.resolve_model", lambda path, revision: seen.append(path) or Path("/no/such")
    )
    assert main(command) != 0
    assert seen == [str(hf)]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_episodes_are_not_written_where_another_user_could_read_and_change_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.chown(tmp_path, 12345, 12345)
    assert main(["serve-gateway", "--model", "tiny", "--out", str(tmp_path)]) == 2
    assert "belongs to the user with id 12345" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_known_before_a_model_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("roll_flash.inference.open.open_engine", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert main(["serve-gateway", "--model", "tiny", "--out", str(tmp_path / "out"), "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 cannot be used" in said
    assert "--port" in said


def test_a_model_is_served_within_its_context_and_not_at_all_without_a_chat_template(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway's own 4,096 tokens were more than models of 2,048 can read: vLLM did not start with it."""
    folder = shutil.copytree(resolve_model("tiny"), tmp_path / "short")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 512}))
    lengths: list[int] = []

    def no_engine(*_: object, max_model_len: int, **__: object) -> None:
        lengths.append(max_model_len)
        raise ConfigError("seen")

    monkeypatch.setattr("roll_flash.inference.open.open_engine", no_engine)
    command = ["serve-gateway", "--model", str(folder), "--port", "0", "--out", str(tmp_path / "out")]
    command.append("inference.engine=transformers")
    for more, says in (
        ([], "seen"),
        (["model.max_length=256"], "seen"),
        (["model.max_length=1024"], "model.max_length=1,024 is more than the 512 tokens"),
    ):
        assert main([*command, *more]) == 2
        assert says in capsys.readouterr().err
    assert lengths == [512, 256]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert main(command) == 2
    assert "the tokenizer has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8321"),
        ("::", "http://[::1]:8321"),
        ("::1", "http://[::1]:8321"),
        ("10.1.2.3", "http://10.1.2.3:8321"),
        ("localhost", "http://localhost:8321"),
    ],
)
def test_the_address_that_is_told_can_be_used(host: str, url: str) -> None:
    """That of a gateway on all addresses was refused like a request of a web page, and an IPv6 address was none."""
    assert _address(host, 8321) == url


@pytest.mark.parametrize("reward", [1e39, -1e7, float("nan")])
def test_a_verifiers_reward_that_cannot_be_trained_on_scores_nothing(
    tiny: TinyModel, tmp_path: Path, reward: float
) -> None:
    source = tmp_path / "far.py"
    source.write_text(f"def far(episode):\n    return float({str(reward)!r})\n")

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http)
        await say(http, key)
        answer = await http.post("/v1/reward", json={}, headers=key)
        assert answer.status_code == 500
        assert "not a finite number of at most 1e+06" in answer.json()["error"]["message"]

    (record,) = alone(tiny, tmp_path / "out", scenario, verifier=Verifier(f"{source}:far"))
    assert record["kind"] == "failure"


def test_a_large_reward_holds_up_no_other_session(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused may be sent again without end, and none of it counts as a call."""
    read_in: list[tuple[bool, bool]] = []

    def decode(content: bytes) -> Any:
        read_in.append((len(content) > 4096, threading.current_thread() is threading.main_thread()))
        return decode_object(content)

    monkeypatch.setattr(session_routes, "decode_object", decode)

    async def scenario(http: httpx.AsyncClient, routes: SessionRoutes) -> None:
        _, key = await opened(http)
        await say(http, key)
        read_in.clear()
        for info in ([[]] * 50_000, []):
            answer = await http.post("/v1/reward", json={"reward": "no", "info": info}, headers=key)
            assert answer.status_code == 400
        assert read_in == [(True, False), (False, True)]

    alone(tiny, tmp_path, scenario)
