"""The chat client against a real HTTP server on this machine that behaves well, badly, slowly and not at all."""

from __future__ import annotations

import asyncio
import email.utils
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from roll_flash.chat.openai_client import MAX_ANSWER_BYTES, ChatReply, OpenAIChatClient, _reply, api_key_from
from roll_flash.envs.hosting.environments import EnvironmentMaker
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.gateway.endpoint_backend import _answer
from roll_flash.monitor.episodes import episode_record
from roll_flash.rollout.episodes.conversation import ChatPolicy, ContextFullError
from roll_flash.rollout.episodes.episode import Deadlines, Progress, run_episode
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Task, Trajectory

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMPLETION = {
    "choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()

    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def ask(answer: Answer, *, timeout_s: float = 10, sampling: SamplingParams | None = None, **options: Any) -> ChatReply:
    async def chat() -> ChatReply:
        async with serving(answer) as url:
            client = OpenAIChatClient(url, "small", **{"backoff_s": 0.01, **options})
            try:
                messages = [{"role": "user", "content": "6 * 7?"}]
                return await client.chat(messages, sampling or SamplingParams(), timeout_s=timeout_s)
            finally:
                await client.close()

    return asyncio.run(chat())


class Script:
    """Answers with one response after the other and remembers the requests."""

    def __init__(self, *responses: tuple[int, Any, dict[str, str]]) -> None:
        self.responses = list(responses)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.times: list[float] = []
        self.asked = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.monotonic())
        self.asked.set()
        self.headers.append(request.headers)
        self.bodies.append(await request.json())
        status, body, headers = self.responses[min(len(self.bodies), len(self.responses)) - 1]
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)


def test_a_reply_comes_with_its_token_counts() -> None:
    script = Script((200, COMPLETION, {}))
    reply = ask(script, api_key="secret", sampling=SamplingParams(temperature=0.5, stop=("</a>",), seed=3, top_p=0.9))
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("42", "stop", 7, 2)
    (body,) = script.bodies
    assert body == {
        "model": "small",
        "messages": [{"role": "user", "content": "6 * 7?"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 64,
        "stop": ["</a>"],
        "seed": 3,
    }
    assert script.headers[0]["Authorization"] == "Bearer secret"


def test_half_a_character_of_an_endpoint_is_text_that_can_be_sent_on() -> None:
    """It would raise wherever the text goes: into a command, a tokenizer, the next request."""
    call = {"id": "\ud800", "function": {"name": "a\udfff", "arguments": '"\ud800"'}}
    said = {"content": "a\ud800b \ud83d\ude00", "tool_calls": [call]}
    reply = ask(Script((200, {"choices": [{"message": said, "finish_reason": "stop"}]}, {})))
    assert reply.text == "a?b \U0001f600"
    assert reply.tool_calls[0] == {"id": "?", "type": "function", "function": {"name": "a?", "arguments": '"?"'}}


def test_an_answer_in_parts_is_its_text() -> None:
    """As of endpoints of thinking models. Else its score would be that of a list of Python, with the thoughts in it."""
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "7 * 6"}]}
    said = {"content": [thought, {"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}
    assert ask(Script((200, {"choices": [{"message": said}]}, {}))).text == "42"
    assert _answer({"message": said}).content == "42"
    for content in ({"text": "42"}, 42, [{"type": "text", "text": 42}], ["42"]):
        with pytest.raises(InferenceError, match="not a chat completion"):
            _reply({"choices": [{"message": {"content": content}}]}, "http://here", 0.0)


def test_no_key_is_sent_where_none_is_given() -> None:
    script = Script((200, COMPLETION, {}))
    ask(script)
    assert "Authorization" not in script.headers[0]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    script = Script((status, "busy", {}), (status, "busy", {}), (200, COMPLETION, {}))
    assert ask(script).text == "42"
    assert len(script.bodies) == 3


def test_retry_after_is_respected() -> None:
    script = Script((429, "slow down", {"Retry-After": "0.5"}), (200, COMPLETION, {}))
    ask(script)
    assert script.times[1] - script.times[0] >= 0.3


def test_retries_are_bounded_and_the_error_tells_what_the_server_said() -> None:
    script = Script((503, {"error": {"message": "overloaded"}}, {}))
    with pytest.raises(InferenceError, match="gave up after 3 attempts: HTTP 503: overloaded"):
        ask(script, max_attempts=3)
    assert len(script.bodies) == 3


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, {"error": {"message": "bad key"}}, "HTTP 401: bad key; .*give a key with --api-key-env"),
        (404, {"error": {"message": "no model small"}}, "HTTP 404: no model small; check that the URL ends with /v1"),
        (400, "context too long", "HTTP 400: context too long"),
        (200, "<html>hello</html>", "the answer is not JSON but '<html>hello</html>'"),
        (200, {"choices": []}, "not a chat completion"),
        (200, [1], "not a chat completion"),
        (200, {"choices": [{"message": "hi"}]}, "not a chat completion"),
        (200, {**COMPLETION, "usage": {"prompt_tokens": float("inf")}}, "not a chat completion"),
        (200, {**COMPLETION, "usage": {"prompt_tokens": 10**4000}}, "not a chat completion"),
        (200, {**COMPLETION, "usage": {"completion_tokens": -5}}, "not a chat completion"),
        (200, {"choices": " " * (MAX_ANSWER_BYTES + 1)}, "an answer of more than 64 MiB"),
        (400, " " * (MAX_ANSWER_BYTES + 1), "an answer of more than 64 MiB"),
        (200, f"[{'[],' * 1_000_000}[]]", "an answer of more than 2000000 commas and brackets"),
    ],
)
def test_what_does_not_pass_is_one_clear_error_at_once(status: int, body: Any, words: str) -> None:
    script = Script((status, body, {}))
    with pytest.raises(InferenceError, match=words):
        ask(script)
    assert len(script.bodies) == 1


