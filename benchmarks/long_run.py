"""Does a long run grow? Memory, file descriptors, threads, /dev/shm and time per step over thousands of steps.

    python benchmarks/long_run.py [--steps 2000] [--quick] [--json] [a.b=c ...]

A run of the tiny model (configs/ci.yaml, the engine for tiny models) with environments that wait
(benchmarks/latency_env.py), checkpoints every 100 steps, and 64 MiB for episodes and journal, is watched from outside.
The first quarter of the steps is left out: caches fill. The rest is cut into 20 parts of equal length; a line through
their means has the growth per 1,000 steps, with its 95 % interval (Student's t). Flat is what has 0 in its interval. At
its end `roll-flash verify` must find nothing. /dev/shm is that of the machine: let nothing else use it. Results go to
results/long_run.{json,md}, those of --quick nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from machine import machine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from roll_flash.monitor.metrics import STEP_S, read_metrics  # noqa: E402
from roll_flash.processes.supervise import end_with_parent  # noqa: E402

RESULTS = Path(__file__).parent / "results"
STEPS, QUICK_STEPS = 2000, 60
EVERY_S, QUICK_EVERY_S = 5.0, 0.5
"""Seconds between two looks."""
PARTS_OF_STEPS = 20
LEAST_STEPS = 54
"""The last three quarters have two for each part."""
T_95 = 2.101
"""Student's t for 95 % and PARTS_OF_STEPS - 2 degrees of freedom."""
CLOSING_S = 120.0
"""Maximum seconds until an interrupted run has written its checkpoint and closed."""
STEP_TIMEOUT_S = 900.0
"""Maximum seconds until the next step; a start takes a minute."""
EPISODES_GIB = 1 / 16
MIB = 1 << 20
PARTS = {
    "driver": "-m roll_flash train",
    "workers": "ray::WorkerActor",
    "learner": "ray::RankActor",
    "servers": "roll_flash.inference.",
    "Ray": "/ray/",
}
"""What the command lines of a part's processes contain; the first that fits counts."""
SETTINGS = (
    "envs=[{id: 'benchmarks.latency_env:MockLatency-v0', max_turns: 2, kwargs: {turns: 2}}]",
    "inference.engine=transformers",
    "rollout.max_concurrent=12",
    "eval.before_and_after=false",
    "checkpoint.every=100",
    f"monitor.episodes_gib={EPISODES_GIB}",
)


def part_of(command: str) -> str:
    return next((part for part, text in PARTS.items() if text in command), "others")


def memory_mib(pid: int) -> float:
    """Return the memory of a process that is of no file, each page shared out over its processes. Raises OSError."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024


def look(process: psutil.Process) -> dict[str, float]:
    """Return what the processes of a run have now. Memory is that of no file, each page shared out over its processes:
    pages of libraries count for less while processes outside of the run have them too."""
    found: dict[str, float] = defaultdict(float)
    for each in [process, *process.children(recursive=True)]:
        try:
            memory = memory_mib(each.pid)
            command, descriptors, threads = " ".join(each.cmdline()), each.num_fds(), each.num_threads()
        except (psutil.Error, OSError):  # it has just ended
            continue
        found[f"memory of {part_of(command)}, MiB"] += memory
        found["memory of all, MiB"] += memory
        found["file descriptors"] += descriptors
        found["threads"] += threads
        found[f"threads of {part_of(command)}"] += threads
        found["processes"] += 1
    shm = os.statvfs("/dev/shm")
    found["/dev/shm, MiB"] = (shm.f_blocks - shm.f_bfree) * shm.f_frsize / MIB
    return found


def watch(run: subprocess.Popen[bytes], metrics: Path, every_s: float) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, what there is) until the run ends."""
    process, step, moved_s = psutil.Process(run.pid), 0, time.monotonic()
    while run.poll() is None:
        now = metrics.read_bytes().count(b'"step_s"') if metrics.exists() else 0
        if now > step:
            step, moved_s = now, time.monotonic()
        if time.monotonic() - moved_s > STEP_TIMEOUT_S:
            sys.exit(f"no step after {step} within {STEP_TIMEOUT_S:g} s")
        if step:
            yield step, look(process)
        time.sleep(every_s)


