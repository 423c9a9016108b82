"""Asynchronous training with queue scheduling against synchronous batch rollout, end to end and for real.

    python benchmarks/end_to_end.py [--steps 8] [--seeds 0 1 2 3 4]

Both columns are `roll-flash train` with real vLLM, real sandboxes, the real FSDP learner and the tiny model.
Environment steps take N(10, 10) s at 1:20; 2 % of the environments take ten times as long (benchmarks/slow_env.py).
Config, steps, slots and seeds are the same except for these settings:

    synchronous batch    scheduler.async_ratio=0 scheduler.mode=batch
    asynchronous queue   scheduler.async_ratio=2 (scheduler.on_stale=evict, the default)

The training part is the sum of the steps, without start and end of the run. Results go to
`benchmarks/results/end_to_end.{json,md,png}` after each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from machine import machine
from quickstart import RESULTS, ROOT

from roll_flash.monitor.metrics import REWARD, STALENESS_MAX, STALENESS_MEAN, STEP_S, read_metrics
from roll_flash.processes.supervise import end_with_parent

RUN_TIMEOUT_S = 3600
COMMON = (
    "envs.0.id=benchmarks.slow_env:SlowLetters-v0",
    "envs.0.max_turns=6",
    "model.max_length=384",
    "scheduler.groups_per_step=8",
    "scheduler.group_size=8",
    "rollout.max_concurrent=64",
    "rollout.max_new_tokens=16",
    "sandbox.pool_size=16",
    "sandbox.reuse=true",
    "eval.before_and_after=false",
    "monitor.tensorboard=false",
)
COLUMNS = {
    "synchronous batch": ("scheduler.async_ratio=0", "scheduler.mode=batch"),
    "asynchronous queue": ("scheduler.async_ratio=2",),
}


def train(
    name: str, seed: int, steps: int, settings: Sequence[str], runs: Path, config: str = "configs/ci.yaml"
) -> dict[str, Any]:
    """One run in a process of its own, as a user starts it; what its metrics say step by step."""
    command = [sys.executable, "-m", "roll_flash", "train", config, f"name={name}", f"runs={runs}"]
    finished = subprocess.run(
        [*command, f"seed={seed}", f"steps={steps}", *settings, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        preexec_fn=end_with_parent,
    )
    if finished.returncode != 0:
        sys.exit(f"the run {name} ended with exit code {finished.returncode}")
    rows = [row for row in read_metrics(runs / name) if STEP_S in row]
    last = rows[-1]
    produced = last["books/produced"]
    return {
        "seed": seed,
        "step_s": [row[STEP_S] for row in rows],
        "reward": [row[REWARD] for row in rows],
        "staleness_mean": mean(row[STALENESS_MEAN] for row in rows),
        "staleness_max": max(row[STALENESS_MAX] for row in rows),
        "produced": produced,
        "cancelled": last["books/cancelled"],
        "dropped_stale": last.get("books/dropped_stale", 0),
        "latency_trained_to_submitted": [last["bias/latency_ratio_low"], last["bias/latency_ratio_high"]],
        "unfinished": last["bias/unfinished"],
    }


def table(columns: dict[str, list[dict[str, Any]]]) -> str:
    rows = [("training minutes", lambda r: f"{sum(r['step_s']) / 60:.2f}")]
    rows += [("s per step", lambda r: f"{mean(r['step_s']):.1f}")]
    rows += [("reward of the first, last step", lambda r: f"{r['reward'][0]:.2f}, {r['reward'][-1]:.2f}")]
    rows += [("staleness mean, max", lambda r: f"{r['staleness_mean']:.2f}, {r['staleness_max']:.0f}")]
    rows += [("episodes cancelled", lambda r: f"{r['cancelled']:.0f}")]
    rows += [("trajectories produced, dropped as stale", lambda r: f"{r['produced']:.0f}, {r['dropped_stale']:.0f}")]
    rows += [
        ("latency of trained to submitted", lambda r: "{:.2f} to {:.2f}".format(*r["latency_trained_to_submitted"]))
    ]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, cell in rows:
        cells = ["; ".join(cell(run) for run in runs) for runs in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(columns: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Reward over steps and over minutes."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for (name, runs), colour in zip(columns.items(), ("#d1603d", "#3b6fb6"), strict=True):
        for run in runs:
            ends = [sum(run["step_s"][: index + 1]) / 60 for index in range(len(run["step_s"]))]
            label = name if run is runs[0] else None
            by_step.plot(range(1, len(ends) + 1), run["reward"], color=colour, label=label)
            by_time.plot(ends, run["reward"], color=colour, label=label)
    by_step.set(xlabel="step", ylabel="mean reward of the trained episodes")
    by_time.set(xlabel="minutes of training")
    by_time.legend()
    figure.savefig(path, dpi=110)


def speedup(columns: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Seed by seed: the mean, the smallest and the largest."""
    synchronous, asynchronous = ([sum(run["step_s"]) for run in runs] for runs in columns.values())
    ratios = [slow / fast for slow, fast in zip(synchronous, asynchronous, strict=True)]
    return {"mean": mean(ratios), "low": min(ratios), "high": max(ratios)}


def save(columns: dict[str, list[dict[str, Any]]], steps: int, load_before: float) -> str:
    ratio = speedup(columns)
    result = {
        "benchmark": "end_to_end",
        "machine": machine(),
        "load_before": load_before,
        "steps": steps,
        "speedup": ratio,
        "columns": columns,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "end_to_end.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(columns, RESULTS / "end_to_end.png")
    words = " ".join(__doc__.split("\n\n")[2].split())
    seeds = [run["seed"] for run in columns["synchronous batch"]]
    text = (
        "# End to end: asynchronous against synchronous\n\n"
        f"`python benchmarks/end_to_end.py --steps {steps} --seeds {' '.join(map(str, seeds))}` "
        f"on {machine()}, load {load_before:.1f} before it.\n\n{words}\n\n{table(columns)}\n\n"
        f"**{ratio['mean']:.2f} times as fast** ({ratio['low']:.2f} to {ratio['high']:.2f}, seed by seed; goal 2.72). "
        "Cells hold one figure for each seed.\n\n![Reward over steps and minutes](end_to_end.png)\n"
    )
    (RESULTS / "end_to_end.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    columns: dict[str, list[dict[str, Any]]] = {name: [] for name in COLUMNS}
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as runs:
        for seed in arguments.seeds:
            for name, settings in COLUMNS.items():
                label = f"{name.replace(' ', '-')}-{seed}"
                columns[name].append(train(label, seed, arguments.steps, (*COMMON, *settings), Path(runs)))
            text = save(columns, arguments.steps, load_before)
    print(text)


if __name__ == "__main__":
    main()
