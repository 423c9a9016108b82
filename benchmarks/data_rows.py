"""Start and memory of a data set with a million rows.

    python benchmarks/data_rows.py [--quick] [--json]

Writes a file of questions and answers and opens it as a run does: each row is read, checked and hashed. Each repetition
is a process of its own. Prints the seconds until the first task, and the resident memory that the rows add, in MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine

ROWS, QUICK_ROWS, REPEATS = 1_000_000, 20_000, 3


def measure(path: str) -> dict[str, float]:
    """Open the file in this process."""
    from roll_flash.config.tree import EnvConfig
    from roll_flash.envs.datasets.source import DatasetTasks

    env = EnvConfig.model_validate({"id": "Dataset-v0", "data": path, "reward": "exact"})
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, began_cpu = time.monotonic(), time.process_time()
    DatasetTasks(env).next()
    took = {"start_s": time.monotonic() - began, "start_cpu_s": time.process_time() - began_cpu}
    return {**took, "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024}


def write(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for number in range(rows):
            prompt = f"What is {number} + {number % 97}? Reply with the number only."
            file.write(json.dumps({"prompt": prompt, "answer": str(number + number % 97)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows, once")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    rows = QUICK_ROWS if options.quick else ROWS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, rows)
        command = [sys.executable, __file__, "--measure", str(path)]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(1 if options.quick else REPEATS)
        ]
    figures = {
        name: {
            "mean": statistics.mean(run[name] for run in runs),
            "low": min(run[name] for run in runs),
            "high": max(run[name] for run in runs),
        }
        for name in runs[0]
    }
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "figures": figures}, indent=2))
        return
    print(f"{rows:,} rows")
    for name, figure in figures.items():
        print(f"{name:<12} {figure['mean']:7.2f}  ({figure['low']:.2f} to {figure['high']:.2f})")


if __name__ == "__main__":
    main()
