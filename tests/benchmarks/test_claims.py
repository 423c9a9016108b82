"""The report says what the results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_report_is_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/report.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{done.stderr}docs/report.md is old: run python benchmarks/report.py"
