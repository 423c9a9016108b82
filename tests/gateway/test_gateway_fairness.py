"""Whatever one agent sends, the others are answered, and it is counted."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from conftest import MODEL, Serve, Served

from roll_flash.errors import InferenceError
from roll_flash.gateway.apis import responses_api
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.gateway.apis.prompt_text import MAX_MESSAGES, MAX_TOOLS
from roll_flash.gateway.sessions.session import SessionSettings
from roll_flash.gateway.sessions.work import THREADS, SessionWork, WorkThreads
from roll_flash.gateway.token_backend import TokenBackend

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TEXT = "the quick brown fox, " * 20_000


def tool(**fields: Any) -> dict[str, Any]:
    return {"name": "f", "input_schema": {"type": "object"}, **fields}


def called(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    return [*HELLO, {"role": "assistant", "content": [call]}, *HELLO]


WORST: dict[str, dict[str, Any]] = {
    "a text": {"messages": [{"role": "user", "content": TEXT}]},
    "the description of a tool": {"messages": HELLO, "tools": [tool(description=TEXT)]},
    "the arguments of a call": {"messages": called({"x": TEXT}), "tools": [tool()]},
    "a schema of many values": {"messages": HELLO, "tools": [tool(input_schema={"enum": [[]] * 10_000})] * 5},
    "arguments of many values": {"messages": called({"x": [[]] * 50_000}), "tools": [tool()]},
    "many messages": {"messages": [{"role": "user", "content": TEXT[:600]}] * MAX_MESSAGES},
}


@pytest.mark.parametrize("worst", WORST)
def test_what_one_agent_sends_holds_up_no_other(serve: Serve, worst: str) -> None:
    """The other waits for a fraction of the time that the large request takes; before, for all of it. A machine may
    be busy with something else for a moment: once in three times must be without that."""

    async def work(served: Served) -> None:
        other = served.gateway.open_session(SessionSettings())
        headers = {"x-api-key": other.api_key, "Content-Type": "application/json"}
        body = json.dumps({"model": MODEL, **WORST[worst]}).encode()
        shares = []
        async with httpx.AsyncClient(base_url=served.url, headers=headers) as http:
            while not any(share < 1 for share in shares) and len(shares) < 3:
                took_s, waited_s = await ask_beside(served, http, body)
                print(f"{worst}: took {took_s:.2f} s, another waited {waited_s:.3f} s")
                shares.append(waited_s / max(0.5 * took_s, 0.25))
        assert min(shares) < 1, shares

    serve(work, ["Hello."], max_length=2**18)  # with less room, hardly anything of it would be counted


async def ask_beside(served: Served, http: httpx.AsyncClient, body: bytes) -> tuple[float, float]:
    """Seconds that the request `body` took, and the longest that one of another session took meanwhile."""
    waited: list[float] = []

    async def ask() -> None:
        while True:
            began = time.perf_counter()
            answer = await http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": HELLO})
            waited.append(time.perf_counter() - began)
            assert answer.status_code == 200

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.2)
    waited.clear()
    began = time.perf_counter()
    kind = {"Content-Type": "application/json"}
    answer = await served.http.post("/v1/messages/count_tokens", content=body, headers=kind)
    took_s = time.perf_counter() - began
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["input_tokens"] > 100_000
    return took_s, max(waited)


def test_a_body_in_pieces_of_one_byte_holds_up_no_other(serve: Serve) -> None:
    """Reading 256 KiB of it took 0.1 s, and joining what had come as long, without a turn for others."""

    async def work(served: Served) -> None:
        head = f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key: {served.session.api_key}\r\n"
        body = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n"

        def send() -> bytes:
            with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=50) as connection:
                connection.sendall(body)
                return connection.recv(100)

        shares: list[float] = []
        async with httpx.AsyncClient(base_url=served.url, headers=served.http.headers) as http:
            while not any(share < 0.07 for share in shares) and len(shares) < 3:
                began, waited = time.perf_counter(), [0.0]
                sending = asyncio.create_task(asyncio.to_thread(send))
                while not sending.done():
                    asked = time.perf_counter()
                    assert (await http.get("/v1/models")).status_code == 200
                    waited.append(time.perf_counter() - asked)
                    await asyncio.sleep(0.005)
                assert b"400 Bad Request" in await sending
                shares.append(max(waited) / (time.perf_counter() - began))
        assert min(shares) < 0.07, shares

    serve(work, [], max_length=2**18)


@pytest.mark.parametrize("content", ["<think>" + TEXT, " " * len(TEXT)], ids=["thinking", "blanks"])
def test_what_does_not_count_as_said_is_tokenised_in_a_thread_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Agents that leave out a turn's thinking have rewritten nothing, so it is in no key; a template renders it."""
    threads: list[threading.Thread] = []
    whole = TokenBackend._whole
    monkeypatch.setattr(
        TokenBackend, "_whole", lambda *given: (threads.append(threading.current_thread()), whole(*given))[1]
    )

    async def work(served: Served) -> None:
        messages = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
        assert (await served.chat(messages)).status_code == 400  # too long
        kind = {"model": MODEL, "messages": messages}
        assert (await served.http.post("/v1/messages/count_tokens", json=kind)).status_code == 200

    serve(work, ["Hello."])
    assert len(threads) == 2
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("streams", [False, True])
def test_a_small_request_that_continues_a_long_conversation_is_read_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """It brings the whole conversation, which the event loop read for a tenth of a second, again and again."""
    threads: list[threading.Thread] = []
    parse = responses_api.parse

    def watched(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*given, **named)

    monkeypatch.setattr(responses_api, "parse", watched)

    async def work(served: Served) -> None:
        served.client.scores = False
        previous = None
        for _ in range(4):
            body = {"model": MODEL, "input": "x" * 1500, "previous_response_id": previous}
            answer = await served.http.post("/v1/responses", json=body)
            assert answer.status_code == 200
            previous = answer.json()["id"]
        for unknown in ("resp_x", ["resp_x"]):
            body = {"model": MODEL, "input": "x", "previous_response_id": unknown}
            assert (await served.http.post("/v1/responses", json=body)).status_code == 404
        body = {"model": MODEL, "input": "x", "previous_response_id": previous, "stream": streams}
        assert (await served.http.post("/v1/responses", json=body)).status_code == 200
        assert len(served.session.history.samples()) == 1

    serve(work, ["Hello."], max_length=2**15)
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, False, True, True, False]


