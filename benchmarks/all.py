"""Regenerate all of `benchmarks/results/`, and mark what changed.

    python benchmarks/all.py [--quick] [--only NAME ...]

Runs every benchmark after the other, each in a process of its own, and compares the figures that it wrote with those
that were there: a figure with an interval (`low`, `high`) has changed if its new mean is outside the old interval,
another one if it moved by more than a tenth. Changes go to `results/CHANGED.md`; pages that quote such a figure, and
those of `results/*.md` that no benchmark writes, have to be looked at again. `--quick` only shows that each of them
runs: it writes nothing. Timings need a machine that does nothing else; `scheduling` is virtual time but for its last
figure. What other machines measured (GPUs, `sandbox_soak`) stays as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ADAPTERS = HERE.parent / ".venv-adapters/bin/python"
"""Made by `make test-adapters`, and for `make benchmarks` and `make test-nightly`."""
MOVED = 0.1
LONGEST_S = 4 * 3600.0


@dataclass(frozen=True)
class Benchmark:
    """`result` is what it makes in `results/`. Those that write nothing themselves print it with `--json`."""

    result: str
    arguments: tuple[str, ...]
    writes: bool = True
    has_quick: bool = True
    full: tuple[str, ...] = ()
    """Arguments of a run that is not quick."""
    needs_adapters: bool = False
    """It runs in the environment of the adapters' tests, which has the packages that it measures."""
    entry: str = ""
    """Where the result goes in a file that keeps those of several machines; others are left as they are."""


BENCHMARKS = [
    Benchmark("scheduling", ("scheduling.py",)),
    Benchmark("stream", ("stream.py",)),
    Benchmark("staleness", ("staleness.py",), full=("--output", str(RESULTS))),
    Benchmark(
        "staleness_same",
        ("staleness.py", "--task", "same", "--learning-rate", "1e-3"),
        full=("--output", str(RESULTS)),
    ),
    Benchmark("rollout", ("rollout.py",)),
    Benchmark("chaos", ("chaos.py",), full=("--faults", "300")),
    Benchmark(
        "chaos_quickstart_vllm",
        ("chaos.py", "--vllm", "--config", "configs/quickstart.yaml", "--disk-mib", "8000"),
        has_quick=False,
        full=("--faults", "20"),
    ),
    Benchmark("clients", ("clients.py",), writes=False),
    Benchmark("data_rows", ("data_rows.py",), writes=False),
    Benchmark("dashboard", ("dashboard.py",)),
    Benchmark("monitoring", ("monitoring.py",)),
    Benchmark("journal", ("monitoring.py", "--of", "journal")),
    Benchmark("exporters", ("exporters.py",), needs_adapters=True),
    Benchmark("long_run", ("long_run.py",)),
    Benchmark("fault_cost", ("fault_cost.py",)),
    Benchmark("gateway", ("gateway.py",), writes=False),
    Benchmark("sandbox", ("sandbox.py",)),
    Benchmark("evaluate", ("evaluate.py",)),
    Benchmark("weights", ("weights.py",)),
    Benchmark("scaling", ("scaling.py",)),
    Benchmark("revisions", ("revisions.py", "ae67d38")),  # the version before runs could span several nodes
    Benchmark("learner", ("learner.py",), writes=False, entry="benchmarks/all.py"),
    Benchmark("learner_trl", ("learner.py", "--trl"), writes=False, entry="benchmarks/all.py"),
    Benchmark(  # with 32,768 tokens, full logits alone would take 28 GB
        "learner_memory",
        ("learner_memory.py",),
        writes=False,
        full=("--tokens", "8192"),
        entry="benchmarks/all.py",
    ),
    Benchmark("against_trl", ("against_trl.py",)),
    Benchmark("load", ("load.py",), writes=False),
    Benchmark("long_rows", ("long_rows.py",)),
    Benchmark("recipe_twc", ("recipes.py", "twc"), needs_adapters=True),
    Benchmark("recipe_miniwob", ("recipes.py", "miniwob"), needs_adapters=True),
    Benchmark("recipe_reasoning", ("recipes.py", "reasoning"), needs_adapters=True),
    Benchmark("bfcl", ("bfcl.py",), writes=False),
    Benchmark("agents", ("agents.py",), writes=False),
    Benchmark("ablation_waits", ("ablation.py",)),
    Benchmark("plan", ("plan.py",)),
    Benchmark("quickstart", ("quickstart.py",)),
    Benchmark("algorithms", ("algorithms.py",)),
    Benchmark("own_data", ("own_data.py",)),
    Benchmark("end_to_end", ("end_to_end.py",), has_quick=False),
]


