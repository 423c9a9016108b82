"""What agents do wrong is told to them in their API's own words, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from aiohttp import http_parser
from conftest import MODEL, Serve, Served, until

from roll_flash.chat.openai_client import OpenAIChatClient
from roll_flash.errors import InferenceError
from roll_flash.gateway.apis.answer_text import split_tool_calls
from roll_flash.gateway.endpoint_backend import EndpointBackend
from roll_flash.gateway.model_call import ModelCall, next_key, parsed_arguments
from roll_flash.gateway.server import MAX_BODY_BYTES
from roll_flash.gateway.sessions.session import MAX_GENERATIONS, Session, SessionSettings
from roll_flash.gateway.token_backend import TokenBackend

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}])
def test_a_key_that_is_missing_or_wrong_is_401(serve: Serve, headers: dict[str, str]) -> None:
    async def work(served: Served) -> None:
        async with httpx.AsyncClient(base_url=served.url) as http:
            for path in ("/v1/chat/completions", "/v1/responses"):
                answer = await http.post(path, json={"model": MODEL, "messages": HELLO}, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
            answer = await http.post("/v1/messages", json={"model": MODEL}, headers=headers)
            assert answer.json()["error"]["type"] == "authentication_error"
            assert (await http.get("/v1/models", headers=headers)).status_code == 401
        assert served.client.prompts == []

    serve(work, ["Hello."])


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{not json", "invalid_json", None),
        (b"[1]", "invalid_json", None),
        (b"[" * 5000 + b"]" * 5000, "invalid_json", None),
        ({"messages": HELLO}, "invalid_value", "model"),
        ({"model": MODEL}, "invalid_value", "messages"),
        ({"model": MODEL, "messages": "Hi"}, "invalid_value", "messages"),
        ({"model": MODEL, "messages": [{"role": "king", "content": "Hi"}]}, "invalid_value", "messages[0].role"),
        ({"model": MODEL, "messages": HELLO, "temperature": "hot"}, "invalid_value", "temperature"),
        ({"model": MODEL, "messages": HELLO, "top_p": 0}, "invalid_value", "top_p"),
        ({"model": MODEL, "messages": HELLO, "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"model": MODEL, "messages": HELLO, "n": 1000}, "invalid_value", "n"),
        ({"model": MODEL, "messages": HELLO, "top_k": 1 << 40}, "invalid_value", "top_k"),
        ({"model": MODEL, "messages": HELLO, "stop": ["a"] * 100}, "invalid_value", "stop"),
        ({"model": MODEL, "messages": HELLO, "stop": "a" * 5000}, "invalid_value", "stop"),
        ({"model": MODEL, "messages": HELLO, "tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        (
            {"model": MODEL, "messages": HELLO, "tool_choice": {"type": "function", "function": "go"}},
            "invalid_value",
            "tool_choice",
        ),
        ({"model": MODEL, "messages": HELLO, "logit_bias": {"5": 3}}, "unsupported_parameter", "logit_bias"),
        (
            {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_object"}},
            "unsupported_parameter",
            "response_format",
        ),
        (
            {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_parameter",
            "messages[0].content",
        ),
    ],
)
def test_a_request_that_is_wrong_is_400_and_names_the_field(
    serve: Serve, body: Any, code: str, param: str | None
) -> None:
    async def work(served: Served) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await served.http.post("/v1/chat/completions", content=content)
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["code"], error["param"]) == (code, param)
        assert served.session.trouble is None
        assert served.gateway.metrics()["gateway_refused"] == 1

    serve(work, ["Hello."])


def test_a_previous_response_that_is_no_id_is_not_found(serve: Serve) -> None:
    async def work(served: Served) -> None:
        body = {"model": MODEL, "input": "Hi", "previous_response_id": ["resp"]}
        answer = await served.http.post("/v1/responses", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (404, "response_not_found")

    serve(work, ["Hello."])


@pytest.mark.parametrize("field", [{"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}, {"background": True}])
def test_what_a_vendor_keeps_between_responses_is_refused_and_not_left_out(serve: Serve, field: dict[str, Any]) -> None:
    """Without its conversation, which the agent takes for known, the model answered to the last question alone."""

    async def work(served: Served) -> None:
        answer = await served.http.post("/v1/responses", json={"model": MODEL, "input": "And of Italy?", **field})
        (name,) = field
        assert (answer.status_code, error_of(answer)["param"]) == (400, name)
        assert served.client.prompts == []
        known = {"conversation": None, "prompt": None, "background": False}
        body = {"model": MODEL, "input": "Hi", **known}
        assert (await served.http.post("/v1/responses", json=body)).status_code == 200

    serve(work, ["Hello."])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/responses", "/v1/responses"),
    ],
)
def test_a_base_url_with_a_v1_too_many_or_too_few_is_said(serve: Serve, path: str, meant: str) -> None:
    async def work(served: Served) -> None:
        answer = await served.http.post(path, json={"model": MODEL})
        assert answer.status_code == 404
        assert f"it is {meant}: OpenAI's clients take a base URL that ends with /v1" in error_of(answer)["message"]

    serve(work, ["Hello."])


def test_a_session_is_idle_from_its_last_answer_on(serve: Serve) -> None:
    async def work(served: Served) -> None:
        served.client.delay_s = 0.3
        asked_s = time.monotonic()
        assert (await served.chat(HELLO)).status_code == 200
        assert served.session.last_activity_s > asked_s + 0.2

    serve(work, ["Hello."])


def test_an_unknown_model_and_an_unknown_route_are_404(serve: Serve) -> None:
    async def work(served: Served) -> None:
        answer = await served.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": HELLO})
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"
        assert MODEL in error_of(answer)["message"]
        assert error_of(await served.http.post("/v1/embeddings", json={}))["code"] == "not_found"

    serve(work, ["Hello."])


def test_a_context_that_is_too_long_is_what_agents_look_for(serve: Serve) -> None:
    async def work(served: Served) -> None:
        answer = await served.chat([{"role": "user", "content": "x" * 300}])
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert "maximum context length is 200 tokens" in error_of(answer)["message"]
        answer = await served.chat(HELLO, max_tokens=100_000)
        assert answer.status_code == 200
        assert served.client.sampling[0].max_new_tokens < 200
        assert served.session.context_was_full

    serve(work, ["Hello."], max_length=200)


def test_two_megabytes_that_do_not_fit_are_not_tokenised(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """They took a thread for ten seconds, again and again; there are four for all agents."""
    lengths: list[int] = []

    async def work(served: Served) -> None:
        backend = served.gateway.backend
        assert isinstance(backend, TokenBackend)
        encode = backend.tokenizer.encode

        def counted(text: str, **settings: Any) -> Any:
            lengths.append(len(text))
            return encode(text, **settings)

        first = (await served.chat(HELLO)).json()["choices"][0]["message"]
        monkeypatch.setattr(backend.tokenizer, "encode", counted)
        large = [{"role": "user", "content": "x" * 1_900_000}]
        for messages in (large, [*HELLO, first, *large]):
            answer = await served.chat(messages)
            assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
        assert sum(lengths) < 50_000
        assert served.session.context_was_full

    serve(work, ["Hello."], max_length=200)


def test_a_body_of_100_mb_is_413(serve: Serve) -> None:
    async def work(served: Served) -> None:
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "' + b"x" * (100 * 2**20) + b'"}]}'
        answer = await served.http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large"

        async def chunks() -> Any:
            for _ in range(MAX_BODY_BYTES // 2**20 + 2):
                yield b"x" * 2**20

        answer = await served.http.post("/v1/messages", content=chunks())
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "request_too_large"
        assert (await served.chat(HELLO)).status_code == 200

    serve(work, ["Hello."])


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
def test_a_body_that_is_packed_is_415_and_never_unpacked(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Half a megabyte of it would be 512 MiB, which the event loop unpacks for seconds."""

    async def work(served: Served) -> None:
        monkeypatch.setattr(http_parser, "DeflateBuffer", None)
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        for more in ({}, {"Authorization": "Bearer wrong"}):
            body = gzip.compress(b'{"model": "policy"}')
            answer = await served.http.post("/v1/chat/completions", content=body, headers={**headers, **more})
            assert answer.status_code == (401 if more else 415), answer.text
        assert (await served.chat(HELLO)).status_code == 200

    serve(work, ["Hello."])


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_that_goes_away_has_its_request_cancelled_and_nothing_recorded(serve: Serve, streams: bool) -> None:
    async def work(served: Served) -> None:
        served.client.delay_s = 30.0
        asking = asyncio.create_task(served.chat(HELLO, stream=streams))
        await until(lambda: served.client.prompts)
        assert served.session.requests_in_flight == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: served.client.cancelled)
        await until(lambda: not served.session.requests_in_flight)
        assert served.session.history.records == []
        assert served.session.trouble is None
        assert served.gateway.metrics()["gateway_disconnects"] == 1

    serve(work, ["Hello."])


