"""From the learner's step to the servers: what `weights.in_flight` says reaches them. Both sides are stand-ins."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from roll_flash.config.tree import WeightsConfig
from roll_flash.engines.inference import InferenceEngine, InFlight, ServerUpdate, StagedWeights
from roll_flash.engines.learner import LearnerEngine
from roll_flash.weight_sync.parity import Probe
from roll_flash.weight_sync.publication import Publisher


class StandInLearner:
    async def logprobs_of(self, texts: list[list[int]]) -> list[NDArray[np.float32]]:
        return [np.zeros(len(text) - 1, np.float32) for text in texts]

    async def stage_weights(self) -> StagedWeights:
        return StagedWeights(1, "nowhere", 8)

    async def release_weights(self, weights: StagedWeights) -> None:
        return


class StandInEngine:
    def __init__(self) -> None:
        self.in_flight: list[InFlight] = []

    async def publish(self, weights: StagedWeights, *, in_flight: InFlight = "keep") -> list[ServerUpdate]:
        self.in_flight.append(in_flight)
        return [ServerUpdate("a", weights.version, 0.25, 0.5)]

    async def score(self, token_ids: list[int]) -> list[NDArray[np.float32]]:
        return [np.zeros(len(token_ids) - 1, np.float32)]


@pytest.mark.parametrize("in_flight", ["keep", "abort_resume"])
def test_requests_in_flight_are_treated_as_the_config_says(in_flight: Any) -> None:
    engine = StandInEngine()
    published: list[int] = []

    async def publish() -> float:
        publisher = Publisher(
            cast(LearnerEngine, StandInLearner()),
            cast(InferenceEngine, engine),
            WeightsConfig(in_flight=in_flight),
            probe=Probe([[1, 2, 3]]),
            threshold=1e-3,
            on_published=published.append,
        )
        await publisher.begin()
        publication = await publisher.wait_published()
        assert publication is not None
        return publication.paused_s

    assert asyncio.run(publish()) == 0.25
    assert engine.in_flight == [in_flight]
    assert published == [1]
