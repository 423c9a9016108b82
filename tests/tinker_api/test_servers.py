"""Weights that a client calls fixed are never mixed with later ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_flash.config.tree import load_config
from roll_flash.engines.inference import Generation
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.tinker.servers import BASE, Servers
from roll_flash.types import SamplingParams


def servers(client: Any = None) -> Servers:
    config = load_config({"name": "s", "model": {"path": "tiny"}, "envs": [{"id": "agents"}]})

    async def score(tokens: list[int]) -> list[Any]:
        return [np.full(len(tokens) - 1, -2, np.float32)]

    engine: Any = SimpleNamespace(score=score)
    return Servers(config, Path("tiny"), engine, client, 128, frozenset())


def test_new_weights_wait_for_samples_of_the_old_ones_and_refuse_further_ones() -> None:
    async def scenario() -> None:
        there, began, go = servers(), asyncio.Event(), asyncio.Event()
        told: list[str] = []

        async def sample() -> None:
            async with there.fixed(BASE):
                began.set()
                await go.wait()
                told.append("sampled")

        async def publish() -> None:
            told.append("published")

        sampling = asyncio.create_task(sample())
        await began.wait()
        publishing = asyncio.create_task(there.update("new", publish))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match=r"these weights \(base\) were replaced"):
            async with there.fixed(BASE):
                pass
        assert told == []
        go.set()
        await asyncio.wait_for(asyncio.gather(sampling, publishing), 20)
        assert told == ["sampled", "published"]
        async with there.fixed("new"):
            pass

    asyncio.run(scenario())


def test_the_base_model_is_not_sampled_from_before_the_servers_have_it_again() -> None:
    async def scenario() -> None:
        there, go = servers(), asyncio.Event()
        await there.update("trained", nothing)
        publishing = asyncio.create_task(there.update(BASE, go.wait))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match=r"these weights \(base\) were replaced"):
            async with there.fixed(BASE):
                pass
        go.set()
        await asyncio.wait_for(publishing, 20)
        async with there.fixed(BASE):
            await asyncio.wait_for(there.update(BASE, nothing), 20)  # the same again disturbs nobody

    async def fails() -> None:
        raise RuntimeError

    async def failing() -> None:
        there = servers()
        with pytest.raises(RuntimeError):
            await there.update("trained", fails)
        for weights in ("trained", BASE):
            with pytest.raises(ApiError):
                async with there.fixed(weights):
                    pass

    asyncio.run(scenario())
    asyncio.run(failing())


async def nothing() -> None:
    pass


def test_samples_of_one_request_have_seeds_of_their_own_and_only_the_scores_that_were_asked_for() -> None:
    asked: list[tuple[str, int | None]] = []

    async def generate(prompt: list[int], sampling: SamplingParams, *, request_id: str, timeout_s: float) -> Generation:
        asked.append((request_id, sampling.seed))
        one = np.ones(1, np.int32)
        return Generation(one, -one.astype(np.float32), one, "stop", "server", 0.1)

    there = servers(SimpleNamespace(generate=generate))
    content = asyncio.run(there.sample("name", [5, 6, 7], 2, SamplingParams(seed=4), scores=1))
    asyncio.run(there.sample("next", [5, 6, 7], 2, SamplingParams(seed=5), scores=0))
    assert [name for name, _ in sorted(asked)] == ["name-0", "name-1", "next-0", "next-1"]
    assert asked[0] == ("name-0", 4)
    assert len({seed for _, seed in asked}) == 4, "a request with the next seed draws other samples"
    scores = np.array([np.nan, np.nan, -2], np.float32)
    assert scores.tobytes() in content
