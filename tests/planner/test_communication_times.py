"""Times that ranks wait for weights and gradients of each other, by arithmetic: within a copy and between copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_flash.config.tree import Config, load_config
from roll_flash.models.shape import read_shape
from roll_flash.planner.machines.arithmetic import arithmetic
from roll_flash.planner.machines.communication import all_reduce_s, gather_s
from roll_flash.planner.machines.hardware import load_hardware
from roll_flash.planner.measured.calibration import Speeds

HARDWARE = load_hardware(Path(__file__).parents[2] / "configs/hardware/h100-sxm-80gb.yaml").model_copy(
    update={"nodes": 2, "gpus_per_node": 8, "bandwidth_share": 1.0}
)
SHAPE = read_shape("Qwen3-8B")
GIGABYTES = 2 * 8.190735360


def config(**learner: Any) -> Config:
    return load_config({"model": {"path": "Qwen3-8B"}, "envs": [{"id": "A-v0"}], "learner": learner})


def speeds(**learner: Any) -> Speeds:
    return arithmetic(config(**learner), SHAPE, HARDWARE, None).speeds


def test_weights_of_a_copy_within_a_node_are_gathered_over_nvlink() -> None:
    assert gather_s(config(ranks=1), SHAPE, HARDWARE) == 0
    within, across = config(ranks=16, shard_size=8), config(ranks=16)
    assert gather_s(within, SHAPE, HARDWARE) == pytest.approx(2 * GIGABYTES * 7 / 8 / 450)
    assert gather_s(across, SHAPE, HARDWARE) == pytest.approx(2 * GIGABYTES * 15 / 16 / HARDWARE.gpu.network_gb_s)


def test_copies_add_their_gradients_once_a_step() -> None:
    assert all_reduce_s(config(ranks=16), SHAPE, HARDWARE) == 0
    found = all_reduce_s(config(ranks=16, shard_size=8), SHAPE, HARDWARE)
    assert found == pytest.approx(2 * (2 * GIGABYTES / 8) / 2 / HARDWARE.gpu.network_gb_s)


def test_short_rows_wait_for_the_network_unless_a_copy_is_within_a_node() -> None:
    short = {"ranks": 16, "micro_batch_tokens": 512}
    assert speeds(**short).train_token_s > 2 * speeds(**short, shard_size=8).train_token_s


def test_a_rank_updates_the_share_of_its_copy() -> None:
    assert speeds(ranks=16, shard_size=8).update_s > speeds(ranks=16).update_s
