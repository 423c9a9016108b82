"""What it costs to watch a run: writes results/monitoring.{json,md}.

    python benchmarks/monitoring.py [--quick] [--pairs N] [--steps N]

Runs of the tiny model alternate: one as users have it, one without what only watches: the live figures and
`status.json`, the live diagnosis, TensorBoard. Metrics, episodes and journal are written in both. Real Ray, real vLLM,
the real learner; environments that wait (benchmarks/latency_env.py), as many episodes as two cores can bear. Compared
are trained episodes per second after the first quarter of the steps, and the processor time of the driver, where all
watching is done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RUN_TIMEOUT_S = 900
GOAL = 0.02
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
"""Student's t for 95 %, by degrees of freedom."""
WORDS = (
    "envs.0.id=benchmarks.latency_env:MockLatency-v0",
    "envs.0.max_turns=4",
    "model.max_length=384",
    "scheduler.groups_per_step=8",
    "scheduler.group_size=6",
    "rollout.max_concurrent=64",
    "rollout.max_new_tokens=24",
    "learner.learning_rate=1e-7",
    "eval.before_and_after=false",
    "checkpoint.every_minutes=0",
)


def train(steps: int, runs: str, *, watched: bool) -> dict[str, float]:
    """Train in this process, and measure it."""
    sys.path.insert(0, str(ROOT))
    from roll_flash import load_config, system, train
    from roll_flash.diagnosis import LiveDiagnosis
    from roll_flash.monitor.progress import Progress

    if not watched:

        async def no_figures(*_: object) -> None:
            """Stands for `_show_live_figures`."""

        system._show_live_figures = no_figures
        LiveDiagnosis.step = lambda *_: []  # type: ignore[method-assign]
        Progress.show = Progress.status = lambda *_, **__: None  # type: ignore[method-assign]
    config = load_config(ROOT / "configs/ci.yaml", [*WORDS, f"steps={steps}", f"runs={runs}", "name=run"])
    config = config.model_copy(update={"monitor": config.monitor.model_copy(update={"tensorboard": watched})})
    ends: list[tuple[float, float]] = []
    train(config, on_step=lambda *_: ends.append((time.monotonic(), time.process_time())))
    (began_s, began_cpu_s), (ended_s, ended_cpu_s) = ends[steps // 4], ends[-1]
    episodes = (len(ends) - 1 - steps // 4) * config.scheduler.groups_per_step * config.scheduler.group_size
    return {
        "episodes_per_s": episodes / (ended_s - began_s),
        "driver_cores": (ended_cpu_s - began_cpu_s) / (ended_s - began_s),
    }


def measure(steps: int, *, watched: bool) -> dict[str, float]:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, __file__, "--steps", str(steps), "--child", "on" if watched else "off", runs]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        sys.exit(f"the run ended with exit code {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(pairs: int, steps: int) -> dict[str, Any]:
    """Alternate runs; which of a pair comes first alternates too."""
    rows: list[dict[str, Any]] = []
    for pair in range(pairs):
        row: dict[str, Any] = {"load_before": os.getloadavg()[0]}
        for watched in (pair % 2 == 0, pair % 2 == 1):
            row["on" if watched else "off"] = measure(steps, watched=watched)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return {
        "slower": _interval([1 - row["on"]["episodes_per_s"] / row["off"]["episodes_per_s"] for row in rows]),
        "driver_cores": _interval([row["on"]["driver_cores"] - row["off"]["driver_cores"] for row in rows]),
        "rows": rows,
    }


def _interval(values: list[float]) -> dict[str, float | None]:
    """Return the mean, and its 95 % interval (Student's t); no interval for one value."""
    mean = fmean(values)
    half = T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {
        "mean": mean,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
    }


def as_markdown(report: dict[str, Any]) -> str:
    slower, cores = report["slower"], report["driver_cores"]
    lines = [
        "# What it costs to watch a run",
        "",
        f"`python benchmarks/monitoring.py --pairs {len(report['rows'])} --steps {report['steps']}` on "
        f"{report['machine']}.",
        "",
        " ".join(__doc__.split("\n\n")[2].split()),
        "",
        "| pair | episodes/s watched | not watched | driver's cores watched | not watched | load before it |",
        "|---|---|---|---|---|---|",
    ]
    for place, row in enumerate(report["rows"], start=1):
        on, off = row["on"], row["off"]
        lines.append(
            f"| {place} | {on['episodes_per_s']:.2f} | {off['episodes_per_s']:.2f} | {on['driver_cores']:.3f} | "
            f"{off['driver_cores']:.3f} | {row['load_before']:.1f} |"
        )
    lines += [
        "",
        f"Watched runs are slower by {_shown(slower, '.1%')} (goal at most {GOAL:.0%}). The driver uses "
        f"{_shown(cores, '.3f')} cores more.",
    ]
    return "\n".join(lines) + "\n"


def _shown(found: dict[str, float | None], form: str) -> str:
    if found["low"] is None:
        return f"{found['mean']:{form}}"
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair, few steps; writes nothing")
    parser.add_argument("--pairs", type=int, choices=range(1, 9), help="default: 5, with --quick 1")
    parser.add_argument("--steps", type=int, help="default: 16, with --quick 4")
    parser.add_argument("--child", nargs=2, metavar=("on|off", "RUNS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (4 if options.quick else 16)
    if options.child:
        watched, runs = options.child
        print(json.dumps(train(steps, runs, watched=watched == "on")))
        return
    pairs = options.pairs or (1 if options.quick else 5)
    report = {"benchmark": "monitoring", "machine": machine(), "steps": steps, **compare(pairs, steps)}
    if not options.quick:
        (RESULTS / "monitoring.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "monitoring.md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    main()
