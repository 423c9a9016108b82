"""The process that a rank of the learner lives in."""

from __future__ import annotations

from typing import Any

import ray

from roll_flash.engines.inference import WeightTransfer
from roll_flash.learner.weights.channel import TRANSFER


def rank_actor(rank: type, transfer: WeightTransfer) -> Any:
    """The Ray actor class of `rank`; one that sends weights itself does so in a thread of its own."""
    if transfer != "nccl":
        return ray.remote(rank)
    return ray.remote(concurrency_groups={TRANSFER: 1})(rank)  # type: ignore[call-overload]


def rank_environment(threads: int) -> dict[str, str]:
    """Environment variables of a rank with so many CPU threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # Activations and gradients come and go in large pieces every pass. Memory that stays with the process is not
        # faulted in page by page again, which costs several per cent of a step on CPU.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }


def cluster_has_gpus() -> bool:
    """Whether Ray, which must be initialised, knows of a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0) >= 1)