def growth(steps: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Return the mean of the values, and their growth per 1,000 steps with its 95 % interval. Needs two values for each
    of PARTS_OF_STEPS."""
    count, cuts = len(values), range(PARTS_OF_STEPS)
    if count < 2 * PARTS_OF_STEPS:
        raise ValueError(f"{count} values are too few: {2 * PARTS_OF_STEPS} are needed")
    bounds = [(part * count // PARTS_OF_STEPS, (part + 1) * count // PARTS_OF_STEPS) for part in cuts]
    x, y = ([fmean(series[begin:end]) for begin, end in bounds] for series in (steps, values))
    middle, mean = fmean(x), fmean(y)
    spread = sum((each - middle) ** 2 for each in x)
    slope = sum((each - middle) * (value - mean) for each, value in zip(x, y, strict=True)) / spread
    left = sum((value - mean - slope * (each - middle)) ** 2 for each, value in zip(x, y, strict=True))
    half = T_95 * (left / (PARTS_OF_STEPS - 2) / spread) ** 0.5
    return {"level": mean, "mean": 1000 * slope, "low": 1000 * (slope - half), "high": 1000 * (slope + half)}


def is_flat(found: dict[str, float]) -> bool:
    return found["low"] <= 0 <= found["high"]


def measure(steps: int, every_s: float, words: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as runs:
        folder = Path(runs, "run")
        command = [sys.executable, "-m", "roll_flash", "train", "configs/ci.yaml", "name=run", f"runs={runs}"]
        command += [*SETTINGS, f"steps={steps}", *words]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent) as run:
            try:
                seen = list(watch(run, folder / "metrics.jsonl", every_s))
            finally:
                run.terminate()
                run.wait(CLOSING_S)  # its folder is removed next
        if run.returncode:
            sys.exit(f"the run ended with exit code {run.returncode} after {seen[-1][0] if seen else 0} steps")
        verify = [sys.executable, "-m", "roll_flash", "verify", str(folder)]
        verified = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True, check=False)
        if verified.returncode:
            sys.exit(f"verify: {verified.stdout}{verified.stderr}")
        rows = [row for row in read_metrics(folder) if STEP_S in row]
        series = {"time per step, s": [(int(row["step"]), float(row[STEP_S])) for row in rows]}
        for name in sorted({name for _, found in seen for name in found}):
            series[name] = [(step, found.get(name, 0.0)) for step, found in seen]
        settled = {name: [pair for pair in pairs if pair[0] > steps // 4] for name, pairs in series.items()}
        return {
            "figures": {name: growth(*zip(*pairs, strict=True)) for name, pairs in settled.items()},
            "looks": len(seen),
            "episodes_gib": rows[-1]["machine/episodes_gib"],
            "removed_steps": rows[-1]["machine/episodes_removed_steps"],
            "other_kb_per_step": _other_bytes(folder) / steps / 1000,
            "verified": verified.stdout.splitlines(),
        }


def _other_bytes(folder: Path) -> int:
    """Return the bytes of metrics and logs: what grows without a bound."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    bounded = ("episodes", "journal", "checkpoints", "model")
    return sum(path.stat().st_size for path in files if path.relative_to(folder).parts[0] not in bounded)


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        "# A long run",
        "",
        f"`{report['command']}` on {report['machine']}, load {report['load']:.1f} at the start.",
        "",
        " ".join(__doc__.split("\n\n")[2].split()),
        "",
        "| figure | mean | growth per 1,000 steps, 95 % | flat |",
        "|---|---|---|---|",
    ]
    for name, found in report["figures"].items():
        shown = f"{found['mean']:+.3g} [{found['low']:+.3g}, {found['high']:+.3g}]"
        lines.append(f"| {name} | {found['level']:.4g} | {shown} | {'yes' if is_flat(found) else 'no'} |")
    lines += [
        "",
        f"Episodes and journal took {report['episodes_gib']:.4f} GiB at the end, with `monitor.episodes_gib` "
        f"{EPISODES_GIB:g}; those of {report['removed_steps']:g} steps were removed. Metrics and logs grew by "
        f"{report['other_kb_per_step']:.1f} KB per step. `roll-flash verify`:",
        "",
        "```text",
        *report["verified"],
        "```",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, with --quick {QUICK_STEPS}")
    parser.add_argument("--quick", action="store_true", help="few steps; writes nothing")
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    if steps < LEAST_STEPS:
        parser.error(f"--steps {steps}: at least {LEAST_STEPS}")
    about = {"benchmark": "long_run", "machine": machine(), "load": os.getloadavg()[0], "steps": steps}
    report = {**about, "command": " ".join(["python benchmarks/long_run.py --steps", str(steps), *words])}
    report |= measure(steps, QUICK_EVERY_S if options.quick else EVERY_S, words)
    if not options.quick:
        (RESULTS / "long_run.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "long_run.md").write_text(as_markdown(report))
    print(json.dumps(report) if options.json else as_markdown(report))


if __name__ == "__main__":
    main()
