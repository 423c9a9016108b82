"""Start and step time of one run on this machine in two revisions of this project, in turns.

    python benchmarks/revisions.py BEFORE [AFTER] [--rounds 5] [--quick] [--output FOLDER] [a.b=c ...]

BEFORE and AFTER (default HEAD) are revisions of git; both run with this Python and its packages. The run is
configs/ci.yaml of each with an environment without sandboxes: the tiny model, so that what the machinery costs shows. A
step is the median between two steps of a run. Differences are between neighbours in time, AFTER against BEFORE, with
their 95 % interval (bootstrap). Results go to `results/revisions.{json,md}`, those of `--quick` nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from roll_flash.evaluation.comparison import estimate_difference  # noqa: E402
from roll_flash.processes.supervise import end_with_parent  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
STEPS, RUN_TIMEOUT_S = 120, 1800.0
SETTINGS = ["envs=[{id: TextFrozenLake-v0, max_turns: 4}]", "rollout.max_concurrent=16", "rollout.max_new_tokens=16"]


def measure(project: Path, runs: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """Seconds from the command to the first step's end, and of a step."""
    metrics = Path(runs) / "run/metrics.jsonl"
    command = [sys.executable, "-m", "roll_flash", "train", "configs/ci.yaml", "name=run", f"runs={runs}"]
    settings = [*SETTINGS, f"steps={steps}", "eval.before_and_after=false", *overrides]
    began, ends = time.perf_counter(), list[float]()
    with subprocess.Popen(
        [*command, *settings], cwd=project, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent
    ) as run:
        while run.poll() is None:
            done = metrics.read_text().count('"step_s"') if metrics.exists() else 0
            now = time.perf_counter() - began
            ends += [now] * (done - len(ends))
            if now > RUN_TIMEOUT_S:
                run.kill()
            time.sleep(0.02)
    if run.returncode or len(ends) != steps:
        sys.exit(f"the run of {project} ended with exit code {run.returncode} after {len(ends)} of {steps} steps")
    return {
        "start_s": ends[0],
        "step_s": statistics.median(after - before for before, after in pairwise(ends[1:])),
    }


def revision(name: str) -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", name], cwd=ROOT, text=True).strip()


def as_page(result: dict[str, Any]) -> str:
    lines = [
        "# Two revisions on one machine",
        "",
        f"{result['machine']}, load {result['load']:.1f} at the start. `{result['command']}` makes this page.",
        "",
        f"| | {result['before']} | {result['after']} | difference of neighbours, 95 % |",
        "|---|---|---|---|",
    ]
    for name in ("start_s", "step_s"):
        before, after = ([each[name] for each in result["runs"][side]] for side in ("before", "after"))
        changes = [100 * (new / old - 1) for old, new in zip(before, after, strict=True)]
        found = estimate_difference(changes)
        lines.append(
            f"| {name.replace('_s', ', seconds')} | {statistics.mean(before):.3f} | {statistics.mean(after):.3f} | "
            f"{found.value:+.1f} % [{found.low:+.1f}, {found.high:+.1f}] |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE")
    parser.add_argument("after", metavar="AFTER", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, overrides = parser.parse_known_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rounds, steps = (2, 4) if options.quick else (options.rounds, STEPS)
    names = {"before": revision(options.before), "after": revision(options.after)}
    result: dict[str, Any] = {
        **names,
        "machine": machine(),
        "load": os.getloadavg()[0],
        "command": f"python benchmarks/revisions.py {names['before']} {names['after']}",
        "runs": {"before": [], "after": []},
    }
    with tempfile.TemporaryDirectory() as folder:
        for side, name in names.items():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{folder}/{side}"], check=True)
            subprocess.run(["git", "-C", f"{folder}/{side}", "checkout", "--quiet", name], check=True)
        for number in range(rounds):
            for side in ("before", "after") if number % 2 == 0 else ("after", "before"):
                found = measure(Path(folder, side), f"{folder}/runs-{side}-{number}", steps, overrides)
                print(f"round {number + 1} of {rounds}, {side}: {found}", file=sys.stderr, flush=True)
                result["runs"][side].append(found)
    page = as_page(result)
    print(page)
    if not options.quick:
        (options.output / "revisions.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "revisions.md").write_text(page)


if __name__ == "__main__":
    main()
