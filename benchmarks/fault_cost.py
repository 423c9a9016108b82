"""What faults cost: the quickstart under one fault every two minutes against none, seed by seed.

    python benchmarks/fault_cost.py [--seeds 0 1 2] [--every-s 120] [--quick] [--json] [a.b=c ...]

For each seed `roll-flash train configs/quickstart.yaml --keep-alive` (SmolLM2, vLLM, Docker) runs twice, with 24 steps
(its 12 end soon after the first fault) and a checkpoint a minute; which of the two comes first alternates. In one of
them a process or sandbox is hit at equal intervals from the first step on: killed, stopped for up to 20 s, without file
descriptors or memory (`tests/chaos/faults.py`, drawn with the seed). Compared are the mean reward of each step, and the
time from the end of the first step to that of the last. --quick is one seed of configs/ci.yaml with a fault every 20 s.
Results go to results/fault_cost.{json,md}, those of --quick nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil
from machine import machine
from options import parse

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from roll_flash.monitor.metrics import STEP_S, read_metrics  # noqa: E402
from roll_flash.processes.supervise import end_with_parent  # noqa: E402
from tests.chaos.faults import draw_cases, inject  # noqa: E402

RESULTS = Path(__file__).parent / "results"
QUICKSTART, QUICK = "configs/quickstart.yaml", "configs/ci.yaml"
EVERY_S, QUICK_EVERY_S = 120.0, 20.0
SETTINGS = ("steps=24", "checkpoint.every_minutes=1")
QUICK_SETTINGS = ("steps=30", "inference.engine=transformers")
LONGEST_S = 20.0
"""Most seconds of a fault that passes by itself."""
RUN_TIMEOUT_S = 4 * 3600.0
MOST_FAULTS = 1000
POLL_S = 0.1
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
"""Student's t for 95 %, by degrees of freedom."""


class Run:
    """A run that is hit; `processes` as `tests.chaos.faults.Run` wants it."""

    surroundings: Any = None
    """Only processes and sandboxes are hit."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def processes(self, names: Sequence[str]) -> list[tuple[int, str]]:
        found = []
        for each in psutil.Process(self._process.pid).children(recursive=True):
            try:
                command = " ".join(each.cmdline())
            except psutil.Error:  # it has just ended
                continue
            if any(name in command for name in names):
                found.append((each.pid, command))
        return found


def train(config: str, seed: int, every_s: float | None, words: Sequence[str]) -> dict[str, Any]:
    """Train, with a fault each `every_s` seconds; None: without any."""
    with tempfile.TemporaryDirectory() as runs:
        folder = Path(runs, "run")
        command = [sys.executable, "-m", "roll_flash", "train", config, "name=run", f"runs={runs}", f"seed={seed}"]
        command += ["eval.before_and_after=false", *words, "--keep-alive"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent) as process:
            try:
                hit = _hit(process, folder / "metrics.jsonl", seed, every_s)
            finally:
                process.terminate()
        if process.returncode:
            sys.exit(f"the run of seed {seed} ended with exit code {process.returncode} after {hit}")
        rows = [row for row in read_metrics(folder) if STEP_S in row]
        return {
            "seed": seed,
            "faults": hit,
            "rewards": {int(row["step"]): row["reward"] for row in rows},
            "seconds": rows[-1]["time"] - rows[0]["time"],
        }


def _hit(process: subprocess.Popen[bytes], metrics: Path, seed: int, every_s: float | None) -> list[str]:
    """Wait for the end of a run, and hit it meanwhile; return the faults."""
    began_s, next_s, done = time.monotonic(), float("inf"), list[str]()
    cases = iter(draw_cases(seed, MOST_FAULTS, {"sandbox"}))
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s - began_s > RUN_TIMEOUT_S:
            sys.exit(f"no end of the run within {RUN_TIMEOUT_S:g} s")
        if every_s is not None and next_s == float("inf") and metrics.exists() and STEP_S in metrics.read_text():
            next_s = now_s + every_s
        if now_s >= next_s:
            next_s += every_s or 0.0
            case = next(cases)
            try:
                inject(case, Run(process), LONGEST_S)
                done.append(f"{case.part}: {case.fault}")
            except (TimeoutError, psutil.Error) as error:  # its part is not there, or the run has ended
                print(f"{case}: {error}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    return done


def compare(pairs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the differences in reward (under faults against none), per step and over all, and in time. A step that a
    killed driver could not report is left out."""
    reported = [set(pair[side]["rewards"]) for pair in pairs for side in ("none", "faults")]
    numbers = sorted(set.intersection(*reported))
    steps = [[pair["faults"]["rewards"][step] - pair["none"]["rewards"][step] for pair in pairs] for step in numbers]
    overall = [fmean(of_seed) for of_seed in zip(*steps, strict=True)]  # steps of one run depend on each other
    mean, spread = fmean(overall), _half(overall) or 0.0  # one seed has no interval
    longer = [100 * (pair["faults"]["seconds"] / pair["none"]["seconds"] - 1) for pair in pairs]
    return {
        "per_step": [
            {"step": number, "mean": fmean(step), "half": _half(step)}
            for number, step in zip(numbers, steps, strict=True)
        ],
        "different_steps": sum((half := _half(step)) is not None and abs(fmean(step)) > half for step in steps),
        "reward": {"mean": mean, "low": mean - spread, "high": mean + spread},
        "percent_longer": longer,
    }


