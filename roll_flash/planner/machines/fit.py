"""Does a run fit where its parts get their places? On one machine that is known without Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from roll_flash.cluster.nodes import Node, own_node
from roll_flash.cluster.parts import RunParts, run_parts
from roll_flash.cluster.plan import Plan, make_plan
from roll_flash.cluster.plan_checks import check_weight_transfer
from roll_flash.config.tree import Config
from roll_flash.inference.open import computes_on_gpus
from roll_flash.planner.machines.cpu_check import check_cpu
from roll_flash.planner.machines.memory_check import NOT_CHECKED, check_gpu_memory
from roll_flash.processes.ray.local_ray import OBJECT_STORE_BYTES, own_gpus, own_resources

KNOWN = frozenset({"CPU", "GPU", "memory"})
"""Resources of this machine that are known before Ray starts."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The places of the parts of a run, and what is needed there."""

    plan: Plan
    memory: tuple[str, ...]
    """Lines about GPUs and their hosts; empty without GPUs."""
    cpu: tuple[str, ...]
    """Lines about this machine without GPUs: memory, and time of training."""

    @classmethod
    def of(cls, config: Config, plan: Plan) -> Fit:
        """Raises PlacementError if a plan needs more memory than there is."""
        return cls(plan, tuple(check_gpu_memory(config, plan)), tuple(check_cpu(config, plan)))

    def notes(self) -> list[str]:
        """Return the lines that a run says when it starts."""
        not_checked = [f"warning: memory: {line}" for line in self.memory if line.startswith(NOT_CHECKED)]
        return [*not_checked, *self.cpu]


def fit_here(config: Config, *, trains: bool = True, serves: bool = True) -> Fit | None:
    """Return how a run fits this machine; None if that is known only when Ray runs: on a cluster, in a Ray that this
    process has already joined, or if a part asks for resources that only Ray knows.

    Raises PlacementError if it does not fit.
    """
    if config.ray.address is not None or _has_ray() or not _asked(config) <= KNOWN:
        return None
    nodes = [_this_machine(config)]
    return Fit.of(config, plan_on(config, nodes, trains=trains, serves=serves))


def plan_on(config: Config, nodes: Sequence[Node], *, trains: bool = True, serves: bool = True) -> Plan:
    """Return the plan of a run. Raises PlacementError if a part fits on no node."""
    plan = make_plan(parts_on(config, nodes, trains=trains, serves=serves), nodes)
    check_weight_transfer(plan, config.inference.weight_transfer)
    return plan


def parts_on(config: Config, nodes: Sequence[Node], *, trains: bool, serves: bool) -> RunParts:
    """Return the parts of a run, whose servers compute where the installed engine does."""
    gpu_servers = computes_on_gpus(config.inference) if serves else None
    return run_parts(config, nodes, trains=trains, serves=serves, gpu_servers=gpu_servers)


def _has_ray() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _asked(config: Config) -> set[str]:
    """Names of the resources that the config asks for."""
    asked = config.learner.rank_resources, config.inference.server_resources, config.rollout.worker_resources
    return {name for each in asked for name in each or {}}


def _this_machine(config: Config) -> Node:
    gpus = own_gpus(config.ray)
    resources = own_resources(config.ray, gpus)
    if gpus or "memory" in _asked(config):  # nothing else is compared with it, and the import of Ray takes seconds
        resources["memory"] = _memory_of_ray()
    return own_node(resources, gpus)


def _memory_of_ray() -> float:
    """Return the bytes that a Ray started now declares for its parts."""
    from ray._private.utils import estimate_available_memory

    return float(estimate_available_memory() - OBJECT_STORE_BYTES)
