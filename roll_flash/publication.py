"""Weights on their way from the learner to the servers (delayed parameter update, AsyncFlow arXiv 2507.01663).

After a step the new weights are copied aside, and the servers take them in the background while the learner goes on
with the next step. A parity probe after each publication compares what servers and learner say about a fixed text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roll_flash.background import start_background
from roll_flash.config import WeightsConfig
from roll_flash.errors import ParityError, RunError
from roll_flash.inference.engine import InferenceEngine, StagedWeights
from roll_flash.inference.tokenizer import load_tokenizer
from roll_flash.learner.engine import LearnerEngine

FLOAT32_THRESHOLD = 1e-3
BFLOAT16_THRESHOLD = 0.25


@dataclass(frozen=True, slots=True)
class Publication:
    """How one set of weights reached all servers."""

    version: int
    parity: float
    """Largest absolute difference of log-probabilities between any server and the learner on the probe text."""
    paused_s: float
    """Time in which the slowest server generated nothing because of the update."""
    total_s: float
    num_bytes: int
    """What was published: all tensors of the model, or what is trained of them."""
    share: float = 1.0
    """`num_bytes` as a share of the whole model's."""

    def metrics(self) -> dict[str, float]:
        return {
            "weights/parity": self.parity,
            "weights/paused_s": self.paused_s,
            "weights/total_s": self.total_s,
            "weights/mib": self.num_bytes / 2**20,
            "weights/published_share": self.share,
        }


class Publisher:
    """Publishes one version at a time; `on_published` gets each version that all servers have. A publication that
    fails ends the run."""

    def __init__(
        self,
        learner: LearnerEngine,
        engine: InferenceEngine,
        config: WeightsConfig,
        *,
        probe: list[int],
        threshold: float,
        on_published: Callable[[int], None],
    ) -> None:
        self._learner = learner
        self._engine = engine
        self._timeout_s = config.publish_timeout_s
        self._in_flight = config.in_flight
        self._probe = probe
        self._threshold = threshold
        self._on_published = on_published
        self._task: asyncio.Task[Publication] | None = None

    async def begin(self) -> None:
        """Copy the learner's current weights aside and start their publication; the learner may step on at once.

        Call `settled` first: one publication is under way at a time.
        """
        if self._task is not None:
            raise RunError("a publication is still under way")
        expected = await self._learner.logprobs(self._probe)
        weights = await self._learner.stage_weights()
        self._task = start_background(self._publish(weights, expected), f"the publication of step {weights.version}")

    async def settled(self) -> Publication | None:
        """Wait for the publication under way, if any. Raises ParityError, InferenceError or RunError if it failed."""
        if self._task is None:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._task
        except TimeoutError:
            raise RunError(
                f"the servers did not take the new weights within {self._timeout_s:g} s (weights.publish_timeout_s)"
            ) from None
        finally:
            self._task = None

    async def check(self) -> float:
        """The parity probe alone: before the first step, with the weights that both sides loaded themselves."""
        return self._largest_difference(await self._learner.logprobs(self._probe), await self._scores())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _publish(self, weights: StagedWeights, expected: NDArray[np.float32]) -> Publication:
        started = time.monotonic()
        try:
            updates = await self._engine.publish(weights, in_flight=self._in_flight)
            parity = self._largest_difference(expected, await self._scores())
            self._on_published(weights.version)
            total_s = time.monotonic() - started
        finally:
            # Last, because the learner is already at its next step and answers when it has a moment.
            await self._learner.release_weights(weights)
        paused_s = max(update.paused_s for update in updates)
        share = weights.num_bytes / weights.model_bytes if weights.model_bytes else 1.0
        return Publication(weights.version, parity, paused_s, total_s, weights.num_bytes, share)

    async def _scores(self) -> list[NDArray[np.float32]]:
        return await self._engine.score(self._probe)

    def _largest_difference(self, expected: NDArray[np.float32], scores: list[NDArray[np.float32]]) -> float:
        difference = max(float(np.abs(score - expected).max()) for score in scores)
        if not difference <= self._threshold:
            raise ParityError(
                f"server and learner disagree about the same weights: log-probabilities differ by {difference:.3g}, "
                f"more than {self._threshold:g} (weights.parity_threshold); training on such data would be wrong. "
                "Check that both use the same model, dtype and chat template"
            )
        return difference


def parity_threshold(config: WeightsConfig, dtype: str) -> float:
    """The configured threshold, or the default for the dtype that the servers run in."""
    if config.parity_threshold is not None:
        return config.parity_threshold
    return FLOAT32_THRESHOLD if dtype == "float32" else BFLOAT16_THRESHOLD


def probe_token_ids(model_folder: Path, text: str) -> list[int]:
    """The probe text as token ids; at least two, so that there is something to predict."""
    tokenizer = load_tokenizer(model_folder)
    token_ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if len(token_ids) < 2:
        raise RunError("weights.parity_text must be at least two tokens long")
    return token_ids
