"""What it costs to watch a run, and what its journal costs: writes results/monitoring.{json,md} or journal.{json,md}.

    python benchmarks/monitoring.py [--of watching|journal] [--quick] [--pairs N] [--steps N]

Runs of the tiny model alternate: one as users have it, one without a part of it. Real Ray, real vLLM, the real learner;
environments that wait (benchmarks/latency_env.py), as many episodes as two cores can bear. Compared are trained
episodes per second after the first quarter of the steps, and the processor time of the driver.
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

from roll_flash.processes.supervise import end_with_parent

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RUN_TIMEOUT_S = 900
GOAL = 0.02
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
"""Student's t for 95 %, by degrees of freedom."""
PARTS = {
    "watching": "Left out is what only watches: the live figures and `status.json`, the live diagnosis, TensorBoard. "
    "Metrics, episodes and journal are written in both.",
    "journal": "Left out is the journal: decisions of scheduler and learner, and the finished turns that workers send. "
    "Episodes are written in both.",
}
WORDS = (
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


def train(steps: int, runs: str, without: str) -> dict[str, float]:
    """Train in this process, without one of PARTS or with all (``), and measure it."""
    sys.path.insert(0, str(ROOT))
    from roll_flash import load_config, train
    from roll_flash.diagnosis import LiveDiagnosis
    from roll_flash.monitor.progress import Progress
    from roll_flash.rollout.episode_log import EpisodeLog
    from roll_flash.system import system

    if without == "watching":

        async def no_figures(*_: object) -> None:
            """Stands for `_show_live_figures`."""

        system._show_live_figures = no_figures
        LiveDiagnosis.step = lambda *_: []  # type: ignore[method-assign]
        Progress.show = Progress.status = lambda *_, **__: None  # type: ignore[method-assign]
    env_id = "MockLatency-v0"
    if without == "journal":
        env_id = "MockLatencyAnew-v0"  # of which workers send no turns
        EpisodeLog.note = EpisodeLog.begin_journal = lambda *_: None  # type: ignore[method-assign]
    words = [f"envs.0.id=benchmarks.latency_env:{env_id}", f"monitor.tensorboard={without != 'watching'}"]
    config = load_config(ROOT / "configs/ci.yaml", [*WORDS, *words, f"steps={steps}", f"runs={runs}", "name=run"])
    ends: list[tuple[float, float]] = []
    train(config, on_step=lambda *_: ends.append((time.monotonic(), time.process_time())))
    (began_s, began_cpu_s), (ended_s, ended_cpu_s) = ends[steps // 4], ends[-1]
    episodes = (len(ends) - 1 - steps // 4) * config.scheduler.groups_per_step * config.scheduler.group_size
    return {
        "episodes_per_s": episodes / (ended_s - began_s),
        "driver_cores": (ended_cpu_s - began_cpu_s) / (ended_s - began_s),
        **journal_bytes(config.run_folder),
    }


def journal_bytes(run: Path) -> dict[str, float]:
    """Return the bytes of the decisions in a journal, of the episodes' records, and of the finished turns that it still
    has; and those of the tokens, log-probabilities and versions of these turns, of 4 bytes each."""
    from roll_flash.monitor.episode_files.steps import content_of, step_files
    from roll_flash.rollout.turn_file import framed, read_turns
    from roll_flash.rollout.turns import decode
    from roll_flash.run.journal import journal_files

    turns = read_turns(run / "journal")[0].records()
    return {
        "decision_bytes": sum(path.stat().st_size for path in journal_files(run / "journal").values()),
        "episode_bytes": sum(content_of(path).bytes for path in step_files(run / "episodes")),
        "turn_bytes": sum(len(framed(record)) for record in turns),
        "turn_values_bytes": 12 * sum(len(turn.generation.token_ids) for turn in decode(turns)),
    }


def measure(steps: int, without: str) -> dict[str, float]:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, __file__, "--steps", str(steps), "--child", without, runs]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S, preexec_fn=end_with_parent
        )
    if done.returncode:
        sys.exit(f"the run ended with exit code {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(pairs: int, steps: int, part: str) -> dict[str, Any]:
    """Alternate runs; which of a pair comes first alternates too."""
    rows: list[dict[str, Any]] = []
    for pair in range(pairs):
        row: dict[str, Any] = {"load_before": os.getloadavg()[0]}
        for without in ("", part) if pair % 2 == 0 else (part, ""):
            row["off" if without else "on"] = measure(steps, without)
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
    slower, cores, part = report["slower"], report["driver_cores"], report["part"]
    title = {"watching": "What it costs to watch a run", "journal": "What the journal of a run costs"}[part]
    lines = [
        f"# {title}",
        "",
        f"`python benchmarks/monitoring.py --of {part} --pairs {len(report['rows'])} --steps {report['steps']}` on "
        f"{report['machine']}.",
        "",
        f"{' '.join(__doc__.split(chr(10) * 2)[2].split())} {PARTS[part]}",
        "",
        f"| pair | episodes/s with {part} | without | driver's cores with {part} | without | load before it |",
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
        f"With {part}, runs are slower by {_shown(slower, '.1%')} (goal at most {GOAL:.0%}). The driver uses "
        f"{_shown(cores, '.3f')} cores more, {cores['mean'] / (os.cpu_count() or 1):.1%} of the machine: what it costs "
        "where processors are the limit.",
    ]
    if part == "journal":
        sums = {name: sum(row["on"][name] for row in report["rows"]) for name in report["rows"][0]["on"]}
        lines += [
            "",
            f"Its decisions take {sums['decision_bytes'] / sums['episode_bytes']:.1%} of the bytes of the episodes' "
            "records. Until the next checkpoint, a finished turn takes "
            f"{sums['turn_bytes'] / sums['turn_values_bytes']:.2f} times the bytes of its tokens, log-probabilities "
            "and versions (4 bytes each).",
        ]
    return "\n".join(lines) + "\n"


def _shown(found: dict[str, float | None], form: str) -> str:
    if found["low"] is None:
        return f"{found['mean']:{form}}"
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=PARTS, default="watching", help="what is left out of each second run")
    parser.add_argument("--quick", action="store_true", help="one pair, few steps; writes nothing")
    parser.add_argument("--pairs", type=int, choices=range(1, 9), help="default: 5, with --quick 1")
    parser.add_argument("--steps", type=int, help="default: 16, with --quick 4")
    parser.add_argument("--child", nargs=2, metavar=("WITHOUT", "RUNS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (4 if options.quick else 16)
    if options.child:
        without, runs = options.child
        print(json.dumps(train(steps, runs, without)))
        return
    pairs = options.pairs or (1 if options.quick else 5)
    name = "monitoring" if options.of == "watching" else options.of
    report = {"benchmark": name, "part": options.of, "machine": machine(), "steps": steps}
    report |= compare(pairs, steps, options.of)
    if not options.quick:
        (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    main()
