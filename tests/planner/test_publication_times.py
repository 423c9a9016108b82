"""Times of a publication by arithmetic: what each way to the servers has to pay for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_flash.config.tree import load_config
from roll_flash.models.shape import read_shape
from roll_flash.planner.machines.hardware import load_hardware
from roll_flash.planner.machines.publication import HASH_GB_S, OBJECT_STORE_GB_S, WeightTimes, weight_times

HARDWARE = Path(__file__).parents[2] / "configs/hardware"
GIGABYTES = 2 * 8.190735360


def times(
    transfer: str, *, nodes: int = 1, file: str = "h100-sxm-80gb", network: float = 0, **sections: Any
) -> WeightTimes:
    hardware = load_hardware(HARDWARE / f"{file}.yaml").model_copy(update={"nodes": nodes, "bandwidth_share": 1.0})
    gpu = hardware.gpu.model_copy(update={"network_gb_s": network} if network else {})
    hardware = hardware.model_copy(update={"gpu": gpu})
    inference = {"weight_transfer": transfer, **sections.pop("inference", {})}
    config = load_config({"model": {"path": "Qwen3-8B"}, "envs": [{"id": "A-v0"}], "inference": inference, **sections})
    return weight_times(config, read_shape("Qwen3-8B"), hardware)


def test_weights_go_over_nvlink_within_a_node_and_over_the_network_between_nodes() -> None:
    assert times("nccl").pause_s == pytest.approx(GIGABYTES / 450)
    assert times("nccl", nodes=2).pause_s == pytest.approx(GIGABYTES / 50)
    assert times("nccl", file="l40s-48gb").pause_s == pytest.approx(GIGABYTES / 32), "no NVLink: PCIe"


def test_other_nodes_cost_two_hashes_and_the_slowest_link() -> None:
    assert times("shm").to_nodes_s == 0
    hash_s = GIGABYTES / HASH_GB_S
    assert times("shm", nodes=2).to_nodes_s == pytest.approx(hash_s + GIGABYTES / OBJECT_STORE_GB_S)
    assert times("shm", nodes=5, network=1.25).to_nodes_s == pytest.approx(hash_s + 4 * GIGABYTES / 1.25)


def test_adapters_travel_in_a_small_part_of_the_time_of_whole_weights() -> None:
    adapters = times("shm", nodes=2, learner={"lora": {"rank": 8}})
    assert adapters.to_nodes_s < times("shm", nodes=2).to_nodes_s / 100
    assert adapters.stage_s < times("shm").stage_s / 100


def test_a_server_on_two_gpus_copies_half_the_weights_on_each() -> None:
    one, two = (times("shm", inference={"tensor_parallel_size": size}) for size in (1, 2))
    assert two.pause_s == one.pause_s / 2
    assert two.before_pause_s == one.before_pause_s / 2
