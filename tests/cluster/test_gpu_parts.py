"""Each part of a run sees the GPUs that the plan gave it. Ray is real, the GPUs are not (`gpu_parts.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.cluster.machines import ROOT

pytestmark = pytest.mark.ray
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, "-m", "tests.cluster.gpu_parts", str(tmp_path_factory.mktemp("servers"))]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_memory_of_each_gpu_of_a_cluster_is_asked_on_its_node(found: Any) -> None:
    assert found["memory"] == [{"4": 44, "MIG-1": 20, "6": 46, "7": 47}]


def test_each_part_gets_the_gpus_of_the_plan(found: Any) -> None:
    planned = {"rank 0": ["4"], "rank 1": ["MIG-1"], "server 0": ["6", "7"]}
    assert found["whole"]["planned"] == planned
    assert {name: gpus for name, (gpus, _) in found["whole"]["seen"].items()} == planned


def test_halves_are_of_the_same_gpu(found: Any) -> None:
    planned = {"rank 0": ["4"], "server 0": ["4"]}
    assert found["halves"]["planned"] == planned
    assert {name: gpus for name, (gpus, _) in found["halves"]["seen"].items()} == planned


def test_the_process_of_a_server_sees_them_and_no_others(found: Any) -> None:
    _, environment = found["whole"]["seen"]["server 0"]
    assert environment == {"CUDA_VISIBLE_DEVICES": "6,7", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_server_without_a_gpu_sees_none(found: Any) -> None:
    gpus, environment = found["none"]["server 0"]
    assert (gpus, environment["CUDA_VISIBLE_DEVICES"]) == ([], "")


def test_a_rank_whose_gpu_torch_cannot_use_is_one_clear_line(found: Any) -> None:
    """It does not train on the CPU in its place. Here torch is a CPU build."""
    said = found["rank without CUDA"]
    assert said.startswith("ConfigError: Ray has reserved GPU 4 for this rank, but torch 2."), said
    assert "cannot use it" in said
    assert "make setup SET=gpu" in said
    assert "\n" not in said
