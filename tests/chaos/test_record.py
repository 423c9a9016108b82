"""A campaign goes on where it was interrupted, and its sittings add up to one result."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.chaos.campaign import BrokenError, Outcome
from tests.chaos.faults import draw_cases

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLACES = {"sandbox"}
BOOKS = {"produced": 4, "trained": 3, "waiting": 1, "balance": True}


@pytest.fixture
def chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("chaos_benchmark", BENCHMARKS / "chaos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    for name, value in (("RESULTS", tmp_path), ("RECORD", tmp_path / "chaos.jsonl"), ("machine", lambda: "2 cores")):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "REGRESSIONS", tmp_path / "regressions.txt")
    (tmp_path / "regressions.txt").touch()
    return module


class Hit:
    """Stand-in for the run of a sitting: bears its first `bears` cases, and then breaks."""

    def __init__(self, bears: int) -> None:
        self.bears = bears
        self.cases: list[str] = []

    def __call__(self, sitting: Any) -> None:
        cases = sitting.cases(SimpleNamespace(has=PLACES))
        for case in cases[: self.bears]:
            self.cases.append(str(case))
            outcome = Outcome(case.part, case.fault, case.moment, case.seed, 1.0, 2.0, 3.0, 4.0, 0)
            sitting.record(asdict(outcome))
        if len(cases) > self.bears:
            sitting.record({"broken": "something", "at": str(cases[self.bears])})
            raise BrokenError("something")
        sitting.record({"start_s": 30.0, "end_s": 20.0, "books": BOOKS})


def test_a_broken_campaign_goes_on_with_the_case_that_broke_it(
    chaos: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [str(case) for case in draw_cases(3, 5, PLACES)]
    first, second = Hit(bears=2), Hit(bears=5)
    monkeypatch.setattr(chaos.Sitting, "run", lambda self: first(self))
    with pytest.raises(BrokenError):
        chaos.carry_on(3, 5, vllm=False, minutes=60.0)
    assert (tmp_path / "regressions.txt").read_text() == f"{cases[2]}\n"
    monkeypatch.setattr(chaos.Sitting, "run", lambda self: second(self))
    result = chaos.carry_on(3, 5, vllm=False, minutes=60.0)
    assert [*first.cases, *second.cases] == cases
    assert result["faults"] == sum(row["faults"] for row in result["rows"]) == 5
    assert result["mean_s"] == {"waited_s": 1.0, "lasted_s": 2.0, "recovered_s": 3.0, "checked_s": 4.0}
    assert json.loads((tmp_path / "chaos.json").read_text())["faults"] == 5
    page = (tmp_path / "chaos.md").read_text()
    assert "5 faults" in page
    assert "books balance, nothing left" in page


def test_a_campaign_of_another_config_has_a_result_of_its_own(
    chaos: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hit, configs = Hit(bears=9), list[str]()

    def run(self: Any) -> None:
        configs.append(self.config)
        hit(self)

    monkeypatch.setattr(chaos.Sitting, "run", run)
    for config, faults in ((chaos.CONFIG, 3), ("configs/quickstart.yaml", 2)):
        assert chaos.carry_on(3, faults, vllm=True, minutes=60.0, config=config)["faults"] == faults
    assert configs == [chaos.CONFIG, "configs/quickstart.yaml"]
    assert json.loads((tmp_path / "chaos_vllm.json").read_text())["faults"] == 3
    page = (tmp_path / "chaos_quickstart_vllm.md").read_text()
    assert "vLLM, configs/quickstart.yaml and Docker sandboxes" in page
    assert "--faults 2 --seed 3 --vllm --config configs/quickstart.yaml`" in page


def test_a_campaign_of_another_seed_or_engine_begins_anew(chaos: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = [Hit(bears=9) for _ in range(3)]
    for hit, (seed, vllm) in zip(hits, [(3, False), (3, True), (4, False)], strict=True):
        monkeypatch.setattr(chaos.Sitting, "run", lambda self, hit=hit: hit(self))
        assert chaos.carry_on(seed, 4, vllm=vllm, minutes=60.0)["faults"] == 4
    assert [len(hit.cases) for hit in hits] == [4, 4, 4]
