"""The quickstart, seed by seed: held-out success before and after, and how long the training part takes.

    python benchmarks/quickstart.py [--seeds 0 1 2 3 4] [--quick] [--json] [a.b=c ...]

Runs `roll-flash train configs/quickstart.yaml` once for each seed, one after the other, on an otherwise idle machine.
The training part is the time from the first step's begin to the last step's end, evaluations apart. `--quick` runs
`configs/ci.yaml` (the tiny model) for one seed instead. Results go to `benchmarks/results/quickstart.{json,md}`,
those of `--quick` nowhere but standard output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from options import parse

from roll_flash.processes.supervise import end_with_parent

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUN_TIMEOUT_S = 3600


def train(config: str, seed: int, runs: str, overrides: list[str]) -> dict[str, Any]:
    """One run in a process of its own, as a user starts it; returns its summary."""
    command = [sys.executable, "-m", "roll_flash", "train", config, f"name=seed{seed}", f"seed={seed}", f"runs={runs}"]
    finished = subprocess.run(
        [*command, *overrides, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        preexec_fn=end_with_parent,
    )
    if finished.returncode != 0:
        sys.exit(f"the run of seed {seed} ended with exit code {finished.returncode}")
    summary: dict[str, Any] = json.loads(finished.stdout)
    return summary


def figures(seed: int, summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": seed,
        "success_before": summary["before"]["success"]["value"],
        "success_after": summary["after"]["success"]["value"],
        "held_out_tasks": summary["after"]["tasks"],
        "steps": summary["steps"],
        "training_minutes": round(summary["seconds"] / 60, 2),
        "evaluation_minutes": round((summary["before"]["seconds"] + summary["after"]["seconds"]) / 60, 2),
        "trajectories_trained": summary["books"]["trained"],
        "tokens_per_s": round(summary["tokens_per_s"]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    header = "| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |"
    lines = ["| " + " | ".join(f"{value:g}" for value in row.values()) + " |" for row in rows]
    return "\n".join([header, "|---" * len(rows[0]) + "|", *lines])


def save(result: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart.json").write_text(json.dumps(result, indent=2) + "\n")
    text = f"# Quickstart\n\n`python benchmarks/quickstart.py` on {result['machine']}.\n\n{table(result['rows'])}\n"
    (RESULTS / "quickstart.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments, keys = parse(parser)
    config, seeds = ("configs/ci.yaml", [0]) if arguments.quick else ("configs/quickstart.yaml", arguments.seeds)
    rows: list[dict[str, Any]] = []
    result = {"benchmark": "quickstart", "config": config, "machine": machine(), "rows": rows}
    with tempfile.TemporaryDirectory() as runs:
        for seed in seeds:
            rows.append(figures(seed, train(config, seed, runs, keys)))
            if not arguments.quick:
                save(result)
    print(json.dumps(result) if arguments.json else f"{result['machine']}\n{table(rows)}")


if __name__ == "__main__":
    main()