def test_an_answer_of_a_million_values_is_not_quoted_as_a_whole() -> None:
    """It took seconds of the event loop on which hundreds of other episodes run."""
    answer = {"choices": [{}] * 1_000_000}
    began_s = time.process_time()
    with pytest.raises(InferenceError, match=r"not a chat completion: \{'choices': \[\{\}, \{\}"):
        _reply(answer, "http://here", 0.0)
    assert time.process_time() - began_s < 0.1


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "message",
    [
        {"content": nested(100_000)},
        {"content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": nested(100_000)}}]},
        {"content": "", "tool_calls": [{"id": nested(100_000), "function": {"name": "f"}}]},
    ],
)
def test_nesting_without_end_in_an_answer_is_one_clear_error(message: Any) -> None:
    with pytest.raises(InferenceError, match="http://here: not a chat completion"):
        _reply({"choices": [{"message": message}]}, "http://here", 0.0)


def test_a_conversation_goes_to_no_other_address_than_the_one_that_was_given() -> None:
    script = Script((307, "", {"Location": "/v1/elsewhere"}), (200, COMPLETION, {}))
    with pytest.raises(InferenceError, match=r"HTTP 307: redirects to '/v1/elsewhere.*'; if you trust it"):
        ask(script)
    assert len(script.bodies) == 1


@pytest.mark.parametrize("wait", ["Mon, 01 Jan 99999 00:00:00 GMT", "nan", "-1e999"])
def test_a_wait_that_makes_no_sense_is_the_clients_own(wait: str) -> None:
    assert ask(Script((429, "slow down", {"Retry-After": wait}), (200, COMPLETION, {}))).text == "42"


def test_a_reply_without_text_is_empty_and_tokens_that_are_not_told_are_not_zero() -> None:
    reply = ask(Script((200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}, {})))
    assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("", "length", None)


def test_throttling_is_borne_longer_than_other_trouble() -> None:
    script = Script(*[(429, "slow down", {})] * 6, (200, COMPLETION, {}))
    assert ask(script, max_attempts=2).text == "42"
    assert len(script.bodies) == 7


def test_an_account_without_credit_is_not_asked_again() -> None:
    script = Script((429, {"error": {"message": "pay first", "code": "insufficient_quota"}}, {}))
    with pytest.raises(InferenceError, match="HTTP 429: pay first"):
        ask(script)
    assert len(script.bodies) == 1


def test_when_one_request_is_told_to_wait_the_others_wait_too() -> None:
    script = Script((429, "slow down", {"Retry-After": "1.5"}), (200, COMPLETION, {}))

    async def chat() -> None:
        async with serving(script) as url:
            client = OpenAIChatClient(url, "small")
            first = asyncio.create_task(client.chat([], SamplingParams(), timeout_s=60))
            await script.asked.wait()
            await asyncio.sleep(0.8)
            await client.chat([], SamplingParams(), timeout_s=60)
            await first
            await client.close()

    asyncio.run(chat())
    assert min(script.times[1:]) - script.times[0] >= 1.5


def test_a_wait_that_is_asked_for_as_a_date_is_understood() -> None:
    soon = email.utils.formatdate(time.time() + 3, usegmt=True)
    script = Script((503, "maintenance", {"Retry-After": soon}), (200, COMPLETION, {}))
    ask(script)
    assert script.times[1] - script.times[0] >= 0.3


def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(hang, timeout_s=0.3)
    assert time.monotonic() - started < 30


def test_the_deadline_holds_for_waits_between_retries_too() -> None:
    started = time.monotonic()
    with pytest.raises(InferenceError, match=r"throttled: HTTP 429: later; .* 3600 s more, past its deadline"):
        ask(Script((429, "later", {"Retry-After": "3600"})), timeout_s=20)
    assert time.monotonic() - started < 15


