"""Publishes weights from the learner to the servers (delayed parameter update, AsyncFlow arXiv 2507.01663).

After a step the new weights are copied; the servers load the copy in the background while the learner runs the next
step. After each publication a parity probe compares servers and learner (`parity.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.config.tree import WeightsConfig
from roll_flash.engines.inference import InferenceEngine, InFlight, StagedWeights
from roll_flash.engines.learner import LearnerEngine
from roll_flash.errors import InferenceError, LearnerLostError, RunError
from roll_flash.processes.background import gather_or_cancel, start_background
from roll_flash.watchdog.activity import doing
from roll_flash.weight_sync.parity import Parity, Probe, check, compare


@dataclass(frozen=True, slots=True)
class Publication:
    """Timing, size and parity of one weight update on all servers."""

    version: int
    parity: Parity
    paused_s: float
    """Longest time in seconds during which a server generated nothing because of the update."""
    total_s: float
    num_bytes: int
    """Size in bytes of the published tensors: all tensors of the model, or only the trained ones."""
    published_fraction: float = 1.0
    """`num_bytes` as a fraction of the size of the whole model."""
    begin_s: float = 0.0
    """Unix time."""

    def span(self) -> dict[str, float]:
        """When it began and ended, in Unix time, for the timeline."""
        return {"version": self.version, "begin_s": self.begin_s, "end_s": self.begin_s + self.total_s}

    def metrics(self) -> dict[str, float]:
        return {
            "weights/parity": self.parity.percentile,
            "weights/parity_mean": self.parity.mean,
            "weights/parity_max": self.parity.largest,
            "weights/paused_s": self.paused_s,
            "weights/total_s": self.total_s,
            "weights/mib": self.num_bytes / 2**20,
            "weights/published_share": self.published_fraction,
        }


class Publisher:
    """Publishes one version at a time; `on_published` gets each version that all servers have loaded.

    A failed publication ends the run, unless it failed because the learner is lost (LearnerLostError).
    """

    def __init__(
        self,
        learner: LearnerEngine,
        engine: InferenceEngine,
        config: WeightsConfig,
        *,
        probe: Probe,
        threshold: float,
        on_published: Callable[[int], None],
    ) -> None:
        self._learner = learner
        self._engine = engine
        self._timeout_s = config.publish_timeout_s
        self._in_flight: InFlight = config.in_flight
        self._probe = probe
        self._threshold = threshold
        self._on_published = on_published
        self._checked = False
        self._begun = 0
        self._held: StagedWeights | None = None
        """Published weights on a GPU of the learner, for servers that come back, until the next are staged."""
        self._task: asyncio.Task[Publication] | None = None
        self.newest: int | None = None
        """The newest version of which a publication was begun."""

    async def begin(self) -> None:
        """Copy the learner's current weights and start their publication; the learner may train on immediately.

        Call `wait_published` first: only one publication may run at a time.
        """
        if self._task is not None:
            raise RunError("a publication is still under way")
        # The first check uses the whole probe, later updates a few of its texts.
        probe = self._probe.after_update(self._begun) if self._checked else self._probe
        self._begun, self._checked = self._begun + 1, True
        expected = await self._learner.logprobs_of(probe.texts)
        await self._release_held()
        weights = await self._learner.stage_weights()
        self._task = start_background(
            self._publish(weights, probe, expected),
            f"the publication of step {weights.version}",
            awaited=(LearnerLostError,),
        )
        self.newest = weights.version

    async def wait_published(self) -> Publication | None:
        """Wait for the running publication, if any. Raises ParityError, InferenceError or RunError if it failed."""
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

    async def check(self) -> Parity:
        """Run the whole parity probe before the first step, with the weights that both sides loaded themselves."""
        learner, servers = self._learner.logprobs_of(self._probe.texts), self._scored_by_servers(self._probe)
        both: list[Any] = await gather_or_cancel(learner, servers)
        expected, found = both
        self._checked = True
        return self._compare(expected, found)

    async def forget(self) -> None:
        """End the running publication and forget published weights on GPUs: the learner that had them is lost."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=self._timeout_s)
            await self.close()
        if self._held is not None:
            self._held = None
            await self._engine.forget_weights_on_devices()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _publish(
        self, weights: StagedWeights, probe: Probe, expected: Sequence[NDArray[np.float32]]
    ) -> Publication:
        begin_s, started = time.time(), time.monotonic()
        try:
            then = f"the run ends once a step has waited {self._timeout_s:g} s for it (weights.publish_timeout_s)"
            with doing("the publication", "not all servers have the new weights", then=then):
                updates = await self._engine.publish(weights, in_flight=self._in_flight)
            with doing("the publication", "servers have not scored the parity probe", then=then):
                parity = self._compare(expected, await self._scored_by_servers(probe))
            self._on_published(weights.version)
            total_s = time.monotonic() - started
        except InferenceError:
            if weights.update_info is not None:  # the weights below are released in any case
                await self._learner.release_weights(weights)  # raises if the servers failed because the learner is lost
            raise
        finally:
            if weights.update_info is not None:
                self._held = weights
            else:
                # Last, because the learner is busy with its next step and may answer late.
                await self._learner.release_weights(weights)
        paused_s = max(update.paused_s for update in updates)
        published_fraction = weights.num_bytes / weights.model_bytes if weights.model_bytes else 1.0
        return Publication(weights.version, parity, paused_s, total_s, weights.num_bytes, published_fraction, begin_s)

    async def _release_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await self._engine.forget_weights_on_devices()
            await self._learner.release_weights(held)

    async def _scored_by_servers(self, probe: Probe) -> list[list[NDArray[np.float32]]]:
        return [await self._engine.score(text) for text in probe.texts]

    def _compare(
        self, expected: Sequence[NDArray[np.float32]], found: Sequence[Sequence[NDArray[np.float32]]]
    ) -> Parity:
        """Raises ParityError if a server differs from the learner."""
        parity = compare(expected, found)
        check(parity, self._threshold)
        return parity
