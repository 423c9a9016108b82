"""`roll-flash plan --from RUN` against reality: a run of the tiny model predicts others, which then happen.

    python benchmarks/plan.py [--quick] [--runs FOLDER] [--steps N]

Real Ray, real vLLM, the real learner, environments that only wait (benchmarks/latency_env.py), on this machine's cores.
The first setting is measured; from its folder alone five others are predicted, which differ in alpha, concurrency,
servers or redundancy. Then all are run: the error of the time of a step, whether it lies in its predicted interval, and
how the setting that the plan finds best does against the best of the six. Results go to `results/plan.{json,md}`; about
20 minutes with the default of 16 steps.

With `--runs` the run folders are kept there, and those that exist are not run again: so a change of the plan is
compared with the same runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import machine

from roll_flash.config.tree import load_config
from roll_flash.monitor.metrics import LEARNER_IDLE, SERVERS_IDLE, STALENESS_MEAN, STEP_S, read_metrics
from roll_flash.planner.measured.replay import calibrated
from roll_flash.planner.prediction import Figure, predict
from roll_flash.planner.search import Candidate, ranked
from roll_flash.processes.supervise import end_with_parent

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RUN_TIMEOUT_S, LOAD_BEFORE = 1800, "load_before"
STEP_ERROR, CHOICE = 0.1, 0.95
"""Goals: the relative error of the time of a step; speed of the plan's choice against the best of the grid."""
COMMON = (
    "envs.0.id=benchmarks.latency_env:MockLatency-v0",
    "envs.0.max_turns=4",
    "model.max_length=384",
    "scheduler.groups_per_step=8",
    "scheduler.group_size=6",
    "rollout.max_new_tokens=24",
    # The episodes of all runs are alike: the policy hardly changes.
    "learner.learning_rate=1e-7",
    "eval.before_and_after=false",
    "monitor.tensorboard=false",
    "checkpoint.every_minutes=0",
)


@dataclass(frozen=True)
class Setting:
    alpha: int
    concurrent: int
    servers: int
    groups: int = 0
    replicas: int = 0

    @property
    def name(self) -> str:
        redundant = f"-extra{self.groups}x{self.replicas}" if self.groups or self.replicas else ""
        return f"alpha{self.alpha}-slots{self.concurrent}-servers{self.servers}{redundant}"

    @property
    def words(self) -> list[str]:
        return [
            f"scheduler.async_ratio={self.alpha}",
            f"rollout.max_concurrent={self.concurrent}",
            f"inference.servers={self.servers}",
            f"scheduler.extra_groups={self.groups}",
            f"scheduler.extra_replicas={self.replicas}",
        ]


MEASURED = Setting(1, 64, 1)
GRID = [
    MEASURED,
    Setting(0, 64, 1),
    Setting(2, 64, 1),
    Setting(1, 24, 1),
    Setting(1, 64, 2),
    Setting(0, 64, 1, 2, 1),
]
QUICK = [MEASURED, Setting(0, 24, 1)]


