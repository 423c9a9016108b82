"""Algorithms beside the default: held-out success of the quickstart's model before and after, and the reward by step.

    python benchmarks/algorithms.py [a.b=c ...] [--seeds 0 1] [--only NAME ...] [--quick] [--json]

Trains SmolLM2-135M-Instruct on the quickstart's task once for each algorithm and seed, one run after the other. The
teacher of `distillation` is what the default's run of the same seed ended with. Results are written after each run, to
`results/algorithms.{json,md,png}`, and replace those of the same algorithm and seed; others stay, with the machine that
they come from. `--quick` trains the tiny model for two steps and writes nothing. 7 to 12 minutes for each run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from options import parse
from quickstart import train

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from roll_flash.monitor.metrics import REWARD  # noqa: E402
from roll_flash.run.results import Run  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
QUICKSTART = "configs/quickstart.yaml"
TIS_TOPR = ["learner.loss.name=tis_topr", "learner.betas=[0.5,0.95]"]
ALGORITHMS: dict[str, tuple[str, list[str]]] = {
    "default": (QUICKSTART, []),
    "critic": ("configs/recipes/critic.yaml", []),
    "distillation": ("configs/recipes/distill.yaml", []),
    "turn ratio": (QUICKSTART, ["learner.loss.correction_level=turn"]),
    "m2po": (QUICKSTART, ["learner.loss.name=m2po"]),
    "default, fresh data": (QUICKSTART, ["scheduler.async_ratio=0"]),
    "default, age 4": (QUICKSTART, ["scheduler.async_ratio=4"]),
    "tis_topr": (QUICKSTART, TIS_TOPR),
    "tis_topr, age 4": (QUICKSTART, [*TIS_TOPR, "scheduler.async_ratio=4"]),
}
"""Configuration and overrides."""
QUICK = ["model.path=tiny", "steps=2", "eval.tasks=4"]


def measure(name: str, seed: int, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Train once and return what the page shows of it."""
    config, settings = ALGORITHMS[name]
    if name == "distillation":
        settings = [f"distill.teacher.model={runs / 'default' / f'seed{seed}' / 'model'}"]
    summary = train(config, seed, str(runs / name), [*settings, *overrides])
    return {
        "algorithm": name,
        "seed": seed,
        "machine": machine(),
        "before": summary["before"]["success"],
        "after": summary["after"]["success"],
        "held_out_tasks": summary["after"]["tasks"],
        "training_minutes": summary["seconds"] / 60,
        "rewards": [row[REWARD] for row in Run(runs / name / f"seed{seed}").metrics() if REWARD in row],
    }


def as_page(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Algorithms on the quickstart's task",
        "",
        "`python benchmarks/algorithms.py`: SmolLM2-135M-Instruct, ShellMath; held-out success with its 95 % interval.",
        "The teacher of the distillation is the model of the default's run of the same seed; it sees no rewards.",
        "",
        "| algorithm | seed | before | after | steps | mean reward of the steps | minutes of training | machine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = (f"{x['value']:.2f} [{x['low']:.2f}, {x['high']:.2f}]" for x in (row["before"], row["after"]))
        lines.append(
            f"| {row['algorithm']} | {row['seed']} | {before} | {after} | {len(row['rewards'])} | "
            f"{fmean(row['rewards']):.2f} | "
            f"{row['training_minutes']:.1f} | {row['machine']} |"
        )
    return "\n".join([*lines, "", "![Mean reward of a step](algorithms.png)", ""])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean reward by step, one panel for each algorithm, one line for each seed."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    figure = Figure(figsize=(2.6 * len(names), 2.6), dpi=130, layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        for row in (row for row in rows if row["algorithm"] == name):
            panel.plot(range(1, len(row["rewards"]) + 1), row["rewards"], label=f"seed {row['seed']}")
        panel.set(title=name, xlabel="step", ylim=(0, 1.02))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    first = figure.axes[0]
    first.set_ylabel("mean reward")
    first.legend()
    figure.savefig(path)


def save(row: dict[str, Any]) -> None:
    path = RESULTS / "algorithms.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [other for other in rows if (other["algorithm"], other["seed"]) != (row["algorithm"], row["seed"])]
    rows = sorted([*rows, row], key=lambda row: (list(ALGORITHMS).index(row["algorithm"]), row["seed"]))
    path.write_text(json.dumps({"machine": row["machine"], "rows": rows}, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_page(rows))
    draw(rows, path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options, keys = parse(parser)
    only = {*options.only, *(["default"] if "distillation" in options.only else [])}  # the teacher
    names = [name for name in ALGORITHMS if name in only]
    overrides = [*(QUICK if options.quick else ()), *keys]
    rows = []
    with tempfile.TemporaryDirectory() as runs:
        for seed in [0] if options.quick else options.seeds:
            for name in names:
                rows.append(measure(name, seed, Path(runs), overrides))
                if not options.quick:
                    save(rows[-1])
    print(json.dumps({"rows": rows}) if options.json else as_page(rows))


if __name__ == "__main__":
    main()
