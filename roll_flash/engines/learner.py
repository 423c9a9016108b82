"""The protocol behind which a learner lives: a step on a stream of micro-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.inference import StagedWeights
from roll_flash.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished step. `version` is the version that the step produced. Metrics are flat names to numbers."""

    version: int
    policy_tokens: int
    skipped: bool
    metrics: dict[str, float] = field(default_factory=dict)


class LearnerEngine(Protocol):
    """One step is `accumulate` (any number of times, as groups become ready) and then `finish_step`.

    The gradient of a step is that of the masked mean over all policy tokens given to it, however they were split.
    """

    @property
    def version(self) -> int:
        """Steps finished so far; each is a set of weights that servers can have."""
        ...

    async def check_model(self) -> None:
        """Before anything else of a run starts: is this a model that can be trained exactly? Raises ModelError if not,
        and LearnerError. What it has loaded `start` goes on with."""
        ...

    async def start(self) -> None:
        """Start all ranks, load the model. Raises LearnerError or ModelError."""
        ...

    async def accumulate(self, groups: Sequence[Group]) -> None:
        """Forward and backward on whole groups with the current weights.

        Raises LearnerError if a policy token is older than `version - async_ratio`.
        """
        ...

    async def finish_step(self) -> StepResult:
        """Normalise, clip, step. Raises LearnerError when nothing was accumulated."""
        ...

    async def sft_step(
        self, trajectories: Sequence[Trajectory], learning_rate: float | None = None, *, counts: bool = True
    ) -> StepResult:
        """One supervised step: cross-entropy on the policy tokens of demonstrations.

        A version like any other, unless it does not count (a warm start, before anything is sampled).
        Raises LearnerError between `accumulate` and `finish_step`.
        """
        ...

    async def abandon_step(self) -> None:
        """Forget what was accumulated since the last step: it will never be finished.

        Where a cancelled `finish_step` had begun to change the weights, they are a version of their own.
        """
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities [T - 1] of `token_ids[1:]` under the current weights."""
        ...

    async def logprobs_of(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """`logprobs` of each text, computed together as rows that train are."""
        ...

    async def stage_weights(self) -> StagedWeights:
        """Copy the current weights to where the servers can read them. The caller releases them."""
        ...

    async def release_weights(self, weights: StagedWeights) -> None: ...

    async def save(self, folder: Path) -> None:
        """Write a complete checkpoint of the training state (weights, optimizer, RNG, version) into a new folder."""
        ...

    async def begin_save(self, folder: Path) -> asyncio.Task[None]:
        """`save` in the background: returns when the state is copied and steps may go on."""
        ...

    async def load(self, folder: Path) -> None:
        """Read one back. Raises CheckpointError."""
        ...

    async def export_hf(self, folder: Path) -> None:
        """Write a model folder that `transformers` loads, tokenizer included."""
        ...

    async def begin_export(self, folder: Path) -> asyncio.Task[None]:
        """`export_hf` in the background: returns when the weights are copied and steps may go on."""
        ...

    async def close(self) -> None: ...
