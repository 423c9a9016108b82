"""The model servers that clients sample from.

Invariant: weights that a client calls fixed are never mixed with later ones. Their samples end before the servers get
others, and none begins after that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roll_flash.config.tree import Config
from roll_flash.engines.inference import Generation, InferenceClient, InferenceEngine
from roll_flash.gateway.apis.api_error import bad_request
from roll_flash.processes.background import gather_or_cancel
from roll_flash.tinker.messages import sample_output
from roll_flash.types import SamplingParams

BASE = "base"
"""Weights of the model before any training."""
CHANGING = "weights that they are just getting"


@dataclass(slots=True)
class Servers:
    """The model servers, which have one set of weights at a time."""

    config: Config
    folder: Path
    """Of the model."""
    engine: InferenceEngine
    client: InferenceClient
    vocabulary: int
    end_ids: frozenset[int]
    """Tokens at which the servers end a sequence."""
    weights: str = BASE
    """Which weights they have, or `CHANGING`."""
    fixed_samples: int = 0
    """Requests under way that must end with the weights with which they began."""

    @classmethod
    def of(
        cls, config: Config, folder: Path, engine: InferenceEngine, client: InferenceClient, tokenizer: Any
    ) -> Servers:
        own = folder / "generation_config.json"
        ends = json.loads(own.read_text()).get("eos_token_id") if own.is_file() else None
        ids = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
        vocabulary = engine.client_spec().vocabulary or len(tokenizer)
        return cls(config, folder, engine, client, vocabulary, frozenset(ids))

    async def sample(
        self, name: str, prompt: Sequence[int], count: int, sampling: SamplingParams, *, scores: int
    ) -> bytes:
        """Return `count` sequences, with the log-probabilities of the last `scores` tokens of the prompt."""
        timeout_s = self.config.rollout.generate_timeout_s

        async def one(index: int) -> Generation:
            own = sampling.with_own_seed(index) if index else sampling
            return await self.client.generate(prompt, own, request_id=f"{name}-{index}", timeout_s=timeout_s)

        generations = await gather_or_cancel(*(one(index) for index in range(count)))
        if not scores:
            return sample_output(generations, None)
        async with asyncio.timeout(timeout_s):
            found = (await self.engine.score(prompt))[0] if len(prompt) > 1 else np.empty(0, np.float32)
        known = np.concatenate([np.full(1, np.nan, np.float32), found])
        known[:-scores] = np.nan
        return sample_output(generations, known)

    @asynccontextmanager
    async def fixed(self, weights: str) -> AsyncIterator[None]:
        """Hold the servers' weights. Raises ApiError if they have others than `weights`."""
        if self.weights != weights:
            raise bad_request(
                f"these weights ({weights}) were replaced on the servers, which have one set at a time, by "
                f"{self.weights}; sample with the client of the newest save_weights_and_get_sampling_client, or ask it "
                'for kind="inflight", which follows the training'
            )
        self.fixed_samples += 1
        try:
            yield
        finally:
            self.fixed_samples -= 1

    async def update(self, weights: str, publish: Callable[[], Awaitable[None]]) -> None:
        """Let samples of fixed weights end, each of which has a deadline, then `publish`. Weights that the servers have
        already may be sampled from meanwhile."""
        if self.weights != weights:
            self.weights = CHANGING  # not the new name, which may be BASE again
            while self.fixed_samples:  # noqa: ASYNC110 - counted by many tasks
                await asyncio.sleep(0.01)
        await publish()
        self.weights = weights
