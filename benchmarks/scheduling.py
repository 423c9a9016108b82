"""Scheduling policies in virtual time, against the figures of ROLL Flash (arXiv 2510.11345).

    python benchmarks/scheduling.py [--quick] [--json] [--seeds N] [--processes N] [--without-speed]

Every claim is measured with five seeds; figures are their means, with the smallest and the largest beside them. Writes
`results/scheduling.json`, `.md` and the pictures of docs/scheduling.md, unless `--quick`. All but the speed of the
simulation itself is virtual time: the machine and what else it does make no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from scheduling_claims import ACTION, servers, simulate
from scheduling_seeds import Figure, Result, as_dict, measure_all
from synthetic_load import Normal, SyntheticLoad

RESULTS = Path(__file__).parent / "results"
SPEED = "the simulation itself"


def simulation_speed(environments: int, seeds: int) -> Result:
    """How long the simulation itself takes: the only figure here that depends on the machine."""
    on = servers(max(1, environments // 100), 128)
    rates, cpu_s, events = [], [], 0
    for seed in range(seeds):
        load = SyntheticLoad(ACTION, Normal(2, 2), turns=4, slow_share=0.02, seed=seed)
        started_s = time.process_time()
        result = simulate(load, groups=environments // 16, size=8, slots=environments, on=on, alpha=1, steps=2)
        cpu_s.append(time.process_time() - started_s)
        rates.append(60 / cpu_s[-1])
        events = result.events
    row = {"servers": on.count, "environments": environments, "events": events, "CPU (s)": Figure.of(cpu_s)}
    setting = f"{on.count:,} servers, {environments:,} environments at the same time, 2 steps, alpha 1"
    unit, note = "simulations in a minute of CPU", "CPU time, as the machine is shared."
    return Result(SPEED, setting, unit, 1.0, Figure.of(rates), seeds, [row], note)


def as_markdown(results: list[Result]) -> str:
    lines = [
        "# Scheduling, in virtual time",
        "",
        "Made by `python benchmarks/scheduling.py`, which runs the scheduler of a real run under a simulated clock.",
        f"Figures are means over {results[0].seeds} seeds, with the smallest and the largest of them in brackets. A",
        "target is met if every seed reached it.",
        "",
        "| claim | measured | target | met |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {_shown(one.figure, ranged=True)} {one.unit} | {one.target:g} | {one.met} |" for one in results
    ]
    for one in results:
        lines += ["", f"## {one.name[0].upper()}{one.name[1:]}", "", f"{one.setting}.", "", *_table(one.rows)]
        lines += ["", one.note]
    if all(one.name != SPEED for one in results):
        lines += ["", "The speed of the simulation itself was not measured (`--without-speed`)."]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = list(rows[0])
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(_shown(row[name], ranged="speed-up" in name) for name in head) + " |" for row in rows),
    ]


def _shown(value: Any, *, ranged: bool = False) -> str:
    if isinstance(value, Figure):
        if ranged and value.low < value.high:
            return f"{value.mean:.2f} ({value.low:.2f}–{value.high:.2f})"
        return f"{value.mean:.0f}" if abs(value.mean) >= 1000 else f"{value.mean:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small settings, two seeds; writes nothing")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--seeds", type=int, help="default: 5, with --quick 2")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="measurements at a time")
    parser.add_argument("--without-speed", action="store_true", help="all but the speed of the simulation itself")
    options = parser.parse_args()
    seeds = options.seeds or (2 if options.quick else 5)
    results = measure_all(seeds, options.quick, options.processes)
    if not options.without_speed:
        results.append(simulation_speed(2_000 if options.quick else 100_000, seeds))
    claims = {one.name: as_dict(one) for one in results}
    report = {"benchmark": "scheduling", "python": platform.python_version(), "claims": claims}
    if not options.quick:
        import scheduling_plots

        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scheduling.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "scheduling.md").write_text(as_markdown(results))
        scheduling_plots.draw_alpha(results, RESULTS / "scheduling_alpha.png")
        scheduling_plots.draw_gantt(RESULTS / "scheduling_gantt.png")
    print(json.dumps(report) if options.json else as_markdown(results), file=sys.stdout)


if __name__ == "__main__":
    main()