def test_an_agent_that_goes_away_while_it_is_answered_leaves_no_record(serve: Serve) -> None:
    """The answer is larger than what the sockets hold, so that the gateway is in the middle of it."""

    async def work(served: Served) -> None:
        served.client.scores = False
        body = json.dumps({"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 8000, "n": 128}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.session.api_key}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", served.gateway.port))
            await loop.sock_sendall(connection, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert (await loop.sock_recv(connection, 15)).startswith(b"HTTP/1.1 200")
            assert len(served.session.history.records) == 128
        await until(lambda: not served.session.history.records)
        assert served.gateway.metrics()["gateway_disconnects"] == 1

    serve(work, ["ab " * 2500], max_length=10_000)


@pytest.mark.parametrize("ends", ["agent", "session"])
def test_an_agent_that_goes_away_just_when_it_has_its_answer_leaves_no_record(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """In the turn of the event loop in which the answer is recorded, so that there is nothing to cancel any more."""

    async def work(served: Served) -> None:
        complete = served.gateway.backend.complete
        ending: list[asyncio.Task[None]] = []

        async def recorded(*asked: Any) -> Any:
            answer = await complete(*asked)
            assert len(served.session.history.records) == 1
            if ends == "agent":
                (request,) = [task for task in asyncio.all_tasks() if "RequestHandler.start" in repr(task.get_coro())]
                request.cancel()
            else:
                ending.append(asyncio.create_task(served.gateway.end_session(served.session)))
                served.session.ended = True
            return answer

        monkeypatch.setattr(served.gateway.backend, "complete", recorded)
        asking = asyncio.create_task(served.chat(HELLO))
        await asyncio.gather(asking, *ending, return_exceptions=True)
        await until(lambda: not served.session.requests_in_flight)
        assert served.session.history.records == []
        assert served.session.trouble is None

    serve(work, ["Hello."])


def test_two_requests_at_once_are_both_recorded_as_branches(serve: Serve) -> None:
    async def work(served: Served) -> None:
        served.client.delay_s = 0.1
        answers = await asyncio.gather(served.chat(HELLO), served.chat(HELLO))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(served.session.history.samples()) == 2

    serve(work, ["one", "two"])


def test_of_very_many_answers_at_once_a_few_are_made_at_a_time(serve: Serve) -> None:
    """Together they would exceed the deadline of a call on a small server: no sample instead of a 0."""

    async def work(served: Served) -> None:
        running = most = 0
        generate = served.client.generate

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await generate(*args, **kwargs)
            finally:
                running -= 1

        served.client.delay_s = 0.05
        served.client.generate = counted  # type: ignore[method-assign]
        answers = await asyncio.gather(*(served.chat(HELLO, n=2) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        assert most == MAX_GENERATIONS

    serve(work, ["one"] * 20)


def test_after_its_end_a_session_is_gone_and_what_was_in_flight_is_cancelled(serve: Serve) -> None:
    async def work(served: Served) -> None:
        served.client.delay_s = 30.0
        asking = asyncio.create_task(served.chat(HELLO))
        await until(lambda: served.client.prompts)
        await served.gateway.end_session(served.session)
        for answer in (await asking, await served.chat(HELLO)):
            assert answer.status_code == 410
            assert error_of(answer)["code"] == "session_ended"
        assert served.client.cancelled == 1
        assert served.session.history.records == []
        assert served.session.trouble is None

    serve(work, ["Hello."])


def test_calls_beyond_the_limit_of_an_episode_are_refused_for_good(serve: Serve) -> None:
    async def work(served: Served) -> None:
        assert (await served.chat(HELLO)).status_code == 200
        answer = await served.chat(HELLO)
        assert answer.status_code == 403
        assert error_of(answer)["code"] == "max_turns_reached"
        assert served.session.reached_max_calls

    serve(work, ["Hello."], settings=SessionSettings(max_calls=1))


def test_a_call_for_many_answers_is_many_calls(serve: Serve) -> None:
    """What an episode may ask of the servers is bounded: 128 answers in one call took their time from all others, and
    past the deadline of a call the episode was no sample."""

    async def work(served: Served) -> None:
        assert (await served.chat(HELLO, n=4)).status_code == 403
        assert served.client.prompts == []
        assert (await served.chat(HELLO, n=2)).status_code == 200
        assert (await served.chat(HELLO)).status_code == 200
        assert (await served.chat(HELLO)).status_code == 403
        assert served.session.calls == 3

    serve(work, ["Hello."], settings=SessionSettings(max_calls=3))


@pytest.mark.parametrize(
    ("error", "delay_s", "status", "cause"),
    [(InferenceError("all servers died"), 0.0, 503, "generate_error"), (None, 30.0, 504, "generate_timeout")],
)
def test_trouble_of_ours_is_noted_so_that_the_episode_is_not_scored(
    serve: Serve, error: Exception | None, delay_s: float, status: int, cause: str
) -> None:
    async def work(served: Served) -> None:
        served.client.error, served.client.delay_s = error, delay_s
        answer = await served.chat(HELLO)
        assert answer.status_code == status
        assert error_of(answer)["type"] == "server_error"
        assert served.session.trouble is not None
        assert served.session.trouble.cause == cause
        assert served.gateway.metrics()["gateway_failed"] == 1

    serve(work, ["Hello."], timeout_s=2.0)


def tool_call(arguments: str, name: str = "sh") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}]
HALF = r"\ud800"


BULK = 200_000
TOLD: dict[str, list[dict[str, Any]]] = {
    "an id": [{"role": "tool", "tool_call_id": "x" * BULK, "content": "ok"}],
    "a name": [{"role": "user", "name": "x" * BULK, "content": "ok"}],
    "arguments": [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "sh", "arguments": f'{{"a": 1{" " * BULK}}}'}}],
        },
        *HELLO,
    ],
    "thinking": [{"role": "assistant", "content": f"<think>{'x' * BULK}</think>ok"}, *HELLO],
}


