"""Two real servers: weights are published and a server is killed while turns are sampled, and none is lost.

With transformers the servers are cheap, so each claim has its test; with vLLM one test does everything once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import Generation, InFlight
from roll_flash.inference.client.token_client import TokenClient
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.models.prepare import resolve_model
from roll_flash.types import SamplingParams

from .conftest import MAX_MODEL_LEN, Served

TOLERANCE = 1e-3
LONGEST = 300
HUNG_AFTER_S = 10.0
"""Instead of a minute and a half, in the one test that stops a server."""


def start(engine_name: str, scratch: Path) -> Iterator[Served]:
    config = InferenceConfig(engine=engine_name, servers=2, kv_cache_gib=0.25, stream_every=8)
    engine = open_engine(config, model_folder=resolve_model("tiny"), max_model_len=MAX_MODEL_LEN, logs=scratch)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.start())
        yield Served(engine, loop, scratch)
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start("transformers", tmp_path_factory.mktemp("two"))


@dataclass
class Traffic:
    """Turns that are sampled one after the other on `lanes` lanes, until it is told to stop."""

    client: TokenClient
    served: Served
    turns: list[tuple[list[int], Generation]]
    lanes: list[asyncio.Task[None]]
    stopping: bool = False

    async def lane(self, number: int) -> None:
        turn = 0
        while not self.stopping:
            turn += 1
            prompt = self.served.encode(f"lane {number} turn {turn}: ")
            sampling = SamplingParams(max_new_tokens=LONGEST)
            name = f"{number}-{turn}"
            generation = await self.client.generate(
                prompt, sampling, request_id=name, session=f"{number}", timeout_s=100
            )
            self.turns.append((prompt, generation))

    async def for_a_while(self, turns: int) -> None:
        """Until so many more turns have ended."""
        end = len(self.turns) + turns
        await self.until(lambda: len(self.turns) >= end)

    async def until_both_have_answered(self) -> None:
        """From then on the client takes no older weights from a server that comes back."""
        await self.until(lambda: len({generation.server for _, generation in self.turns}) == 2)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(200):
            while not condition():
                await asyncio.sleep(0.01)
                self.raise_error()

    def raise_error(self) -> None:
        for lane in self.lanes:
            if lane.done():
                lane.result()


@asynccontextmanager
async def traffic(served: Served, lanes: int = 6, **changes: Any) -> AsyncIterator[Traffic]:
    """`changes` to the client's spec."""
    client = TokenClient(replace(served.engine.client_spec(), **changes))
    running = Traffic(client, served, [], [])
    running.lanes = [asyncio.create_task(running.lane(number)) for number in range(lanes)]
    try:
        yield running
        running.stopping = True
        async with asyncio.timeout(60):
            await asyncio.gather(*running.lanes)
    finally:
        for lane in running.lanes:
            lane.cancel()
        await asyncio.gather(*running.lanes, return_exceptions=True)
        await client.close()


async def publish(served: Served, in_flight: InFlight = "keep") -> None:
    weights = served.change_weights()
    await served.engine.publish(weights, in_flight=in_flight)
    os.unlink(weights.path)


def assert_newest_part_is_of_the_newest_weights(served: Served, prompt: list[int], generation: Generation) -> None:
    """What was sampled with the weights that the model has here now, after everything before it was read by them."""
    newest = generation.versions == served.version
    expected = served.logprobs(prompt + generation.token_ids.tolist())[len(prompt) - 1 :]
    assert np.abs(generation.logprobs - expected)[newest].max() < TOLERANCE


@pytest.mark.parametrize("in_flight", ["keep", "abort_resume"])
def test_generation_never_stops_everywhere_and_tokens_carry_their_version(two: Served, in_flight: InFlight) -> None:
    """While one server loads weights, very slowly here, turns end at the other one."""

    async def play() -> list[tuple[list[int], Generation]]:
        async with traffic(two) as running:
            await running.for_a_while(2)
            await publish(two, in_flight)
            while not any(len(set(g.versions.tolist())) == 2 for _, g in running.turns):
                await publish(two, in_flight)
                await running.for_a_while(8)
            metrics = running.client.metrics()
            assert (metrics["aborted"] > 0) == (in_flight == "abort_resume")
            assert metrics["removed"] == metrics["bad_answers"] == 0
        return running.turns

    turns = two.run(play())
    for _, generation in turns:
        assert (np.diff(generation.versions) >= 0).all()
    mixed = [turn for turn in turns if len(set(turn[1].versions.tolist())) > 1]
    assert mixed
    if in_flight == "abort_resume":
        newest = [turn for turn in mixed if turn[1].versions[-1] == two.version]
        for prompt, generation in newest:
            assert_newest_part_is_of_the_newest_weights(two, prompt, generation)


