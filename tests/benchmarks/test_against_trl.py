"""The comparison with TRL: what a command used, and what the page says of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def against_trl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import against_trl

    monkeypatch.setattr(against_trl, "LOOK_EVERY_S", 0.05)
    return against_trl


def test_time_and_memory_of_a_command_are_those_of_all_its_processes(against_trl: ModuleType) -> None:
    work = (
        "import time; held = b'x' * (64 << 20); end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    )
    twice = (
        f"import subprocess, sys; [subprocess.run([sys.executable, '-c', {work!r}]) for _ in range(2)]; print('done')"
    )
    printed, took = against_trl.measured([sys.executable, "-c", twice])
    assert printed == "done\n"
    assert took["cpu_s"] >= 0.6
    assert took["seconds"] >= 1.0
    assert 64 <= took["peak_mib"] < 128


def test_a_command_that_fails_or_takes_too_long_ends_the_comparison(against_trl: ModuleType) -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        against_trl.measured([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match=r"took longer than 0\.2 s"):
        against_trl.measured([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


def test_the_page_says_how_many_times_as_long_trl_takes(against_trl: ModuleType) -> None:
    def side(seconds: float, success: float) -> dict[str, float]:
        return {"seconds": seconds, "training_s": seconds / 2, "cpu_s": seconds, "peak_mib": 2048, "success": success}

    difference = {"value": 0.05, "low": -0.01, "high": 0.11}
    row = {"seed": 1, "before": 0.1, "roll_flash": side(120, 0.9), "trl": side(300, 0.85), "difference": difference}
    page = against_trl.as_markdown({"command": "c", "machine": "m", "load": 0.5, "rows": [row]})
    assert "| 1 | trl | 5.0 | 2.5 | 5.0 | 2.0 | 0.10 → 0.85 |" in page
    assert "TRL takes 2.50 times as long, 2.50 times without start and end" in page
    assert "minus that with TRL: +0.05 [-0.01, +0.11]." in page