@dataclass(frozen=True)
class Change:
    figure: str
    before: float | None
    after: float | None


def run(benchmark: Benchmark, quick: bool) -> str | None:
    """Why it failed, or None."""
    python = str(ADAPTERS) if benchmark.needs_adapters else sys.executable
    command = [python, str(HERE / benchmark.arguments[0]), *benchmark.arguments[1:]]
    command += ["--quick"] if quick else benchmark.full
    command += [] if benchmark.writes else ["--json"]
    try:
        done = subprocess.run(
            command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {LONGEST_S:g} s"
    if done.returncode:
        return f"ended with exit code {done.returncode}"
    if not benchmark.writes and not quick:
        record(benchmark, json.loads(done.stdout[done.stdout.index("{") :]))
    return None


def record(benchmark: Benchmark, printed: Any) -> None:
    file = RESULTS / f"{benchmark.result}.json"
    printed = {"machine": machine(), **printed}
    if benchmark.entry:
        others = json.loads(file.read_text()) if file.exists() else {}
        printed = {**others, benchmark.entry: printed}
    file.write_text(json.dumps(printed, indent=1, ensure_ascii=False) + "\n")


def figures(tree: Any, name: str = "") -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """Name, value and interval of every number of a result."""
    if isinstance(tree, dict) and {"low", "high"} <= tree.keys():
        middle = tree.get("mean", tree.get("median"))
        if isinstance(middle, int | float):
            yield name, float(middle), (float(tree["low"]), float(tree["high"]))
            return
    if isinstance(tree, dict | list):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from figures(part, f"{name} / {key}" if name else str(key))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield name, float(tree), None


def changes(before: Any, after: Any) -> list[Change]:
    """The figures that are not what they were, in the order of `after`; those that came or went are changes too."""
    old = {name: (value, interval) for name, value, interval in figures(before)}
    new = {name: value for name, value, _ in figures(after)}
    found = [Change(name, None, value) for name, value in new.items() if name not in old]
    found += [Change(name, value, None) for name, (value, _) in old.items() if name not in new]
    for name, value in new.items():
        was, interval = old.get(name, (value, None))
        low, high = interval or (was - MOVED * abs(was), was + MOVED * abs(was))
        if not low <= value <= high:
            found.append(Change(name, was, value))
    return found


def table(changed: dict[str, list[Change]], failed: dict[str, str]) -> str:
    lines = ["# What changed", "", "| result | figure | before | after |", "|---|---|---|---|"]
    lines += [f"| {name} | the benchmark failed: {why} | | |" for name, why in failed.items()]
    for name, several in changed.items():
        lines += [f"| {name} | {one.figure} | {_shown(one.before)} | {_shown(one.after)} |" for one in several]
    return "\n".join(lines) + "\n"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="show that each runs; writes nothing")
    parser.add_argument("--only", nargs="+", choices=[one.result for one in BENCHMARKS], help="these results")
    options = parser.parse_args()
    changed: dict[str, list[Change]] = {}
    failed: dict[str, str] = {}
    for benchmark in BENCHMARKS:
        name, file = benchmark.result, RESULTS / f"{benchmark.result}.json"
        if (options.only and name not in options.only) or (options.quick and not benchmark.has_quick):
            continue
        before, began_s = json.loads(file.read_text()) if file.exists() else {}, time.monotonic()
        if (why := run(benchmark, options.quick)) is not None:
            failed[name] = why
        elif not options.quick:
            changed[name] = changes(before, json.loads(file.read_text()))
        told = failed.get(name) or (f"{len(changed[name])} figures changed" if name in changed else "runs")
        print(f"{name}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
    text = table(changed, failed)
    if not options.quick:
        (RESULTS / "CHANGED.md").write_text(text)
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
