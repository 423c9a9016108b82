"""Configures the process of a learner rank: Ray actor class and environment variables."""

from __future__ import annotations

from typing import Any

import ray

from roll_flash.engines.inference import WeightTransfer
from roll_flash.learner.weights.channel import TRANSFER


def rank_actor(rank: type, transfer: WeightTransfer) -> Any:
    """Return the Ray actor class of `rank`; with `nccl` it sends weights in a separate thread."""
    if transfer != "nccl":
        return ray.remote(rank)
    return ray.remote(concurrency_groups={TRANSFER: 1})(rank)  # type: ignore[call-overload]


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


def cluster_has_gpus() -> bool:
    """Return true if the Ray cluster has a GPU. Ray must be initialised."""
    return bool(ray.cluster_resources().get("GPU", 0) >= 1)