@pytest.mark.parametrize("where", TOLD)
def test_what_no_model_is_shown_fills_neither_memory_nor_disk(serve: Serve, where: str) -> None:
    """It costs no tokens, so that nothing else bounds it: a dozen calls wrote hundreds of megabytes."""

    async def work(served: Served) -> None:
        first = (await served.chat(HELLO)).json()["choices"][0]["message"]
        for messages in ([*HELLO, first, *TOLD[where]], [*HELLO, *TOLD[where]]):
            answer = await served.chat(messages)
            assert answer.status_code == 400
            assert "sees hardly any of" in error_of(answer)["message"]
        assert len(served.session.history.records) == 1
        assert served.session.trouble is None

    serve(work, ["Hello."], "qwen3")


def test_what_counts_for_no_message_is_not_kept_with_each_response(serve: Serve) -> None:
    """A conversation with its thinking put back is the recorded one; each response kept all of it again."""

    async def work(served: Served) -> None:
        asked: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        for number in range(8):
            answer = await served.http.post("/v1/responses", json={"model": MODEL, "input": asked})
            assert answer.status_code == 200
            thinking = "x" * 1_000_000
            asked = [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": f"<think>{thinking}</think>Hello."},
                {"role": "user", "content": f"And {number}?"},
            ]
        before = tracemalloc.get_traced_memory()[0]
        served.session.responses.clear()
        assert before - tracemalloc.get_traced_memory()[0] < 500_000
        assert served.session.history.forks == 6

    tracemalloc.start()
    try:
        serve(work, ["Hello."])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        tool_call(f'{{"command": "{HALF}"}}'),
        tool_call(f'{{"{HALF}": 1}}'),
        tool_call(f'"{HALF}"'),
        tool_call("{}", name=HALF),
        f'{{"name": "sh", "parameters": {{"command": "{HALF}"}}}}',
        tool_call('{"command": NaN}'),
        tool_call('{"command": -1e999}'),
    ],
)
def test_a_call_that_no_json_can_say_is_an_answer_like_any_other(serve: Serve, said: str, streams: bool) -> None:
    """Halves of characters and infinite numbers, which models write into calls, are answered and recorded."""

    async def work(served: Served) -> None:
        answer = await served.chat(HELLO, tools=TOOLS, stream=streams)
        assert answer.status_code == 200
        if streams:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            for call in answer.json()["choices"][0]["message"].get("tool_calls", ()):
                assert not {"NaN", "Infinity"} & set(re.findall(r"[A-Za-z]+", call["function"]["arguments"]))
        assert len(served.session.history.records) == 1

    serve(work, [said])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "arguments", [f'{{"command": "{HALF}"}}', f'{{"{HALF}": 1}}', '{"command": NaN}', '{"command": -1e999}']
)
def test_arguments_in_a_string_that_no_json_can_say_are_shown_as_their_text(
    serve: Serve, arguments: str, streams: bool
) -> None:
    """They were an error of ours for an answer that was recorded, or a stream that no JSON parser reads."""
    body = {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": [{"name": "sh"}], "stream": streams}

    async def work(served: Served) -> None:
        answer = await served.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        if streams:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            given = json.loads("".join(event.get("delta", {}).get("partial_json", "") for event in events))
        else:
            given = answer.json()["content"][0]["input"]
        assert given == {"arguments": arguments}
        assert served.session.trouble is None

    serve(work, [tool_call(json.dumps(arguments))])


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_cannot_be_written_is_trouble_of_ours_and_leaves_no_record(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, streams: bool
) -> None:
    """It was trained although no agent received it; in a stream, the error came in the middle of the answer."""

    async def work(served: Served) -> None:
        answer_of = TokenBackend._answer
        broken = "a half \ud800"
        monkeypatch.setattr(TokenBackend, "_answer", lambda *given: replace(answer_of(*given), content=broken))
        asking = served.http.post(path, json={"model": MODEL, **BODIES[path], "stream": streams})
        if streams:
            with pytest.raises(httpx.RemoteProtocolError, match="closed"):
                await asking
        else:
            assert (await asking).status_code == 500
        assert served.session.history.records == []
        assert served.session.trouble is not None
        assert served.session.trouble.cause == "internal_error"
        assert served.gateway.metrics()["gateway_failed"] == 1
        assert served.gateway.metrics()["gateway_disconnects"] == 0

    serve(work, ["Hello."])


def test_nesting_that_can_just_be_read_is_an_answer_like_any_other() -> None:
    """Writing does not go as deep as reading: at some depth only one of them works."""
    for depth in range(40, 1100):
        said = tool_call('{"a": ' + "[" * depth + "]" * depth + "}")
        content, calls = split_tool_calls(said, ["sh"])
        assert bool(content) != bool(calls)
        for call in calls:
            message = {"role": "assistant", "content": content, "tool_calls": [call.as_dict()]}
            json.dumps([[[[parsed_arguments(call.arguments)]]]])
            assert next_key(b"", message)


class OddEndpoint(OpenAIChatClient):
    """A stand-in for an endpoint: it answers every request with the same choice."""

    def __init__(self, choice: dict[str, Any]) -> None:
        super().__init__("http://here/v1", "theirs")
        self._choice = choice

    async def complete(self, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        return {"choices": [self._choice]}


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"content": nested(100_000)}},
        {"message": {"tool_calls": [{"function": {"name": "f", "arguments": nested(100_000)}}]}},
        {"message": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -(10**400)}]}},
    ],
)
def test_an_answer_of_an_endpoint_that_cannot_be_read_is_the_endpoints_fault(choice: dict[str, Any]) -> None:
    async def ask() -> None:
        session = Session("s", SessionSettings(), 10)
        await EndpointBackend(OddEndpoint(choice)).complete(ModelCall(tuple(HELLO)), session, 0)

    with pytest.raises(InferenceError, match="not a chat completion"):
        asyncio.run(ask())


