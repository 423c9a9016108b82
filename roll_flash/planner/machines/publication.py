"""How long new weights take from the learner to the servers, by arithmetic.

`shm`: from the first rank to its host; to other nodes through Ray's object store, hashed once at the source and once at
each node; into memory from which a GPU copies in the pause. `nccl` sends whole weights to one server at a time, between
nodes over the network; `ipc` copies them on the GPU. Both in the pause.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll_flash.config.tree import Config
from roll_flash.models.shape import ModelShape
from roll_flash.planner.machines.hardware import Hardware
from roll_flash.planner.machines.memory import FULL, HALF, publishes_adapters, trained_parameters

HASH_GB_S = 4.0
"""Hashing on one core (BLAKE3, of an EPYC with AVX-512)."""
COPY_GB_S = 5.0
"""A copy in the memory of a host, on one core (of the same)."""
OBJECT_STORE_GB_S = 0.5
"""What passes through Ray's object store from one node to the next; nodes form a chain. An assumption: 0.18 was
measured between three nodes that share two cores (benchmarks/results/scaling.md)."""


@dataclass(frozen=True, slots=True)
class WeightTimes:
    """Times in seconds. The learner waits for `stage_s`, and a server for `pause_s`."""

    stage_s: float
    to_nodes_s: float
    """Once, before the first server takes them."""
    before_pause_s: float
    """At each server, beside its work."""
    pause_s: float


def weight_times(config: Config, shape: ModelShape, hardware: Hardware) -> WeightTimes:
    """Return the times of one publication."""
    inference, gpu, share = config.inference, hardware.gpu, 1e9 * hardware.bandwidth_share
    whole = HALF * shape.parameters
    hbm_s, pcie_s = 2 * whole / (share * gpu.hbm_gb_s), 2 * whole / (share * gpu.pcie_gb_s)
    if inference.weight_transfer == "ipc":
        return WeightTimes(hbm_s, 0.0, 0.0, hbm_s)
    if inference.weight_transfer == "nccl":
        link = gpu.network_gb_s if hardware.nodes > 1 else (gpu.nvlink_gb_s or gpu.pcie_gb_s) / 2
        return WeightTimes(hbm_s, 0.0, 0.0, whole / (share * link))
    changed = FULL * trained_parameters(config.learner, shape) if publishes_adapters(config) else whole
    network = hardware.bandwidth_share * gpu.network_gb_s * hardware.gpus_per_node
    return WeightTimes(
        stage_s=pcie_s * changed / whole,
        to_nodes_s=_to_nodes_s(changed / 1e9, hardware.nodes - 1, network),
        before_pause_s=whole / inference.tensor_parallel_size / (1e9 * COPY_GB_S),
        pause_s=pcie_s / inference.tensor_parallel_size,
    )


def _to_nodes_s(gigabytes: float, nodes: int, network_gb_s: float) -> float:
    """Hash, then send pieces while each node hashes and writes those that have come."""
    if not nodes:
        return 0.0
    piece = max(1 / OBJECT_STORE_GB_S, nodes / network_gb_s, 1 / HASH_GB_S + 1 / COPY_GB_S)
    return gigabytes * (1 / HASH_GB_S + piece)