def _half(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of a mean; None for one value."""
    return None if len(values) < 2 else T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5


def as_markdown(report: dict[str, Any]) -> str:
    found, pairs = report["compared"], report["pairs"]
    lines = [
        "# What faults cost",
        "",
        f"`{report['command']}` on {report['machine']}, load {report['load']:.1f} at the start.",
        "",
        " ".join(__doc__.split("\n\n")[2].split()),
        "",
        "| step | reward without | with faults | difference, 95 % over seeds |",
        "|---|---|---|---|",
    ]
    for each in found["per_step"]:
        step = each["step"]
        means = [fmean(pair[side]["rewards"][step] for pair in pairs) for side in ("none", "faults")]
        half = "" if each["half"] is None else f" ± {each['half']:.3f}"
        lines.append(f"| {step} | {means[0]:.3f} | {means[1]:.3f} | {each['mean']:+.3f}{half} |")
    hits = [len(pair["faults"]["faults"]) for pair in pairs]
    which = "; ".join(", ".join(pair["faults"]["faults"]) for pair in pairs)
    overall = found["reward"]
    longer = ", ".join(f"{each:+.0f} %" for each in found["percent_longer"])
    lines += [
        "",
        f"{sum(hits)} faults in {len(pairs)} runs ({which}). Over all steps the reward of a seed differs by "
        f"{overall['mean']:+.3f} [{overall['low']:+.3f}, {overall['high']:+.3f}]; {found['different_steps']} of "
        f"{len(found['per_step'])} steps differ beyond their interval (by chance one of 20). The runs with faults took "
        f"{longer} longer, {fmean(found['percent_longer']):+.0f} % in the mean (goal: at most 15 %).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every-s", type=float, default=EVERY_S)
    parser.add_argument("--quick", action="store_true", help="one seed of the tiny model; writes nothing")
    parser.add_argument("--json", action="store_true")
    options, words = parse(parser)
    config, seeds, every_s, settings = QUICKSTART, options.seeds, options.every_s, SETTINGS
    if options.quick:
        config, seeds, every_s, settings = QUICK, [0], QUICK_EVERY_S, QUICK_SETTINGS
    words = [*settings, *words]
    report: dict[str, Any] = {
        "benchmark": "fault_cost",
        "machine": machine(),
        "load": os.getloadavg()[0],
        "command": " ".join(
            ["python benchmarks/fault_cost.py --seeds", *map(str, seeds), f"--every-s {every_s:g}", *words]
        ),
        "pairs": [],
    }
    for place, seed in enumerate(seeds):
        sides = [("none", None), ("faults", every_s)]
        pair = {side: train(config, seed, each_s, words) for side, each_s in (sides if place % 2 == 0 else sides[::-1])}
        print(json.dumps(pair), file=sys.stderr, flush=True)
        report["pairs"].append(pair)
    report["compared"] = compare(report["pairs"])
    if not options.quick:
        (RESULTS / "fault_cost.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "fault_cost.md").write_text(as_markdown(report))
    print(json.dumps(report) if options.json else as_markdown(report))


if __name__ == "__main__":
    main()
