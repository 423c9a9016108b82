"""What a model needs on this machine's CPU, said before it is loaded: memory by arithmetic, and time by an estimate."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from roll_flash.cluster.parts import Kind
from roll_flash.cluster.plan import Plan
from roll_flash.config.tree import Config
from roll_flash.errors import ModelError, PlacementError
from roll_flash.models.shape import ModelShape, read_shape
from roll_flash.monitor.limits import memory_bytes
from roll_flash.planner.machines.memory import (
    FULL,
    GIB,
    GRADIENT,
    HALF,
    MOMENTS,
    MemoryUse,
    master_bytes,
    trained_models,
    trained_parameters,
)

MATMUL_S, MATMUL_SIZE = 0.2, 1024


def check_cpu(config: Config, plan: Plan) -> list[str]:
    """Return what ranks and servers of this machine need, in lines; none on a cluster or with GPUs.

    Raises PlacementError if weights, gradients, moments and key-value caches alone do not fit. Activations, libraries
    and copies of the weights that are published come on top of them.
    """
    counts = Counter(row.part.kind for row in plan.rows)
    if plan.uses_gpus or config.ray.address is not None or not counts["rank"] + counts["server"]:
        return []
    try:
        shape = read_shape(config.model.path, config.model.revision)
        use, memory = _least(config, shape, counts), memory_bytes()
    except ModelError as error:
        return [f"not checked: {error}"]
    text = f"{shape.parameters / 1e6:,.1f} M parameters need at least {use.text()} of {memory / GIB:.1f} GiB"
    if use.total > memory:
        raise PlacementError(
            f"{config.model.path}: {text} on this machine; a smaller model, adapters (learner.lora.rank), fewer "
            "inference.servers or a smaller inference.kv_cache_gib need less"
        )
    return [text, *([_speed(shape)] if counts["rank"] else [])]


def _least(config: Config, shape: ModelShape, counts: Counter[Kind]) -> MemoryUse:
    """Bytes of what is there for the whole run. CPUs hold the learner's weights in float32. Raises ModelError."""
    trained = trained_parameters(config.learner, shape) if counts["rank"] and config.learner.engine == "fsdp" else 0
    frozen = shape.parameters - trained if trained and config.learner.lora.rank else 0
    models = trained_models(config.learner)
    width = HALF if config.inference.dtype == "bfloat16" else FULL
    cache = int(config.inference.kv_cache_gib * GIB) if config.inference.engine == "vllm" else 0
    parts = {
        "weights": models * (master_bytes(config.learner) * trained + FULL * frozen),
        "gradients": models * GRADIENT * trained,
        "moments": models * MOMENTS * trained,
        "servers": counts["server"] * width * shape.parameters,
        "key-value caches": counts["server"] * cache,
    }
    if counts["rank"] and config.distill is not None and (teacher := config.distill.teacher).model is not None:
        weights = width * read_shape(teacher.model).parameters
        parts["servers of the teacher"] = teacher.servers * (weights + cache)
    return MemoryUse({name: size for name, size in parts.items() if size})


def _speed(shape: ModelShape) -> str:
    """6 operations per token and parameter (forward and backward), at the speed of large matrix products."""
    speed = _operations_per_s()
    return (
        f"training takes {6 * shape.computed / speed * 1000:.3g} s or more per 1,000 tokens, an estimate: 6 "
        f"operations per parameter and token, {speed / 1e9:.0f} GFLOP/s measured"
    )


def _operations_per_s() -> float:
    """Measured with numpy, since importing torch takes seconds."""
    left = right = np.ones((MATMUL_SIZE, MATMUL_SIZE), np.float32)
    np.matmul(left, right)
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < MATMUL_S:
        np.matmul(left, right)
        done += 1
    return 2 * MATMUL_SIZE**3 * done / (time.perf_counter() - begun)