CHOICES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
    "/v1/responses": {"input": HELLO, "tools": [{"type": "function", "name": "f"}]},
    "/v1/messages": {"messages": HELLO, "tools": [tool()]},
    "/v1/messages/count_tokens": {"messages": HELLO, "tools": [tool()]},
}


@pytest.mark.parametrize("path", CHOICES)
@pytest.mark.parametrize("name", [TEXT, ["f"], {"f": 1}])
def test_a_tool_choice_that_names_no_tool_is_refused_and_not_rendered(serve: Serve, path: str, name: Any) -> None:
    """A name of 2 MB was tokenised on the event loop, for 5 s; a kind that is none was a traceback in the log."""
    kind = "tool" if "messages" in path else "function"
    choices = [{"type": kind, "name": name}, {"type": name, "name": "f"}]

    async def work(served: Served) -> None:
        for choice in choices:
            answer = await served.http.post(path, json={"model": MODEL, **CHOICES[path], "tool_choice": choice})
            assert answer.status_code == 400
            assert "tool_choice" in answer.text
            assert len(answer.text) < 2000
        assert served.session.trouble is None

    serve(work, ["Hello."])


def test_an_error_does_not_quote_a_whole_body(serve: Serve) -> None:
    async def work(served: Served) -> None:
        answer = await served.chat([{"role": [TEXT], "content": "Hi"}])
        assert answer.status_code == 400
        assert len(answer.text) < 2000

    serve(work, ["Hello."])


def test_counting_tokens_is_a_call_of_the_episode(serve: Serve) -> None:
    async def work(served: Served) -> None:
        body = {"model": MODEL, "messages": HELLO}
        for status in (200, 200, 403, 403):
            answer = await served.http.post("/v1/messages/count_tokens", json=body)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "max_turns_reached"
        assert (await served.chat(HELLO)).status_code == 403
        assert served.session.calls == served.gateway.metrics()["gateway_calls"] == 2

    serve(work, ["Hello."], settings=SessionSettings(max_calls=2))


@pytest.mark.parametrize("worst", ["a text", "the description of a tool", "the arguments of a call"])
def test_of_a_prompt_that_cannot_fit_only_the_beginning_is_counted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, worst: str
) -> None:
    """Four sessions that counted megabytes took all threads for half a minute, from all others."""
    lengths: list[int] = []

    async def work(served: Served) -> None:
        backend = served.gateway.backend
        assert isinstance(backend, TokenBackend)
        encode = backend.tokenizer.encode

        def counted(text: str, **settings: Any) -> Any:
            lengths.append(len(text))
            return encode(text, **settings)

        monkeypatch.setattr(backend.tokenizer, "encode", counted)
        answer = await served.http.post("/v1/messages/count_tokens", json={"model": MODEL, **WORST[worst]})
        assert answer.status_code == 200
        assert answer.json()["input_tokens"] > 200, "the agent must see that it does not fit"
        assert sum(lengths) < 50_000

    serve(work, ["Hello."], "qwen3", max_length=200)


