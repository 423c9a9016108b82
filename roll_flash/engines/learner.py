"""Defines the protocol that a learner implements: training steps on a stream of micro-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.inference import StagedWeights
from roll_flash.engines.places import Places
from roll_flash.types import FinishedGroup, Trajectory

SampleName = tuple[str, int]
"""Id of an episode and number of one of its samples, from 0."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one finished step. `version` is the weight version that it produced; `metrics` maps names to values."""

    version: int
    policy_tokens: int
    skipped: bool
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: Mapping[SampleName, NDArray[np.float32]] = field(default_factory=dict)
    """With `learner.log_logprobs`: log-probabilities at the start of the step, [trained tokens], of each sample that
    was computed."""


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss of `learner/losses/policy.py`, with its parameters, in the place of the configured objective."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """What one update with AdamW takes in the place of the config's."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """Infinity: the gradient is not clipped."""


class LearnerEngine(Protocol):
    """A step calls `accumulate` (any number of times, as groups become ready) and then `finish_step`.

    Its gradient is that of the masked mean over all policy tokens of the step, independent of how they were split. A
    call raises LearnerLostError if a process of the learner dies in it.
    """

    @property
    def version(self) -> int:
        """Number of finished steps; each produced one weight version that servers can load. A step with minibatches is
        several optimizer steps, and the weights in between are never published."""
        ...

    async def check_model(self, places: Places | None = None) -> None:
        """Check that the model can be trained exactly; called before `start`, which reuses the process. Process i of
        the learner runs at the place `rank i` of `places`. Raises ModelError if the check fails, LearnerError if the
        learner fails."""
        ...

    async def start(self) -> None:
        """Start all ranks and load the model. Raises LearnerError or ModelError.

        Starts a learner that is lost or closed again, at the same places, with the model's own weights and version 0;
        `load` follows.
        """
        ...

    @property
    def lost(self) -> asyncio.Event:
        """Set when a process of the learner has died, also while it has nothing to do, and when it is closed: every
        call raises LearnerLostError then. `start` clears it."""
        ...

    def raise_if_lost(self) -> None:
        """Raise LearnerLostError, with the reason, if the learner is `lost`."""
        ...

    async def accumulate(self, groups: Sequence[FinishedGroup]) -> None:
        """Run forward and backward passes on whole groups with the current weights.

        Raises LearnerError if a policy token is older than `version - async_ratio`.
        """
        ...

    async def finish_step(self) -> StepResult:
        """Normalise and clip the gradient, then update. Raises LearnerError if nothing was accumulated."""
        ...

    async def sft_step(
        self, trajectories: Sequence[Trajectory], learning_rate: float | None = None, *, counts: bool = True
    ) -> StepResult:
        """Take one supervised step: cross-entropy on the policy tokens of demonstrations.

        It produces a new version unless `counts` is false (warm start, before any sampling).
        Raises LearnerError between `accumulate` and `finish_step`.
        """
        ...

    async def abandon_step(self) -> None:
        """Discard the gradients accumulated since the last step.

        If a cancelled `finish_step` had already begun to change the weights, they become a new version.
        """
        ...

    async def logprobs_of(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities [T - 1] of `text[1:]` under the current weights for each text of token ids,
        packed into rows as in training."""
        ...

    async def stage_weights(self) -> StagedWeights:
        """Copy the current weights to memory that the servers can read; later steps do not change the copy. The caller
        releases it."""
        ...

    async def release_weights(self, weights: StagedWeights) -> None: ...

    async def begin_save(self, folder: Path) -> asyncio.Task[None]:
        """Write a complete checkpoint of the training state (weights, optimizer, random state, version) into a new
        folder in the background; return once the state is copied and training may continue."""
        ...

    async def load(self, folder: Path) -> None:
        """Load a checkpoint. Raises CheckpointError."""
        ...

    async def begin_export(self, folder: Path) -> asyncio.Task[None]:
        """Write a model folder that `transformers` can load, tokenizer included, in the background; return once the
        weights are copied and training may continue."""
        ...

    async def close(self) -> None: ...
