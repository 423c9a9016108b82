"""Scheduling policies in virtual time, against the figures of ROLL Flash (arXiv 2510.11345).

    python benchmarks/scheduling.py [--quick] [--json]

Writes `results/scheduling.json`, `.md` and the pictures of docs/scheduling.md, unless `--quick`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scheduling_claims import (
    ACTION,
    Claim,
    asynchronous_ratio,
    environment_asynchrony,
    papers_bound,
    queue_against_batch,
    redundant_environments,
    replication,
    servers,
    simulate,
    stragglers,
)

from roll_flash.planner.distributions import Normal
from roll_flash.planner.load import SyntheticLoad

RESULTS = Path(__file__).parent / "results"


def large_cluster(environments: int) -> Claim:
    """How long the simulation itself takes."""
    load = SyntheticLoad(ACTION, Normal(2, 2), turns=4, slow_share=0.02)
    started, cpu = time.perf_counter(), time.process_time()
    on = servers(max(1, environments // 100), 128)
    groups = environments // 16
    result = simulate(load, groups=groups, size=8, slots=environments, on=on, alpha=1, steps=2)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    row = {
        "servers": on.count,
        "environments": environments,
        "events": result.events,
        "trained episodes": result.trained_episodes,
        "virtual time (s)": result.elapsed_s,
        "wall (s)": wall_s,
        "CPU (s)": cpu_s,
    }
    setting = f"{on.count:,} servers, {environments:,} environments at the same time, 2 steps, alpha 1"
    note = "CPU time, as the machine is shared; on an idle one wall time is the same."
    return Claim("the simulation itself", setting, 60 / cpu_s, 1.0, "simulations in a minute of CPU", [row], note)


def measure(quick: bool) -> list[Claim]:
    steps = 3 if quick else 12
    return [
        queue_against_batch(4 * steps),
        replication(1 if quick else 12),
        environment_asynchrony(1 if quick else 8),
        redundant_environments(2 * steps),
        asynchronous_ratio(4 * steps),
        asynchronous_ratio(4 * steps, "wait"),
        papers_bound(30 if quick else 300),
        stragglers(2 * steps),
        large_cluster(2_000 if quick else 100_000),
    ]


def as_markdown(claims: list[Claim]) -> str:
    lines = [
        "# Scheduling, in virtual time",
        "",
        "Made by `python benchmarks/scheduling.py`: the scheduler that trains, under a simulated clock.",
        "",
        "| claim | measured | target | met |",
        "|---|---|---|---|",
    ]
    for claim in claims:
        met = "yes" if claim.met else "no"
        lines.append(f"| {claim.name} | {claim.figure:.2f} {claim.unit} | {claim.target:g} | {met} |")
    for claim in claims:
        lines += ["", f"## {claim.name[0].upper()}{claim.name[1:]}", "", f"{claim.setting}.", "", *_table(claim.rows)]
        if claim.note:
            lines += ["", claim.note]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = list(rows[0])
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(_shown(row[name]) for name in head) + " |" for row in rows),
    ]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def as_json(claims: list[Claim], elapsed_s: float) -> dict[str, Any]:
    return {
        "benchmark": "scheduling",
        "python": platform.python_version(),
        "elapsed_s": elapsed_s,
        "claims": {claim.name: {**asdict(claim), "met": claim.met} for claim in claims},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small settings, within a minute; writes nothing")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    options = parser.parse_args()
    started = time.perf_counter()
    claims = measure(options.quick)
    report = as_json(claims, time.perf_counter() - started)
    if not options.quick:
        import scheduling_plots

        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scheduling.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "scheduling.md").write_text(as_markdown(claims))
        scheduling_plots.draw_alpha(claims, RESULTS / "scheduling_alpha.png")
        scheduling_plots.draw_gantt(RESULTS / "scheduling_gantt.png")
    print(json.dumps(report) if options.json else as_markdown(claims), file=sys.stdout)


if __name__ == "__main__":
    main()