@pytest.mark.parametrize("style", ["chatml", "qwen3"])
def test_more_tools_than_anybody_declares_are_refused_and_not_rendered(serve: Serve, style: str) -> None:
    """Each grows eight times when it is shown: 1 MB of bare names took a thread for half a minute."""
    bare = {"type": "function", "function": {"name": "f"}}

    async def work(served: Served) -> None:
        served.client.scores = False
        for path in ("/v1/messages/count_tokens", "/v1/messages"):
            for count, status in ((MAX_TOOLS, 200), (MAX_TOOLS + 1, 400)):
                body = {"model": MODEL, "messages": HELLO, "tools": [{"name": "f"}] * count}
                answer = await served.http.post(path, json=body)
                assert answer.status_code == status
        assert f"more than {MAX_TOOLS} tools" in answer.text
        (first,) = served.session.history.records
        messages = [*HELLO, first.answer.message, *HELLO]
        answer = await served.chat(messages, tools=[bare] * (MAX_TOOLS + 1))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert served.session.trouble is None

    serve(work, ["Hello."], style, max_length=2**18)


def test_a_body_of_more_values_than_anybody_sends_is_413_and_a_deep_one_is_400(serve: Serve) -> None:
    async def work(served: Served) -> None:
        kind = {"Content-Type": "application/json"}
        many = b'{"model": "policy", "messages": [' + b"[]," * 300_000 + b"[]]}"
        answer = await served.http.post("/v1/chat/completions", content=many, headers=kind)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        deep: dict[str, Any] = {}
        for _ in range(300):
            deep = {"properties": deep}
        declared = {"type": "function", "function": {"name": "f", "parameters": deep}}
        answer = await served.chat(HELLO, tools=[declared])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        for seed in (10**400, 10**4000):
            assert (await served.chat(HELLO, seed=seed)).status_code == 400
        assert served.session.trouble is None

    serve(work, ["Hello."])


@pytest.mark.parametrize("path", CHOICES)
def test_a_schema_of_more_values_than_anybody_declares_is_refused_and_not_sorted(serve: Serve, path: str) -> None:
    """To sort 240,000 names took half a second, in one piece: four agents at once held up all others for 4 s."""
    names = {f"{number * 7919 % 240_007:012}": 1 for number in range(240_000)}
    declared: dict[str, Any] = {"name": "f", "input_schema" if path.startswith("/v1/messages") else "parameters": names}
    chosen = {"type": "function", "function": declared} if "chat" in path else declared
    chosen |= {"type": "function"} if path == "/v1/responses" else {}

    async def work(served: Served) -> None:
        answer = await served.http.post(path, json={"model": MODEL, **CHOICES[path], "tools": [chosen]})
        assert answer.status_code == 400
        assert "more than 20000 values" in answer.text
        assert served.session.trouble is None

    serve(work, ["Hello."], max_length=2**18)


COMPARING = """{%- for message in messages %}{% for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and message.role == 'assistant' %}{% endif %}{% endfor -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""As that of gpt-oss, which looks for a final answer after each call of a tool."""


def test_a_template_that_compares_messages_holds_up_no_other(serve: Serve) -> None:
    """20,000 messages in each of four sessions took all threads for minutes, and then their own episodes had failed."""

    async def work(served: Served) -> None:
        assert isinstance(served.gateway.backend, TokenBackend)
        served.gateway.backend.tokenizer.chat_template = COMPARING
        called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        for message in (HELLO[0], {"role": "assistant", "content": "", "tool_calls": called * 100}):
            answer = await served.chat([message] * 20_000 if message is HELLO[0] else [message] * 21)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert (await served.chat(HELLO * 200)).status_code == 200
        assert served.session.trouble is None

    serve(work, ["Hello."], max_length=131_072)


