"""A server that dies while it takes new weights: the others have them at once, and it gets them when it is back.

Servers are stand-ins, and so is the update of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from roll_flash.config.tree import InferenceConfig, WeightsConfig
from roll_flash.engines.inference import InferenceEngine, ServerUpdate, StagedWeights
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import InferenceError
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers import engine as server_engine
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.processes.background import first_failure
from roll_flash.weight_sync.parity import Probe
from roll_flash.weight_sync.publication import Publisher

from .test_supervision import StandIn

IN_MEMORY = StagedWeights(1, "/weights", 8)
ON_GPU = StagedWeights(1, "nccl:1", 8, update_info={"names": []})


class Room:
    """An engine with stand-in servers."""

    def __init__(self, servers: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.servers = [StandIn() for _ in range(servers)]
        self.taken: list[tuple[int, int]] = []
        """Number of the server and version, in the order of the updates."""
        self.dies_at: dict[int, int] = {}
        """Server -> version at which it dies once."""
        self.refuses: dict[int, list[str]] = {}
        """Server -> what it answers to its next updates, without dying."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        monkeypatch.setattr(server_engine, "SUPERVISE_EVERY_S", 0.01)
        monkeypatch.setattr(server_engine, "DEATH_NOTICE_S", 0.05)
        monkeypatch.setattr(server_engine, "ServerProcess", lambda index, *_: self._server(index))
        monkeypatch.setattr(server_engine, "update_server", self._update)
        monkeypatch.setattr(server_engine, "_score", self._score)
        config = InferenceConfig(engine="transformers", servers=servers, health_timeout_s=0.05)
        engine = open_engine(config, model_folder=folder, max_model_len=8, logs=folder)
        assert isinstance(engine, ServerEngine)
        self.engine = engine

        async def keep(weights: StagedWeights) -> None:
            engine._mirrors._newest = weights

        monkeypatch.setattr(engine._mirrors, "keep", keep)

    def _server(self, index: int) -> StandIn:
        server = self.servers[index]
        start = server.start

        async def start_when_allowed() -> None:
            if server.starts > 1 or not server.is_running:
                await self.may_start.wait()
            await start()
            server.version = 0

        server.start = start_when_allowed  # type: ignore[method-assign]
        return server

    async def _update(self, server: Any, weights: StagedWeights, in_flight: str) -> ServerUpdate:
        number = self.servers.index(server)
        await asyncio.sleep(0)
        if self.dies_at.get(number) == weights.version:
            del self.dies_at[number]
            server.is_running = False
            raise InferenceError("/update_weights failed: ReadError")
        if answers := self.refuses.get(number):
            raise InferenceError(f"/update_weights answered HTTP 500: {answers.pop(0)}")
        self.taken.append((number, weights.version))
        server.version = weights.version
        return ServerUpdate(server.endpoint, weights.version, 0.01, 0.01)

    async def _score(self, server: Any, token_ids: Any) -> NDArray[np.float32]:
        return np.full(len(token_ids) - 1, server.version, np.float32)

    async def until(self, happens: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not happens():  # noqa: ASYNC110 - a stand-in
                await asyncio.sleep(0.01)


def play(room_of: Callable[[], Room], act: Callable[[Room], Awaitable[None]]) -> None:
    async def run() -> None:
        room = room_of()
        with first_failure() as failure:
            await room.engine.start()
            try:
                async with asyncio.timeout(20):
                    await act(room)
            finally:
                await room.engine.close()
            failure.raise_error()

    asyncio.run(run())


@pytest.mark.parametrize("weights", [IN_MEMORY, ON_GPU], ids=["shm", "nccl"])
def test_the_others_have_the_weights_before_a_dead_one_is_back(
    weights: StagedWeights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(room: Room) -> None:
        room.dies_at[1] = 1
        room.may_start.clear()
        updates = await room.engine.publish(weights)
        assert len(updates) == 2
        assert room.taken == [(0, 1), (2, 1)]
        scores = await room.engine.score([5, 6, 7])
        assert [score.tolist() for score in scores] == [[1, 1], [1, 1]], "those of the servers that are there"

        room.may_start.set()
        await room.until(lambda: room.taken == [(0, 1), (2, 1), (1, 1)])
        await room.until(lambda: not room.engine._down)
        assert len(await room.engine.score([5, 6, 7])) == 3
        assert len(await room.engine.publish(replace(weights, version=2))) == 3
        assert room.engine.deaths == 1

    play(lambda: Room(3, monkeypatch, tmp_path), act)
    said = [message for message in caplog.messages if "starting it again" in message or "is back after" in message]
    assert ["is back" in message for message in said] == [False, True]


def test_a_server_that_comes_back_during_a_publication_ends_with_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may begin with older ones, which were the newest when it started."""

    async def act(room: Room) -> None:
        await room.engine.publish(ON_GPU)
        for version in range(2, 12):
            room.servers[1].is_running = False
            await asyncio.sleep(0.002 * version)
            await room.engine.publish(replace(ON_GPU, version=version))
            await room.until(lambda: not room.engine._down and room.servers[1].is_running)
            assert {server.version for server in room.servers} == {version}
            room.engine._restarts[room.servers[1]].clear()  # type: ignore[index]

    play(lambda: Room(2, monkeypatch, tmp_path), act)


def test_the_only_server_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def act(room: Room) -> None:
        room.dies_at[0] = 1
        assert len(await room.engine.publish(ON_GPU)) == 1
        assert room.taken == [(0, 1)]

    play(lambda: Room(1, monkeypatch, tmp_path), act)


def test_a_server_that_cannot_load_is_started_again_while_the_others_have_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def act(room: Room) -> None:
        room.refuses[0] = ["MemoryError"]
        room.may_start.clear()
        assert len(await room.engine.publish(IN_MEMORY)) == 1
        assert room.taken == [(1, 1)]
        room.may_start.set()
        await room.until(lambda: room.taken == [(1, 1), (0, 1)])
        assert room.engine.deaths == 1

    play(lambda: Room(2, monkeypatch, tmp_path), act)


def test_the_only_server_that_cannot_load_is_started_again_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def act(room: Room) -> None:
        room.refuses[0] = ["MemoryError"]
        assert len(await room.engine.publish(IN_MEMORY)) == 1
        assert (room.taken, room.engine.deaths) == ([(0, 1)], 1)
        room.refuses[0] = ["MemoryError"] * 2
        with pytest.raises(InferenceError, match="MemoryError"):
            await room.engine.publish(replace(IN_MEMORY, version=2))

    play(lambda: Room(1, monkeypatch, tmp_path), act)


def test_weights_that_fit_no_server_start_none_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def act(room: Room) -> None:
        room.refuses[0] = ["the weights do not fit the model: 1 missing"]
        with pytest.raises(InferenceError, match="do not fit"):
            await room.engine.publish(IN_MEMORY)
        assert room.engine.deaths == 0

    play(lambda: Room(2, monkeypatch, tmp_path), act)


def test_if_all_die_the_publication_waits_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def act(room: Room) -> None:
        room.dies_at = {0: 1, 1: 1}
        updates = await room.engine.publish(IN_MEMORY)
        assert updates
        await room.until(lambda: {server.version for server in room.servers} == {1})

    play(lambda: Room(2, monkeypatch, tmp_path), act)


def test_weights_on_a_gpu_are_given_to_nobody_once_they_are_to_be_overwritten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def act(room: Room) -> None:
        await room.engine.publish(ON_GPU)
        await room.engine.forget_weights_on_devices()
        room.servers[0].is_running = False
        await room.until(lambda: room.servers[0].starts == 3)
        await room.until(lambda: not room.engine._down)
        assert room.taken == [(0, 1), (1, 1)]

    play(lambda: Room(2, monkeypatch, tmp_path), act)


@pytest.mark.parametrize("weights", [IN_MEMORY, ON_GPU], ids=["shm", "nccl"])
def test_weights_on_a_gpu_are_held_until_the_next_ones_are_staged(weights: StagedWeights) -> None:
    """Weights in memory are released at once: the servers' nodes have copies."""
    noted: list[str] = []

    class Learner:
        async def logprobs_of(self, texts: list[list[int]]) -> list[NDArray[np.float32]]:
            return [np.zeros(len(text) - 1, np.float32) for text in texts]

        async def stage_weights(self) -> StagedWeights:
            noted.append("stage")
            return weights

        async def release_weights(self, weights: StagedWeights) -> None:
            noted.append("release")

    class Engine:
        async def publish(self, weights: StagedWeights, **_: Any) -> list[ServerUpdate]:
            noted.append("publish")
            return [ServerUpdate("a", weights.version, 0.25, 0.5)]

        async def score(self, token_ids: list[int]) -> list[NDArray[np.float32]]:
            return [np.zeros(len(token_ids) - 1, np.float32)]

        async def forget_weights_on_devices(self) -> None:
            noted.append("forget")

    async def publish_twice() -> None:
        publisher = Publisher(
            cast(LearnerEngine, Learner()),
            cast(InferenceEngine, Engine()),
            WeightsConfig(),
            probe=Probe([[1, 2, 3]]),
            threshold=1e-3,
            on_published=lambda version: None,
        )
        for _ in range(2):
            await publisher.begin()
            await publisher.wait_published()

    asyncio.run(publish_twice())
    at_once, later = ["release"], ["forget", "release"]
    if weights is ON_GPU:
        assert noted == ["stage", "publish", *later, "stage", "publish"]
    else:
        assert noted == ["stage", "publish", *at_once, "stage", "publish", *at_once]