def test_while_one_server_is_paused_the_other_generates(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment of an update at least one server generates: each pause is held until turns have ended."""
    ended_during: list[int] = []

    async def play() -> None:
        async with traffic(two) as running:
            await running.for_a_while(2)
            server_class = type(two.engine._servers[0])  # type: ignore[attr-defined]
            post = server_class.post

            async def slow_post(self: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
                if path == "/update_weights":
                    before = len(running.turns)
                    await running.for_a_while(3)
                    ended_during.append(len(running.turns) - before)
                return await post(self, path, *arguments, **keywords)

            monkeypatch.setattr(server_class, "post", slow_post)
            await publish(two)

    two.run(play())
    assert len(ended_during) == 2
    assert min(ended_during) >= 3


def server_process(engine: ServerEngine, index: int) -> int:
    """The process below the guard of a server."""
    guard = engine.guards()[index]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == guard:
                return int(stat.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError("the server has no process")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_turns_of_a_server_that_is_gone_go_on_at_the_other_one(
    two: Served, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn is lost, what was sampled before is kept, and the server comes back with the newest weights: also with
    those that are published in the moment of its death."""
    engine = two.engine
    assert isinstance(engine, ServerEngine)
    changes = {}
    if blow is signal.SIGSTOP:
        monkeypatch.setattr(engine, "_hung_after_s", HUNG_AFTER_S)
        changes = {"health_timeout_s": HUNG_AFTER_S / 2}

    async def play() -> dict[str, float]:
        await publish(two)
        version_before = two.version
        async with traffic(two, **changes) as running:
            await running.until_both_have_answered()
            await running.until(lambda: running.client.metrics()["outstanding_tokens_1"] > 0)
            os.kill(server_process(engine, 1), blow)
            if blow is signal.SIGKILL:
                await publish(two)
            await running.until(lambda: running.client.counts.returned > 0)
            await running.for_a_while(6)
            metrics = running.client.metrics()
        assert running.turns[-1][1].versions[-1] == two.version
        for prompt, generation in running.turns:
            assert set(generation.versions.tolist()) <= {version_before, two.version}
            if (generation.versions == two.version).all():
                assert_newest_part_is_of_the_newest_weights(two, prompt, generation)
        return metrics

    deaths = engine.deaths
    metrics = two.run(play())
    assert engine.deaths > deaths
    assert metrics["asked_again"] > 0


def test_a_server_that_dies_with_its_guard_stopped_takes_the_next_weights_all_the_same(two: Served) -> None:
    engine = two.engine
    assert isinstance(engine, ServerEngine)
    deaths, guard, process = engine.deaths, engine.guards()[1], server_process(engine, 1)
    os.kill(guard, signal.SIGSTOP)
    os.kill(process, signal.SIGKILL)

    async def publish_and_wait() -> None:
        await publish(two)
        while engine.deaths == deaths or engine._down:  # noqa: ASYNC110 - its supervision brings it back
            await asyncio.sleep(0.1)

    two.run(publish_and_wait())
    assert len(engine.guards()) == 2, "both run"
    probe = two.encode("12 + 34 = 46")
    for score in two.run(engine.score(probe)):
        assert np.abs(score - two.logprobs(probe)).max() < TOLERANCE


@pytest.mark.nightly
@pytest.mark.vllm
def test_two_vllm_servers_lose_no_turn_over_updates_and_a_kill(tmp_path: Path) -> None:
    """Streamed turns, an aborting update and a keeping one, and SIGKILL to a server in the middle."""
    for served in start("vllm", tmp_path):
        engine = served.engine
        assert isinstance(engine, ServerEngine)

        async def play(served: Served = served, engine: ServerEngine = engine) -> dict[str, float]:
            assert all(tokens > 1000 for tokens in engine.client_spec().capacity_tokens)
            async with traffic(served) as running:
                await running.for_a_while(6)
                await publish(served, "abort_resume")
                await running.for_a_while(6)
                await publish(served, "keep")
                await running.for_a_while(6)
                await running.until_both_have_answered()
                await running.until(lambda: running.client.metrics()["outstanding_tokens_1"] > 0)
                os.kill(server_process(engine, 1), signal.SIGKILL)
                await running.for_a_while(12)
            for prompt, generation in running.turns:
                assert (np.diff(generation.versions) >= 0).all()
                if (generation.versions == served.version).all():
                    assert_newest_part_is_of_the_newest_weights(served, prompt, generation)
            return running.client.metrics()

        metrics = served.run(play())
        assert metrics["aborted"] > 0
        assert metrics["removed"] >= 1
        assert metrics["bad_answers"] == 0