def test_work_that_takes_a_session_too_long_is_its_agents_fault_and_waiting_for_a_thread_is_not() -> None:
    """A request that takes for ever to read was a failure of ours, which saves an episode from its score."""

    async def run() -> None:
        threads, go = WorkThreads(), threading.Event()
        busy = [SessionWork(threads, 0.5) for _ in range(THREADS)]
        try:
            slow = [asyncio.create_task(each.do(lambda: go.wait(20), 10**6)) for each in busy]
            await asyncio.sleep(0.1)
            with pytest.raises(InferenceError, match="no thread"):
                await SessionWork(threads, 0.2).do(lambda: None, 10**6)
            for own in slow:
                with pytest.raises(ApiError, match="to read the request takes more than"):
                    await own
        finally:
            go.set()
            await threads.close()

    asyncio.run(run())


def test_a_session_waits_for_its_own_earlier_work_with_a_deadline_too() -> None:
    """Work that no thread had begun was waited for without one, by the next request of the session."""

    async def run() -> None:
        threads, go, begun = WorkThreads(), threading.Event(), []
        for _ in range(THREADS):
            threads.submit(lambda: go.wait(20))
        late, left, own = (SessionWork(threads, 0.2) for _ in range(3))
        try:
            for _ in range(2):
                with pytest.raises(InferenceError, match="no thread"):
                    await asyncio.wait_for(late.do(lambda: begun.append("late"), 10**6), 10)
            gone = asyncio.create_task(left.do(lambda: begun.append("left"), 10**6))
            await asyncio.sleep(0.05)
            gone.cancel()
            with pytest.raises(InferenceError, match="no thread"):
                await asyncio.wait_for(left.do(lambda: begun.append("left"), 10**6), 10)
            go.set()
            assert await asyncio.wait_for(late.do(lambda: "done", 10**6), 10) == "done"
            assert begun == []
            go.clear()
            for problem in ("to read the request takes", "the other requests of this session"):
                with pytest.raises(ApiError, match=problem):
                    await asyncio.wait_for(own.do(lambda: go.wait(20), 10**6), 10)
        finally:
            go.set()
            await threads.close()

    asyncio.run(run())


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 6000}]},
    "/v1/responses": {"input": "x" * 6000},
    "/v1/messages": {"messages": [{"role": "user", "content": "x" * 6000}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x" * 6000}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_for_which_there_is_no_thread_is_trouble_of_ours(serve: Serve, path: str) -> None:
    """The episode was scored as if the model had failed."""

    async def work(served: Served) -> None:
        go = threading.Event()
        for _ in range(THREADS):
            served.gateway._threads.submit(lambda: go.wait(20))
        try:
            answer = await served.http.post(path, json={"model": MODEL, **BODIES[path]})
        finally:
            go.set()
        require_no_thread(served, answer)

    serve(work, ["Hello."], timeout_s=0.5)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_no_thread_after_a_request_is_read_is_trouble_of_ours_and_leaves_no_record(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def work(served: Served) -> None:
        go = threading.Event()
        in_thread, pieces = SessionWork._do_in_thread, [0]

        async def busy_at_last(own: SessionWork, piece: Any) -> Any:
            pieces[0] += 1
            if pieces[0] == last:
                for _ in range(THREADS):
                    served.gateway._threads.submit(lambda: go.wait(20))
            return await in_thread(own, piece)

        monkeypatch.setattr(SessionWork, "_do_in_thread", busy_at_last)
        served.client.scores = False
        try:
            answer = await served.http.post(path, json={"model": MODEL, "messages": messages})
        finally:
            go.set()
        require_no_thread(served, answer)

    # Of the first, only the answer is large: it is parsed, then rendered. The other is read, then counted.
    last = 2
    messages = HELLO if path == "/v1/chat/completions" else BODIES[path]["messages"]
    serve(work, ["word " * 3000], max_length=16_384, timeout_s=2.0)


def require_no_thread(served: Served, answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert "no thread" in answer.text
    assert served.session.trouble is not None
    assert served.session.trouble.cause == "generate_error"
    assert served.session.history.records == []


def test_an_agent_that_goes_away_again_and_again_has_one_thread_at_most() -> None:
    async def run() -> None:
        threads = WorkThreads()
        greedy, modest = SessionWork(threads, 20.0), SessionWork(threads, 20.0)
        go, at_once, most = threading.Event(), [0], [0]

        def slow() -> None:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            go.wait(20)
            at_once[0] -= 1

        for _ in range(3 * THREADS):
            asking = asyncio.create_task(greedy.do(slow, 10**6))
            await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await asyncio.wait_for(modest.do(lambda: "done", 10**6), 10) == "done"
        go.set()
        assert await asyncio.wait_for(greedy.do(lambda: "done", 10**6), 10) == "done"
        assert most == [1]
        await threads.close()

    asyncio.run(run())
