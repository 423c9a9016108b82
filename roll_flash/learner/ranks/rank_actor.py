"""A rank of the learner as a Ray actor. The driver, which creates it, needs no torch, whose import takes seconds."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from roll_flash.engines.inference import WeightTransfer
from roll_flash.learner.model.exact_settings import ExactSettings
from roll_flash.learner.weights.channel import TRANSFER, TRANSFER_THREADS
from roll_flash.models.prepare import COMPILED_VARIABLE, compiled_folder

Forms = Mapping[Path, ExactSettings]
"""Settings for exact computation, per model folder."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """Result of one optimizer update. `grad_norm` is the norm of the normalised gradient before clipping,
    `value_grad_norm` that of a critic's weights."""

    grad_norm: float
    skipped: bool
    seconds: float
    value_grad_norm: float | None = None


class _Warnings(logging.Handler):
    """Keeps what this process warns of until the driver asks for it: nobody reads the log of an actor."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


class RankActor:
    """Calls a `LearnerRank`, made with the same arguments, in the process of the actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._warnings = _Warnings()
        logging.getLogger("roll_flash").addHandler(self._warnings)
        os.environ.setdefault(COMPILED_VARIABLE, str(compiled_folder()))
        from roll_flash.learner.ranks.rank import LearnerRank

        self._rank = LearnerRank(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rank, method)(*args, **kwargs)

    def take_warnings(self) -> list[str]:
        """Return what the rank has warned of since the last call."""
        return self._warnings.take()


def rank_actor(kind: type, transfer: WeightTransfer) -> Any:
    """Return the Ray actor class of `kind`; with `nccl` it sends weights in separate threads."""
    if transfer != "nccl":
        return ray.remote(kind)
    return ray.remote(concurrency_groups={TRANSFER: TRANSFER_THREADS})(kind)  # type: ignore[call-overload]


def rank_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a rank with `threads` CPU threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Every pass allocates and frees large activations and gradients. Keeping this memory in the process avoids
        # page faults, which cost several per cent of a step on CPU.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }
