"""Each part is measured alone and removed, against the same two runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from roll_flash.config.tree import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("ablation_benchmark", ROOT / "benchmarks/ablation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["waits", "quickstart"])
def test_a_part_alone_differs_from_nothing_in_its_own_setting_only_and_removed_from_all(
    ablation: ModuleType, name: str
) -> None:
    load = ablation.LOADS[name]

    def config(run: str) -> dict[str, Any]:
        words = [*load.settings, *ablation.runs_of(load)[run]]
        read = load_config(ROOT / load.config, words)
        return {
            f"{section}.{key}": value
            for section in ("scheduler", "weights", "learner")
            for key, value in vars(getattr(read, section)).items()
        }

    nothing, everything = config("nothing"), config("all")
    parts = [key for key in nothing if nothing[key] != everything[key]]
    assert len(parts) == len(ablation.parts(load))
    for part in ablation.parts(load):
        alone, removed = config(f"only {part.name}"), config(f"without {part.name}")
        (own,) = [key for key in parts if alone[key] != nothing[key]]
        assert alone[own] == everything[own]
        assert {key for key in parts if removed[key] != everything[key]} == {own}
        assert removed[own] == nothing[own]


def test_the_page_says_how_many_times_as_fast_a_part_makes_a_run(ablation: ModuleType) -> None:
    def runs(*seconds: float) -> list[dict[str, Any]]:
        return [
            {"step_s": [each, each], "reward": [0.0, 0.5], "staleness_mean": 1.0, "dropped_stale": 2, "cancelled": 3}
            for each in seconds
        ]

    load = ablation.LOADS["waits"]
    measured = {name: runs(5.0, 5.0) for name in ablation.runs_of(load)}
    measured |= {"nothing": runs(10.0, 12.0), "all": runs(2.0, 4.0), "only queue scheduling": runs(5.0, 4.0)}
    found = ablation.figures(load, measured)
    assert found["all"] == {"mean": 4.0, "low": 3.0, "high": 5.0}
    assert found["alone"]["queue scheduling"] == {"mean": 2.5, "low": 2.0, "high": 3.0}
    assert found["removed"]["queue scheduling"] == {"mean": 1.875, "low": 1.25, "high": 2.5}
    report = {"of": "waits", "command": "c", "machine": "m", "load": 0.5, "steps": 2, "runs": measured}
    page = ablation.as_markdown({**report, "figures": found})
    assert "| queue scheduling | 2.50 [2.00, 3.00] | 1.88 [1.25, 2.50] |" in page
    assert "| all of them | 4.00 [3.00, 5.00] | |" in page
    assert "| nothing | 11.00 | 0.500 | 1.00 | 4, 6 |" in page
