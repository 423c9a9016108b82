"""What each part earns on one load: alone, and when all but it are there.

    python benchmarks/ablation.py [--load waits|quickstart] [--steps N] [--seeds 0 1 2] [--quick] [--json]

`nothing` is synchronous batch rollout: the groups of a step start together, their replicas too, and end together; the
learner begins when the last one has ended, and computes at most one full-length row per pass. `all` has every part.
"Alone" is `nothing` with one part, "removed" is `all` without it; compared is the time of the same number of steps,
seed by seed. Prefix sharing is on in all runs; a pass of one row cannot use it for others. `weights in flight` lets
requests continue over an update; without it they are sent again.

`waits`: the tiny model with its own engine, 64 episodes a step in 32 slots, whose environments wait,
equally long in all runs of a seed (benchmarks/latency_env.py). `quickstart`: configs/quickstart.yaml (SmolLM2, vLLM,
Docker), where servers and learner share the cores. Results go to results/ablation_LOAD.{json,md} after each seed, those
of --quick nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from end_to_end import train
from machine import machine
from quickstart import RESULTS


@dataclass(frozen=True)
class Part:
    name: str
    with_it: Sequence[str]
    without: Sequence[str]


@dataclass(frozen=True)
class Load:
    config: str
    settings: Sequence[str]
    longest_row: int
    steps: int
    """How many a run has, if `--steps` does not say."""


LOADS = {
    "waits": Load(
        "configs/ci.yaml",
        (
            "envs=[{id: 'benchmarks.latency_env:MockLatencyAlike-v0', max_turns: 4}]",
            "inference.engine=transformers",
            "model.max_length=384",
            "scheduler.groups_per_step=8",
            "scheduler.group_size=8",
            "rollout.max_concurrent=32",
            "rollout.max_new_tokens=16",
        ),
        384,
        8,
    ),
    "quickstart": Load("configs/quickstart.yaml", (), 512, 4),
}
OTHER_ALPHAS = (1, 4)
"""Beside 0 and 2, which `parts` has."""


def parts(load: Load) -> list[Part]:
    return [
        Part("queue scheduling", ["scheduler.mode=queue"], ["scheduler.mode=batch"]),
        Part("prompt replication", ["scheduler.replicate=true"], ["scheduler.replicate=false"]),
        Part("2 redundant groups", ["scheduler.extra_groups=2"], ["scheduler.extra_groups=0"]),
        Part("asynchronous, alpha 2", ["scheduler.async_ratio=2"], ["scheduler.async_ratio=0"]),
        Part("weights in flight", ["weights.in_flight=keep"], ["weights.in_flight=abort_resume"]),
        Part(  # `batch` divides by the deviation of the whole step, so that its first pass waits for the last group
            "streaming to the learner", ["learner.normalize_advantage=group"], ["learner.normalize_advantage=batch"]
        ),
        Part(
            "packed passes with shared prefixes",
            ["learner.micro_batch_tokens=2048"],
            [f"learner.micro_batch_tokens={load.longest_row}"],
        ),
    ]


def runs_of(load: Load) -> dict[str, list[str]]:
    """Return the settings of each run, by its name."""
    every = parts(load)
    everything = [word for part in every for word in part.with_it]
    nothing = [word for part in every for word in part.without]
    found = {"nothing": nothing, "all": everything}
    for part in every:
        found[f"only {part.name}"] = [*nothing, *part.with_it]
        found[f"without {part.name}"] = [*everything, *part.without]
    for alpha in OTHER_ALPHAS:
        found[f"all, alpha {alpha}"] = [*everything, f"scheduler.async_ratio={alpha}"]
    return found


def speedup(runs: Mapping[str, Sequence[Mapping[str, Any]]], slow: str, fast: str) -> dict[str, float]:
    """Return how many times as long `slow` took as `fast`, seed by seed: the mean, the smallest and the largest."""
    each = [sum(a["step_s"]) / sum(b["step_s"]) for a, b in zip(runs[slow], runs[fast], strict=True)]
    return {"mean": fmean(each), "low": min(each), "high": max(each)}


def figures(load: Load, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    names = [part.name for part in parts(load)]
    return {
        "all": speedup(runs, "nothing", "all"),
        "alone": {name: speedup(runs, "nothing", f"only {name}") for name in names},
        "removed": {name: speedup(runs, f"without {name}", "all") for name in names},
    }


def shown(figure: Mapping[str, float]) -> str:
    return f"{figure['mean']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def as_markdown(report: Mapping[str, Any]) -> str:
    runs = report["runs"]
    prose = __doc__.split("\n\n")
    lines = [
        f"# What each part earns: {report['of']}",
        "",
        f"`{report['command']}` on {report['machine']}, load {report['load']:.1f} at the start.",
        "",
        " ".join(prose[2].split()),
        "",
        " ".join(prose[3].split()),
        "",
        "| part | alone: times as fast as nothing | removed: all is so many times as fast |",
        "|---|---|---|",
    ]
    found = report["figures"]
    for name, alone in found["alone"].items():
        lines.append(f"| {name} | {shown(alone)} | {shown(found['removed'][name])} |")
    lines.append(f"| all of them | {shown(found['all'])} | |")
    lines += [
        "",
        "| run | s per step | reward of the last quarter of the steps | staleness | dropped as stale, cancelled |",
    ]
    lines.append("|---|---|---|---|---|")
    for name, of_name in runs.items():
        cells = [
            f"{fmean(fmean(run['step_s']) for run in of_name):.2f}",
            f"{fmean(fmean(run['reward'][-max(1, len(run['reward']) // 4) :]) for run in of_name):.3f}",
            f"{fmean(run['staleness_mean'] for run in of_name):.2f}",
            f"{sum(run['dropped_stale'] for run in of_name):.0f}, {sum(run['cancelled'] for run in of_name):.0f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    seeds = len(next(iter(runs.values())))
    lines += [
        "",
        f"Brackets hold the smallest and the largest of {seeds} seeds, each with {report['steps']} steps a run.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="waits")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, three steps; writes nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load = LOADS[options.load]
    steps, seeds = (3, [0]) if options.quick else (options.steps or load.steps, options.seeds)
    report: dict[str, Any] = {
        "benchmark": "ablation",
        "of": options.load,
        "machine": machine(),
        "load": os.getloadavg()[0],
        "command": f"python benchmarks/ablation.py --load {options.load} --steps {steps} --seeds "
        + " ".join(map(str, seeds)),
        "steps": steps,
        "runs": {name: [] for name in runs_of(load)},
    }
    common = [*load.settings, "eval.before_and_after=false", "monitor.tensorboard=false"]
    for seed in seeds:
        with tempfile.TemporaryDirectory() as runs:
            for place, (name, settings) in enumerate(runs_of(load).items()):
                words = [*common, *settings]
                report["runs"][name].append(train(f"{place}-{seed}", seed, steps, words, Path(runs), load.config))
        report["figures"] = figures(load, report["runs"])
        if not options.quick:
            file = RESULTS / f"ablation_{options.load}"
            file.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            file.with_suffix(".md").write_text(as_markdown(report))
    print(json.dumps(report) if options.json else as_markdown(report))


if __name__ == "__main__":
    main()
