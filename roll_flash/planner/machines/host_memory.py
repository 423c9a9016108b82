"""The memory that a run needs on the host of each node, by arithmetic.

Not counted: the page cache, sandboxes, and Ray's object store with the trajectories, which Ray sets apart from the
memory that it reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from roll_flash.cluster.parts import Kind, Part
from roll_flash.config.tree import Config
from roll_flash.models.shape import ModelShape
from roll_flash.planner.machines.memory import (
    FIRST_RANK,
    FULL,
    GIB,
    HALF,
    MASTER,
    MOMENTS,
    MemoryUse,
    master_bytes,
    publishes_adapters,
    row_tokens,
    trained_models,
    trained_parameters,
)

PROCESS: dict[Kind, int] = {"rank": 3 * GIB, "server": 5 * GIB, "worker": GIB}
"""Libraries and buffers of a part's processes. Not measured yet."""


def host_memory(config: Config, shape: ModelShape, parts: Sequence[Part], *, trains: bool) -> MemoryUse:
    """Return what a node needs for these parts: when the model is loaded or when a checkpoint is written, whichever is
    more. Servers of a run that does not train (`trains`) get no new weights."""
    counts = Counter(part.kind for part in parts)
    processes = sum(PROCESS[kind] * count for kind, count in counts.items())
    is_first = any(part.name == FIRST_RANK for part in parts)
    start = {"processes": processes, "float32 model": FULL * shape.parameters * is_first}
    run = {
        "processes": processes,
        "checkpoint": _checkpoint_bytes(config, shape, counts["rank"], is_first=is_first),
        "offloaded activations": _offloaded_bytes(config, shape, counts["rank"]),
    }
    if trains and config.inference.weight_transfer == "shm":
        run["published weights"] = _published_bytes(config, shape, counts["server"], is_first=is_first)
        on_gpus = sum(part.kind == "server" and part.gpus > 0 for part in parts)
        # Page-locked memory in which servers prepare weights for their GPUs, all but experts.
        run["second weights of servers"] = HALF * (shape.parameters - shape.experts) * on_gpus
    most = max(start, run, key=lambda use: sum(use.values()))
    return MemoryUse({name: size for name, size in most.items() if size})


def _checkpoint_bytes(config: Config, shape: ModelShape, ranks: int, *, is_first: bool) -> int:
    """Copies that are written in the background: each rank's weights and moments; on the first one the whole model."""
    learner, trained = config.learner, trained_parameters(config.learner, shape)
    frozen = shape.parameters if learner.lora.rank else 0
    states = (master_bytes(learner) + MOMENTS) * trained + HALF * frozen
    states = states * trained_models(learner) * ranks // learner.ranks
    return states + (HALF if frozen else MASTER) * shape.parameters * is_first


def _published_bytes(config: Config, shape: ModelShape, servers: int, *, is_first: bool) -> int:
    """The learner's copy, and the one that servers of a node load, or get when they come back."""
    adapters = FULL * trained_parameters(config.learner, shape)
    size = adapters if publishes_adapters(config) else HALF * shape.parameters
    return size * (is_first + (is_first or servers > 0))


def _offloaded_bytes(config: Config, shape: ModelShape, ranks: int) -> int:
    offloads = config.learner.activation_offload
    return HALF * shape.hidden * shape.layers * row_tokens(config) * ranks if offloads else 0
