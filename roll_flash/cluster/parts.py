"""The parts of a run that take a place on a node: servers, learner ranks, rollout workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from roll_flash.cluster.nodes import Node
from roll_flash.config.tree import Config

Kind = Literal["rank", "server", "worker"]
Placement = Literal["pack", "spread"]
KINDS: tuple[Kind, ...] = ("rank", "server", "worker")
RESOURCE_KEYS: Mapping[Kind, str] = {
    "rank": "learner.rank_resources",
    "server": "inference.server_resources",
    "worker": "rollout.worker_resources",
}
COUNT_KEYS: Mapping[Kind, str] = {
    "rank": "learner.ranks",
    "server": "inference.servers",
    "worker": "rollout.workers",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One process that a run starts through Ray, with the Ray resources that it reserves."""

    name: str
    """Such as `server 0`."""
    kind: Kind
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run needs of a cluster: its parts, and for each kind whether they fill or share the nodes."""

    parts: tuple[Part, ...]
    placement: Mapping[Kind, Placement]


def part_name(kind: Kind, index: int) -> str:
    return f"{kind} {index}"


def run_parts(config: Config, nodes: Sequence[Node], *, trains: bool = True, serves: bool = True) -> RunParts:
    """Return the parts of a run: without ranks unless it `trains`, without servers unless it `serves` a model."""
    learner, inference, rollout = config.learner, config.inference, config.rollout
    counts: dict[Kind, int] = {
        "rank": learner.ranks if trains else 0,
        "server": inference.servers if serves else 0,
        "worker": rollout.workers,
    }
    gpu = _gpus_each(nodes, counts["rank"] + counts["server"])
    resources: dict[Kind, Mapping[str, float]] = {
        "rank": learner.rank_resources or _computing(learner.threads, 0.0 if learner.device == "cpu" else gpu),
        "server": inference.server_resources or _computing(inference.threads, gpu),
        "worker": rollout.worker_resources,
    }
    parts = tuple(
        Part(part_name(kind, index), kind, resources[kind]) for kind in KINDS for index in range(counts[kind])
    )
    return RunParts(parts, {"rank": learner.placement, "server": inference.placement, "worker": rollout.placement})


def _gpus_each(nodes: Sequence[Node], users: int) -> float:
    """Return the GPUs of each rank and server: one, or an equal share if there are fewer GPUs than users."""
    gpus = sum(node.total.get("GPU", 0.0) for node in nodes)
    return 0.0 if not gpus or not users else min(1.0, int(100 * gpus / users) / 100)


def _computing(threads: int, gpu: float) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": gpu} if gpu else {"CPU": float(threads)}