def train(setting: Setting, runs: Path, steps: int) -> Path:
    """Run a setting in a process of its own, unless that was done before; return its folder."""
    folder = runs / setting.name
    if (folder / "summary.json").is_file():
        return folder
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "roll_flash", "train", "configs/ci.yaml", f"name={setting.name}", f"runs={runs}"]
    words = [*COMMON, *setting.words, f"steps={steps}"]
    done = subprocess.run(
        [*command, *words, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=RUN_TIMEOUT_S,
        preexec_fn=end_with_parent,
    )
    if done.returncode != 0:
        sys.exit(f"the run {setting.name} ended with exit code {done.returncode}")
    (folder / LOAD_BEFORE).write_text(str(load))
    return folder


def measured(folder: Path) -> dict[str, float]:
    """Means over the steps of a run without the first quarter, in which it fills up, as in a prediction."""
    rows = [row for row in read_metrics(folder) if row.get(STEP_S) is not None]
    rows = rows[len(rows) // 4 :]
    step_s = [row[STEP_S] for row in rows]
    return {
        "step_s": fmean(step_s),
        "step_s_error": 2 * stdev(step_s) / len(step_s) ** 0.5 if len(step_s) > 1 else 0.0,
        "episodes_per_s": fmean(row["episodes"] for row in rows) / fmean(step_s),
        "learner_idle": fmean(row[LEARNER_IDLE] for row in rows),
        "no_episodes": fmean(row[SERVERS_IDLE] for row in rows),
        "staleness_mean": fmean(row[STALENESS_MEAN] for row in rows),
    }


def compare(settings: list[Setting], runs: Path, steps: int) -> dict[str, Any]:
    """Calibrate with the first setting's run, predict the others, and compare with what their runs took."""
    for setting in settings:
        began_s = time.monotonic()
        train(setting, runs, steps)
        print(f"{setting.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    calibration, _, replayed = calibrated(runs / MEASURED.name)
    rows, candidates = [], []
    for setting in settings:
        config = load_config(ROOT / "configs/ci.yaml", [*COMMON, *setting.words, f"steps={steps}"])
        prediction, real = predict(config, calibration), measured(runs / setting.name)
        if prediction.problem:
            sys.exit(f"{setting.name} is predicted to end early, which it did not: {prediction.problem}")
        figures = {name: figure.value for name, figure in prediction.figures.items()}
        candidates.append(Candidate((setting.name,), config, figures))
        rows.append(
            {
                "setting": setting.name,
                "is_calibration": setting == MEASURED,
                "load_before": float((runs / setting.name / LOAD_BEFORE).read_text()),
                "measured": real,
                "predicted": {name: asdict(figure) for name, figure in prediction.figures.items()},
                "error": prediction["step_s"].value / real["step_s"] - 1,
                "inside": _inside(prediction["step_s"], real["step_s"]),
            }
        )
    (choice,) = ranked(candidates)[0].words
    return summary(rows, choice, calibration.error, replayed.step_s)


def _inside(figure: Figure, value: float) -> bool:
    return figure.low <= value <= figure.high


def summary(rows: list[dict[str, Any]], choice: str, error: float, replayed_step_s: float) -> dict[str, Any]:
    unseen = [row for row in rows if not row["is_calibration"]]
    errors = sorted(abs(row["error"]) for row in unseen)
    speeds = {row["setting"]: row["measured"]["episodes_per_s"] for row in rows}
    return {
        "calibration_error": error,
        "replayed_step_s": replayed_step_s,
        "mean_error": fmean(errors),
        "largest_error": errors[-1],
        "within_goal": sum(error <= STEP_ERROR for error in errors),
        "unseen": len(unseen),
        "inside_interval": sum(row["inside"] for row in unseen),
        "choice": choice,
        "choice_of_best": speeds[choice] / max(speeds.values()),
        "rows": rows,
    }


def as_markdown(report: dict[str, Any]) -> str:
    words = " ".join(__doc__.split("\n\n")[2].split())
    is_met = report["largest_error"] <= STEP_ERROR
    lines = [
        "# The plan of a run against reality",
        "",
        f"`python benchmarks/plan.py --steps {report['steps']}` on {report['machine']}.",
        "",
        words,
        "",
        "| setting | measured s/step | predicted s/step (95 %) | error | measured episodes/s | load before it |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        predicted, real = row["predicted"]["step_s"], row["measured"]
        name = f"{row['setting']} (measured first)" if row["is_calibration"] else row["setting"]
        lines.append(
            f"| {name} | {real['step_s']:.2f} ± {real['step_s_error']:.2f} | {predicted['value']:.2f} "
            f"({predicted['low']:.2f}–{predicted['high']:.2f}) | {row['error']:+.0%} | {real['episodes_per_s']:.1f} "
            f"| {row['load_before']:.1f} |"
        )
    lines += [
        "",
        f"Of {report['unseen']} settings that were not measured before, {report['within_goal']} are predicted within "
        f"10 %; the mean error is {report['mean_error']:.0%}, the largest {report['largest_error']:.0%} (goal 10 %: "
        f"{'reached' if is_met else 'not reached'}). {report['inside_interval']} lie in their interval.",
        "",
        f"Of these settings the plan would choose {report['choice']}, the freshest of those that it predicts to be "
        f"about as fast. It reaches {report['choice_of_best']:.2f} of the fastest (goal {CHOICE}: "
        f"{'reached' if report['choice_of_best'] >= CHOICE else 'not reached'}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two settings, few steps; writes nothing")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and use those that are there")
    parser.add_argument("--steps", type=int, help="default: 16, with --quick 3")
    options = parser.parse_args()
    steps = options.steps or (3 if options.quick else 16)
    with tempfile.TemporaryDirectory() as temporary:
        runs = (options.runs or Path(temporary)).resolve()
        found = compare(QUICK if options.quick else GRID, runs, steps)
    report = {"benchmark": "plan", "machine": machine(), "steps": steps, **found}
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "plan.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "plan.md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    main()
