"""How long the ranks of a learner wait for each other's weights and gradients, by arithmetic.

The `learner.shard_size` ranks that share one copy gather its weights twice per row (forward and backward) while they
compute. After each step the copies add their gradients (all-reduce).
"""

from __future__ import annotations

from roll_flash.config.tree import Config
from roll_flash.models.shape import ModelShape
from roll_flash.planner.machines.hardware import Hardware
from roll_flash.planner.machines.memory import GRADIENT, HALF, trained_parameters

GATHERS_PER_ROW = 2


def ranks_of_copy(config: Config) -> int:
    """Ranks that share one copy of weights, gradients and optimizer."""
    return config.learner.shard_size or config.learner.ranks


def gather_s(config: Config, shape: ModelShape, hardware: Hardware) -> float:
    """Return the seconds for which a row gathers weights, over NVLink or PCIe if a copy is within a node."""
    ranks = ranks_of_copy(config)
    missing = HALF * shape.parameters * (ranks - 1) / ranks
    return GATHERS_PER_ROW * missing / _bytes_per_s(hardware, ranks)


def all_reduce_s(config: Config, shape: ModelShape, hardware: Hardware) -> float:
    """Return the seconds in which copies add their gradients after a step: each rank its shard; 0 with one copy."""
    ranks = ranks_of_copy(config)
    copies = config.learner.ranks // ranks
    shard = GRADIENT * trained_parameters(config.learner, shape) / ranks
    return 2 * shard * (copies - 1) / copies / _bytes_per_s(hardware, config.learner.ranks)


def _bytes_per_s(hardware: Hardware, ranks: int) -> float:
    """One direction, between so many GPUs; those of a node are together as far as they can."""
    gpu = hardware.gpu
    link = (gpu.nvlink_gb_s or gpu.pcie_gb_s) / 2 if ranks <= hardware.gpus_per_node else gpu.network_gb_s
    return 1e9 * hardware.bandwidth_share * link
