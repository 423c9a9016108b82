"""Runs with faults are compared with those without, step by step and over all."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fault_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("fault_cost_benchmark", BENCHMARKS / "fault_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(seconds: float, *rewards: float) -> dict[str, dict[str, Any]]:
    return {
        "none": {"rewards": dict.fromkeys(range(1, 4), 0.5), "seconds": 100.0, "faults": []},
        "faults": {"rewards": dict(enumerate(rewards, 1)), "seconds": seconds, "faults": ["worker: kill -9"]},
    }


def test_a_step_differs_if_it_does_in_every_seed_and_not_if_seeds_disagree(fault_cost: ModuleType) -> None:
    pairs = [pair(110, 0.7, 0.6), pair(120, 0.71, 0.4), pair(90, 0.69, 0.5)]
    found = fault_cost.compare(pairs)
    assert [each["mean"] for each in found["per_step"]] == [pytest.approx(0.2), pytest.approx(0.0)]
    assert found["different_steps"] == 1
    assert found["percent_longer"] == [pytest.approx(10), pytest.approx(20), pytest.approx(-10)]
    assert found["reward"]["mean"] == pytest.approx(0.1)
    assert found["reward"]["low"] < 0.1 < found["reward"]["high"]
    page = fault_cost.as_markdown({"command": "c", "machine": "m", "load": 1.0, "pairs": pairs, "compared": found})
    assert "| 1 | 0.500 | 0.700 | +0.200 ± " in page
    assert "3 faults in 3 runs" in page


def test_one_seed_has_no_interval(fault_cost: ModuleType) -> None:
    found = fault_cost.compare([pair(110, 0.7, 0.6)])
    assert [each["half"] for each in found["per_step"]] == [None, None]
    assert found["different_steps"] == 0


def test_the_processes_below_a_run_are_found_by_their_commands(fault_cost: ModuleType) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as process:
        try:
            run = fault_cost.Run(process)
            while [command for _, command in run.processes(["sleep 600"])] != [
                "sleep 600"
            ]:  # first it is a second shell
                assert process.poll() is None
            assert run.processes(["no such command"]) == []
        finally:
            os.killpg(process.pid, 9)
