"""Servers that die, hang, lie or refuse: what a worker's client does and says. They are stand-ins on loopback."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roll_flash.engines.inference import ClientSpec, Generation
from roll_flash.errors import ConfigError, InferenceError
from roll_flash.inference.client.token_client import TokenClient
from roll_flash.types import SamplingParams

from .stand_in_server import Handler, StandInServer, answer, choice, logprob_at, response, stream, token_at, well

PROMPT = [1, 2, 3]
TOKENS = 40
SPEC = ClientSpec("vllm", (), "policy", 4096, stream_every=8, health_timeout_s=20.0)


def saying(content: bytes, status: int = 200) -> Handler:
    async def say(_: StandInServer, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(response(content, status))

    return say


def wrong(**changes: Any) -> Handler:
    async def say(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(response(json.dumps(answer(server, request, **changes)).encode()))

    return say


async def close(_: StandInServer, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def never(_: StandInServer, __: dict[str, Any], ___: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def die_after_20(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await stream(server, request, writer, 20, None)
    await asyncio.sleep(0.05)
    writer.transport.abort()


async def hang_after_20(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await stream(server, request, writer, 20, None)
    server.hangs_at_health = True
    await asyncio.sleep(3600)


def play(
    handlers: list[Handler],
    use: Callable[[TokenClient, list[StandInServer]], Awaitable[Any]],
    spec: ClientSpec = SPEC,
) -> Any:
    async def with_servers() -> Any:
        async with AsyncExitStack() as stack, asyncio.timeout(60):
            servers = [await stack.enter_async_context(StandInServer(handler)) for handler in handlers]
            client = TokenClient(replace(spec, endpoints=tuple(server.endpoint for server in servers)), first=0)
            stack.push_async_callback(client.close)
            return await use(client, servers)

    return asyncio.run(with_servers())


async def ask(client: TokenClient, timeout_s: float = 30, tokens: int = TOKENS) -> Generation:
    return await client.generate(PROMPT, SamplingParams(max_new_tokens=tokens), request_id="r", timeout_s=timeout_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the code under test
            await asyncio.sleep(0.01)


def assert_exact(generation: Generation, versions: list[int], tokens: int = TOKENS) -> None:
    positions = range(len(PROMPT), len(PROMPT) + tokens)
    assert generation.token_ids.tolist() == [token_at(p) for p in positions]
    assert np.array_equal(generation.logprobs, np.array([logprob_at(p) for p in positions], np.float32))
    assert generation.versions.tolist() == versions
    assert generation.finish_reason == "length"


WRONG_ANSWERS = [
    pytest.param(saying(b"engine dead", 500), "HTTP 500: engine dead", id="http_500"),
    pytest.param(saying(b"slow down", 429), "HTTP 429: slow down", id="http_429"),
    pytest.param(saying(b"<html>no</html>"), r"not an answer .*: <html>no</html>", id="not_json"),
    pytest.param(saying(b""), "ended without a reason", id="nothing"),
    pytest.param(saying(b"[1, 2]"), "not an answer", id="json_of_another_kind"),
    pytest.param(saying(b"{}"), "without choices", id="no_choices"),
    pytest.param(saying(b'{"choices": [7]}'), "not an answer", id="choice_is_a_number"),
    pytest.param(saying(b"\xff\xfe{}"), "not an answer", id="not_utf8"),
    pytest.param(saying(b'{"error": {"message": "boom"}}'), "error instead of tokens: .*boom", id="error_as_answer"),
    pytest.param(wrong(token_ids=[1, 2]), "2 tokens with 40 logprobs", id="wrong_token_count"),
    pytest.param(wrong(token_ids=[], logprobs={"content": []}, weight_versions=[]), "no tokens", id="empty_turn"),
    pytest.param(wrong(token_ids=["a"] * TOKENS), "not an answer", id="tokens_are_text"),
    pytest.param(wrong(token_ids=[-1] * TOKENS), "token ids from -1 to -1", id="negative_token"),
    pytest.param(wrong(token_ids=[1 << 40] * TOKENS), "token ids from 1099511627776", id="huge_token"),
    pytest.param(saying(b'{"error":' + b"[" * 100_000), "not an answer", id="nested_without_end"),
    pytest.param(wrong(logprobs={"content": [{"logprob": float("nan")}] * TOKENS}), "not an answer", id="nan_logprob"),
    pytest.param(wrong(logprobs={"content": [{"logprob": 0.5}] * TOKENS}), "positive or not finite", id="logprob_0.5"),
    pytest.param(wrong(logprobs={"content": [{"logprob": -1e308}] * TOKENS}), "not finite: -1e", id="sum_overflows"),
    pytest.param(wrong(logprobs={"content": [{"logprob": -1e39}] * TOKENS}), "not finite: -1e", id="below_float32"),
    pytest.param(wrong(logprobs={"content": [{"logprob": None}] * TOKENS}), "not an answer", id="null_logprob"),
    pytest.param(wrong(logprobs=None), "40 tokens with 0 logprobs", id="no_logprobs"),
    pytest.param(wrong(finish_reason=None), "without a reason", id="no_finish_reason"),
    pytest.param(wrong(finish_reason="tired"), "not an answer", id="unknown_finish_reason"),
    pytest.param(wrong(finish_reason="t" * 10_000), "not an answer", id="long_finish_reason"),
    pytest.param(wrong(weight_versions=None), "no weight version for 40 tokens", id="no_versions"),
    pytest.param(
        wrong(weight_versions=[{"version": "new", "start": 0, "end": TOKENS}]), "no number: 'new'", id="version_name"
    ),
    pytest.param(
        wrong(weight_versions=[{"version": "1", "start": 5, "end": TOKENS}]), "for 40 tokens", id="version_gap"
    ),
    pytest.param(
        wrong(weight_versions=[{"version": "9" * 12, "start": 0, "end": TOKENS}]), "weight versions", id="version_huge"
    ),
    pytest.param(
        wrong(weight_versions=[{"version": "1", "start": 0, "end": 0}] * 10_000), "for 40", id="many_versions"
    ),
]


@pytest.mark.parametrize(("handler", "says"), WRONG_ANSWERS)
def test_a_wrong_answer_is_asked_again_elsewhere_and_alone_is_one_clear_line(handler: Handler, says: str) -> None:
    async def elsewhere(client: TokenClient, _: Any) -> Generation:
        generation = await ask(client)
        assert (client.counts.bad_answers, client.counts.asked_again) == (1, 1)
        return generation

    async def alone(client: TokenClient, servers: list[StandInServer]) -> str:
        with pytest.raises(InferenceError, match=says) as caught:
            await ask(client)
        assert len(servers[0].requests) == client.counts.bad_answers == 3
        assert servers[0].endpoint in str(caught.value)
        return str(caught.value)

    assert_exact(play([handler, well], elsewhere), [0] * TOKENS)
    message = play([handler], alone)
    assert message.startswith("request r: 3 answers were wrong, the last of http://127.0.0.1:")
    assert "\n" not in message
    assert len(message) < 500


def test_a_token_that_the_model_does_not_have_is_a_wrong_answer_too() -> None:
    """The learner could not compute it: on a GPU it would end the process."""

    async def use(client: TokenClient, _: Any) -> Generation:
        generation = await ask(client)
        assert client.counts.bad_answers == 1
        return generation

    spec = replace(SPEC, vocabulary=50)
    assert_exact(play([wrong(token_ids=[50] * TOKENS), well], use, spec), [0] * TOKENS)


def test_what_is_not_http_is_a_wrong_answer_too() -> None:
    async def garbage(_: StandInServer, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x01\x02 SSH-2.0 hello\r\n\r\n")

    async def use(client: TokenClient, _: Any) -> Generation:
        generation = await ask(client)
        assert client.counts.bad_answers == 1
        return generation

    assert_exact(play([garbage, well], use), [0] * TOKENS)


def test_a_refused_request_is_not_asked_again() -> None:
    async def use(client: TokenClient, servers: list[StandInServer]) -> None:
        with pytest.raises(InferenceError, match=r"http://127.0.0.1:\d+: HTTP 400: too warm"):
            await ask(client)
        assert [len(server.requests) for server in servers] == [1, 0]

    play([saying(b"too warm", 400), well], use)


def test_a_closed_connection_moves_the_request() -> None:
    async def use(client: TokenClient, _: Any) -> Generation:
        generation = await ask(client)
        assert (client.counts.removed, client.counts.bad_answers) == (1, 0)
        return generation

    assert_exact(play([close, well], use), [0] * TOKENS)


@pytest.mark.parametrize("end", [die_after_20, hang_after_20])
def test_a_request_goes_on_from_the_tokens_that_are_known(end: Handler) -> None:
    """Of 40 tokens the first server makes 20 and dies or hangs; the second continues with newer weights."""

    async def use(client: TokenClient, servers: list[StandInServer]) -> Generation:
        servers[0].version, servers[1].version = 3, 4
        generation = await ask(client)
        assert servers[1].requests[0]["token_ids"] == PROMPT + [token_at(len(PROMPT) + i) for i in range(20)]
        assert servers[1].requests[0]["sampling_params"]["max_tokens"] == TOKENS - 20
        assert client.counts.tokens_kept == 20
        assert client.counts.hung == (end is hang_after_20)
        return generation

    generation = play([end, well], use, replace(SPEC, health_timeout_s=0.4))
    assert_exact(generation, [3] * 20 + [4] * 20)


def test_a_server_that_aborts_gets_the_rest_of_the_request() -> None:
    """As at a weight update with `weights.in_flight: abort_resume`: the tokens before keep their version."""

    async def abort_then_well(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.requests) > 1:
            return await well(server, request, writer)
        aborted = {"choices": [choice(server, request, 0, 15, "abort")]}
        writer.write(response(json.dumps(aborted).encode()))
        server.version += 1

    async def use(client: TokenClient, _: Any) -> Generation:
        generation = await ask(client)
        assert (client.counts.aborted, client.counts.removed, client.counts.tokens_kept) == (1, 0, 15)
        return generation

    assert_exact(play([abort_then_well], use), [0] * 15 + [1] * 25)


def test_a_server_that_never_answers_costs_the_deadline_and_no_more() -> None:
    async def use(client: TokenClient, _: Any) -> float:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await ask(client, timeout_s=0.3)
        assert client.metrics()["outstanding_tokens_0"] == 0
        return time.monotonic() - began

    assert play([never], use) < 5


def test_a_slow_server_is_waited_for() -> None:
    async def slow(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        body = response(json.dumps(answer(server, request)).encode())
        for start in range(0, len(body), 400):
            writer.write(body[start : start + 400])
            await asyncio.sleep(0.01)

    async def use(client: TokenClient, _: Any) -> Generation:
        generation = await ask(client)
        assert client.counts.asked_again == 0
        return generation

    assert_exact(play([slow], use), [0] * TOKENS)


def test_an_idle_connection_that_the_server_closed_is_no_failure() -> None:
    async def answer_and_close(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await well(server, request, writer)
        await writer.drain()
        writer.close()

    async def use(client: TokenClient, _: Any) -> int:
        for _ in range(20):
            assert_exact(await ask(client, tokens=5), [0] * 5, 5)
        return client.counts.asked_again + client.counts.removed

    assert play([answer_and_close], use) == 0


def test_a_dead_server_comes_back_when_it_has_the_newest_weights_again() -> None:
    """It gave version 5 before; started again it has version 0 for a moment, and gets nothing until it has 5."""

    async def use(client: TokenClient, servers: list[StandInServer]) -> None:
        first, second = servers
        first.version = second.version = 5
        assert_exact(await ask(client), [5] * TOKENS)
        assert len(first.requests) == 1
        first.handler, first.healthy, first.version = close, False, 0
        assert_exact(await ask(client), [5] * TOKENS)
        first.handler, first.healthy = well, True
        await asyncio.sleep(1)
        assert (client.metrics()["servers_out"], client.counts.returned) == (1, 0)
        first.version = 5
        await until(lambda: client.counts.returned == 1)
        asked = len(first.requests)
        await ask(client)
        assert len(first.requests) == asked + 1

    play([well, well], use)


def test_with_every_server_gone_requests_wait_for_the_first_that_returns() -> None:
    async def use(client: TokenClient, servers: list[StandInServer]) -> None:
        servers[0].healthy = False
        asks = [asyncio.create_task(ask(client)) for _ in range(20)]
        await until(lambda: client.metrics()["servers_out"] == 1)
        servers[0].handler, servers[0].healthy = well, True
        for generation in await asyncio.gather(*asks):
            assert_exact(generation, [0] * TOKENS)
        assert client.metrics()["queue_longest_wait_s"] > 0

    play([close], use)


def test_requests_over_the_capacity_wait_and_their_deadline_holds() -> None:
    """The server holds two requests at once; a client of two has one place, and never sends a second one."""
    most = 0

    async def count(server: StandInServer, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        await well(server, request, writer)

    running = 0

    async def use(client: TokenClient, servers: list[StandInServer]) -> None:
        await asyncio.gather(*(ask(client) for _ in range(5)))
        assert client.metrics()["queue_waits"] == 4
        servers[0].handler = never
        blocked = asyncio.create_task(ask(client))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await ask(client, timeout_s=0.2)
        assert len(servers[0].requests) == 6
        assert client.metrics()["queue_waiting"] == 0
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)

    play([count], use, replace(SPEC, capacity_tokens=(2.0 * (len(PROMPT) + TOKENS),), clients=2))
    assert most == 1


def test_cancelling_a_turn_closes_its_connection() -> None:
    async def use(client: TokenClient, servers: list[StandInServer]) -> None:
        turn = asyncio.create_task(ask(client))
        await until(lambda: bool(servers[0].requests))
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await until(lambda: servers[0].open_connections == 0)

    async def say_nothing(_: StandInServer, __: dict[str, Any], ___: asyncio.StreamWriter) -> None:
        return

    play([say_nothing], use)


def test_an_endpoint_that_is_no_http_address_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"https://model:1: an inference server is reached at http://host:port"):
        TokenClient(replace(SPEC, endpoints=("https://model:1",)))
