"""Stacks of a run's processes on other nodes, for the watchdog."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_flash.errors import first_line
from roll_flash.processes.background import call_in_thread
from roll_flash.watchdog.stacks import node_stacks

ANSWER_S = 4.0


async def stacks_elsewhere(run: str) -> str:
    """Describe the processes of `run` on each other node of the cluster; what a node does not answer is said."""
    here = ray.get_runtime_context().get_node_id()
    nodes = await call_in_thread(ray.nodes)
    others = [node for node in nodes if node["Alive"] and node["NodeID"] != here]
    return "\n\n".join(await _stacks_on(others, run))


async def _stacks_on(nodes: Sequence[Any], run: str) -> list[str]:
    return list(await asyncio.gather(*(_stacks_of(node, run) for node in nodes)))


async def _stacks_of(node: Any, run: str) -> str:
    where = f"==== node {node['NodeName']} ({node['NodeManagerAddress']})"
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    remote = ray.remote(node_stacks).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        async with asyncio.timeout(ANSWER_S):
            return f"{where}\n{await remote.remote(run)}"
    except (TimeoutError, ray.exceptions.RayError) as error:
        return f"{where}: no answer ({first_line(error)})"