@pytest.mark.parametrize("style", ["chatml", "llama3", "qwen3", "items"])
@pytest.mark.parametrize(
    "arguments", ["[1]", "null", "7", "no JSON", f'{{"a": "{HALF}"}}', "NaN", "[" * 900 + "]" * 900, "9" * 4200]
)
def test_a_call_of_a_shape_that_a_template_does_not_know_is_the_agents_trouble(
    serve: Serve, arguments: str, style: str
) -> None:
    """Agents tell the gateway what their model wrote. A request that cannot be shown is refused; the episode counts."""
    call = {"id": "1", "type": "function", "function": {"name": "sh", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, *HELLO]

    async def work(served: Served) -> None:
        answer = await served.chat(messages, tools=TOOLS)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert error_of(answer)["param"] == "messages"
        assert served.session.trouble is None
        assert (await served.chat(HELLO)).status_code == 200

    serve(work, ["Hello."], style)


CHUNKED = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        ("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
        ("Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", CHUNKED),
        ("Content-Length: 2\r\nContent-Length: 20\r\n", b"{}"),
        ("Content-Length: 2, 2\r\n", b"{}"),
        ("Content-Length: +2\r\n", b"{}"),
        ("Transfer-Encoding: xchunked\r\n", CHUNKED),
        ("Transfer-Encoding : chunked\r\n", CHUNKED),
        ("Transfer-Encoding: chunked\r\n", b"-2\r\n{}\r\n0\r\n\r\n"),
        ("X: a\r\n Content-Length: 2\r\n", b"{}"),
        ("X: a\0b\r\nContent-Length: 2\r\n", b"{}"),
        ("X: a\n\nContent-Length: 2\r\n", b"{}"),
        ("".join(f"X-{number}: 1\r\n" for number in range(5000)), b""),
        (f"X: {'a' * 100_000}\r\n", b""),
    ],
)
def test_a_request_of_which_two_readers_could_see_two_is_refused_and_fills_no_log(
    serve: Serve, caplog: pytest.LogCaptureFixture, lines: str, body: bytes
) -> None:
    """A sandbox may send them without end: a traceback for each would fill this machine's disk, with the key in it."""

    async def work(served: Served) -> None:
        key = served.session.api_key
        reader, writer = await asyncio.open_connection("127.0.0.1", served.gateway.port)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n{lines}\r\n".encode() + body
        )
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answers = await reader.read()
        assert re.findall(rb"HTTP/1\.[01] (\d+)", answers) == [b"400"]
        writer.close()
        assert caplog.text == ""
        assert served.gateway.metrics()["gateway_malformed"] == 1
        assert served.session.history.records == []

    serve(work, ["Hello."])
