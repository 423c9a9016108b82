"""What grows by more than its noise is found, what only varies is flat."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from types import ModuleType

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def long_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("long_run_benchmark", BENCHMARKS / "long_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_leak_beside_noise_is_found_with_its_size_and_noise_alone_is_flat(long_run: ModuleType) -> None:
    draw = random.Random(0)
    steps = list(range(500, 2000))
    noise = [100 + draw.gauss(0, 2) for _ in steps]
    assert long_run.is_flat(long_run.growth(steps, noise))
    leak = long_run.growth(steps, [value + 0.003 * step for value, step in zip(noise, steps, strict=True)])
    assert not long_run.is_flat(leak)
    assert leak["low"] < 3.0 < leak["high"]


def test_a_straight_line_has_its_slope_and_a_constant_none(long_run: ModuleType) -> None:
    steps = [10 * number for number in range(40)]
    line = long_run.growth(steps, [5 + 0.25 * step for step in steps])
    assert (line["mean"], line["level"]) == (pytest.approx(250), pytest.approx(5 + 0.25 * 195))
    assert long_run.is_flat(long_run.growth(steps, [7.0] * 40))
    with pytest.raises(ValueError, match="too few"):
        long_run.growth(steps[:39], steps[:39])


def test_what_a_process_has_is_seen(long_run: ModuleType) -> None:
    before = long_run.look(psutil.Process(os.getpid()))
    files = [open(os.devnull) for _ in range(100)]  # noqa: SIM115
    block = bytearray(os.urandom(1 << 20) * 32)
    after = long_run.look(psutil.Process(os.getpid()))
    for file in files:
        file.close()
    # What other tests left may be closed meanwhile.
    assert after["file descriptors"] - before["file descriptors"] >= 50
    assert after["memory of all, MiB"] - before["memory of all, MiB"] >= 0.9 * len(block) / (1 << 20)
    assert after["threads"] >= after["processes"] >= 1


def test_the_page_says_what_is_flat_and_what_bounds_the_disk(long_run: ModuleType) -> None:
    steps = [float(step) for step in range(40)]
    figures = {"threads": long_run.growth(steps, [7.0] * 40), "leak": long_run.growth(steps, steps)}
    about = {"command": "c", "machine": "m", "load": 1.0, "episodes_gib": 0.06, "removed_steps": 3.0}
    page = long_run.as_markdown(
        {**about, "figures": figures, "other_kb_per_step": 5.0, "verified": ["ok    journal    3 events"]}
    )
    assert "| threads | 7 | +0 [+0, +0] | yes |" in page
    assert "| leak | 19.5 | +1e+03 [+1e+03, +1e+03] | no |" in page
    assert "those of 3 steps were removed" in page
    assert "ok    journal" in page
