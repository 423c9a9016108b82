"""A run that is hit by one fault after the other goes on, and nothing is lost, doubled or left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
@pytest.mark.docker
@pytest.mark.ray
def test_a_run_bears_a_fault_in_each_of_its_parts() -> None:
    """A failure prints the seed and the number of the fault: `benchmarks/chaos.py --quick --seed 1` repeats them."""
    done = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--quick", "--seed", "1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(row["faults"] for row in found["rows"]) >= 19
    assert found["books"]["balance"]