def test_a_connection_that_breaks_off_is_tried_again() -> None:
    calls = 0

    async def break_once(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(COMPLETION)

    assert ask(break_once).text == "42"
    assert calls == 2


def test_no_proxy_is_asked_for_an_endpoint_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert ask(Script((200, COMPLETION, {})), max_attempts=1).text == "42"


def test_a_server_that_is_not_there_is_named() -> None:
    async def chat() -> None:
        client = OpenAIChatClient("http://127.0.0.1:9/v1", "small", max_attempts=2, backoff_s=0.01)
        try:
            await client.chat([], SamplingParams(), timeout_s=10)
        finally:
            await client.close()

    with pytest.raises(
        InferenceError, match=r"127.0.0.1:9/v1.*gave up after 2 attempts: no connection.*is the server up"
    ):
        asyncio.run(chat())


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http://host:port/v1"])
def test_something_that_is_no_endpoint_is_refused(url: str) -> None:
    async def chat() -> None:
        client = OpenAIChatClient(url, "small", max_attempts=1)
        try:
            await client.chat([], SamplingParams(), timeout_s=10)
        finally:
            await client.close()

    with pytest.raises(InferenceError, match="endpoint"):
        asyncio.run(chat())


def test_no_more_requests_are_in_flight_than_connections() -> None:
    running = most = 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return web.json_response(COMPLETION)

    async def chat() -> None:
        async with serving(slow) as url:
            client = OpenAIChatClient(url, "small", max_connections=3)
            await asyncio.gather(*(client.chat([], SamplingParams(), timeout_s=10) for _ in range(12)))
            await client.close()

    asyncio.run(chat())
    assert most == 3


def test_a_key_is_read_from_the_environment_and_a_missing_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    assert api_key_from("SOME_KEY") == "secret"
    assert api_key_from(None) is None
    with pytest.raises(ConfigError, match="OTHER_KEY is not set"):
        api_key_from("OTHER_KEY")


def test_tokens_are_known_of_every_turn_and_of_an_attempt_that_failed() -> None:
    sampling = SamplingParams(seed=0)
    spec = EpisodeSpec("e:1:0", "e:1", 0, Task("TextFrozenLake-v0:1", "TextFrozenLake-v0", 1), sampling, 3)
    seeds: list[int] = []

    async def play(*responses: tuple[int, Any, dict[str, str]]) -> Trajectory | EpisodeFailure:
        with ThreadPoolExecutor(1) as executor:
            async with serving(script := Script(*responses)) as url:
                client = OpenAIChatClient(url, "small")
                policy = ChatPolicy(client, spec.sampling)
                opened = functools.partial(EnvironmentMaker(executor).open, spec.task)
                try:
                    return await run_episode(spec, opened, policy, Deadlines(10, 10, 30), Progress())
                finally:
                    seeds.extend(body["seed"] for body in script.bodies)
                    await client.close()

    whole = asyncio.run(play((200, COMPLETION, {})))
    assert isinstance(whole, Trajectory)
    assert [(turn.prompt_tokens, turn.completion_tokens) for turn in whole.turns] == [(7, 2)] * len(whole.turns)
    assert len(seeds) == len(set(seeds)) == 3, "with one seed each turn draws the same random numbers"
    record = episode_record(whole)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (7 * len(whole.turns), 2 * len(whole.turns))
    failed = asyncio.run(play((200, COMPLETION, {}), (400, "no", {})))
    assert isinstance(failed, EpisodeFailure)
    assert (failed.cause, failed.prompt_tokens, failed.completion_tokens) == ("generate_error", 7, 2)


def test_as_many_requests_are_in_flight_as_there_are_episodes() -> None:
    """Each is answered only when all have arrived: a bound anywhere on the way would hang."""
    count, arrived = 300, 0
    everyone = asyncio.Event()

    async def wait_for_all(request: web.Request) -> web.StreamResponse:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            everyone.set()
        await everyone.wait()
        return web.json_response(COMPLETION)

    async def chat() -> None:
        async with serving(wait_for_all) as url:
            client = OpenAIChatClient(url, "small")
            await asyncio.gather(*(client.chat([], SamplingParams(), timeout_s=60) for _ in range(count)))
            await client.close()

    asyncio.run(chat())
    assert arrived == count


@pytest.mark.parametrize(
    "says",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        '{"error": {"code": "context_length_exceeded"}}',
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_a_conversation_that_fills_the_context_is_the_models_doing(says: str) -> None:
    async def chat() -> None:
        async with serving(Script((200, COMPLETION, {}), (400, says, {}))) as url:
            client = OpenAIChatClient(url, "small")
            policy = ChatPolicy(client, SamplingParams())
            try:
                policy.begin([{"role": "user", "content": "Hi"}])
                await policy.act(60)
                policy.observe([{"role": "user", "content": "Go on"}])
                await policy.act(60)
            finally:
                await client.close()

    with pytest.raises(ContextFullError, match="HTTP 400"):
        asyncio.run(chat())
