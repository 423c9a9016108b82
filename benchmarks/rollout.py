"""The rollout engine under load, beside verifiers and a bare loop, in one run.

    python benchmarks/rollout.py [--quick] [--json]

Token servers are mocks that answer after 50 ms (`mock_token_server.py`); all else is what a training run uses, see
`rollout_engine.py`. Prints a table (to standard error with --json, which prints one object of figures on standard
output) and, unless --quick, writes results/rollout.json and results/rollout.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import machine
from rollout_engine import Load, Measured, answer_token_ids, measure, mock_servers
from rollout_env import TURNS
from rollout_peers import VERIFIERS_VERSION, bare_loop, verifiers

RESULTS = Path(__file__).parent / "results"
LATENCY_S = 0.05
MAIN = 512
LARGEST = 10_000
BLOCKING = "rollout_env:FourTurnsBlocking-v0"
LOADS = (Load(128, 12, 1), Load(MAIN, 8, 1), Load(2048, 3, 1), Load(LARGEST, 1, 1))
QUICK_LOADS = (Load(MAIN, 2, 1),)
VERIFIERS_ROLLOUTS = 768
VERSIONS = ("ray", "uvloop", "tokenizers", "aiohttp", "gymnasium")


@dataclass(frozen=True)
class Target:
    """One row of the summary. `target` is an upper bound unless `at_least`."""

    name: str
    value: float | None
    target: float
    unit: str
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "yes" if (self.value >= self.target if self.at_least else self.value <= self.target) else "no"


def run(quick: bool) -> dict[str, list[Measured]]:
    """All columns. The peers follow at once on the load that they are compared with."""
    columns: dict[str, list[Measured]] = {"ours": []}
    for load in QUICK_LOADS if quick else LOADS:
        columns["ours"].append(_ours(load))
        if load.concurrent == MAIN:
            columns |= _peers(quick)
    if not quick:
        columns["blocking environment"] = [_ours(Load(MAIN, 4, 1, BLOCKING))]
    return columns


def _peers(quick: bool) -> dict[str, list[Measured]]:
    with mock_servers(1, LATENCY_S, answer_token_ids()) as servers:
        columns = {"bare loop": [bare_loop(servers[0][0], MAIN, 2 * MAIN if quick else 8 * MAIN)]}
        if not quick and (peer := verifiers(servers[0][0], MAIN, VERIFIERS_ROLLOUTS)) is not None:
            columns[f"verifiers {VERIFIERS_VERSION}"] = [peer]
    return columns


def _ours(load: Load) -> Measured:
    """A mock of its own for each 5,000 connections."""
    count = 1 + (load.concurrent - 1) // 5000
    with mock_servers(count, LATENCY_S, answer_token_ids()) as servers:
        return asyncio.run(measure(load, servers))


def targets(columns: dict[str, list[Measured]]) -> list[Target]:
    ours = {row.concurrent: row for row in columns["ours"]}
    main, largest, smallest = ours[MAIN], ours.get(LARGEST), columns["ours"][0]
    peer = next(iter(columns.get(f"verifiers {VERIFIERS_VERSION}", [])), None)
    ratio = main.rollouts_per_s / peer.rollouts_per_s if peer else None
    cpu_ratio = peer.cpu_ms_per_turn / main.cpu_ms_per_turn if peer else None
    growth = largest.cpu_ms_per_turn / smallest.cpu_ms_per_turn if largest else None
    lost = sum(row.lost for row in columns["ours"])
    return [
        Target(f"rollouts at {MAIN} concurrent", main.rollouts_per_s, 350, "1/s", at_least=True),
        Target(f"CPU per turn at {MAIN}, driver and workers", main.cpu_ms_per_turn, 0.7, "ms"),
        Target(f"rollouts/s against verifiers {VERIFIERS_VERSION}", ratio, 15, "x", at_least=True),
        Target(f"CPU per turn of verifiers {VERIFIERS_VERSION} against ours", cpu_ratio, 15, "x", at_least=True),
        Target(f"memory at {LARGEST:,}, driver and workers", largest and largest.resident_mib / 1024, 1.5, "GiB"),
        Target(f"CPU per turn at {LARGEST:,} against {smallest.concurrent}", growth, 1.5, "x"),
        Target("episodes lost, over all loads", float(lost), 0, "episodes"),
    ]


def as_markdown(columns: dict[str, list[Measured]]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    lines = [
        "# Rollout engine",
        "",
        f"Made by `python benchmarks/rollout.py` on {machine()}, "
        f"{versions}. Episodes of {TURNS} turns, one worker; token servers are "
        f"mocks that answer after {LATENCY_S * 1e3:g} ms. `load` is the load of the machine at the end of "
        "a row, including the benchmark itself: if it is above the number of cores, other work slowed the row.",
        "",
        "| figure | measured | target | reached |",
        "|---|---|---|---|",
    ]
    for row in targets(columns):
        value = "" if row.value is None else f"{row.value:.3g} {row.unit}"
        lines.append(f"| {row.name} | {value} | {'≥' if row.at_least else '≤'} {row.target:g} | {row.verdict} |")
    lines += ["", *_details(columns), "", *NOTES]
    return "\n".join(lines) + "\n"


def _details(columns: dict[str, list[Measured]]) -> list[str]:
    lines = [
        "| who | concurrent | rollouts/s | CPU ms/turn | driver | workers | Ray's | mock | memory MiB | Ray's | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in columns.items():
        for row in rows:
            parts = [row.driver_cpu_ms_per_turn, row.workers_cpu_ms_per_turn, row.ray_cpu_ms_per_turn]
            shown = [f"{value:.3f}" if value else "" for value in (*parts, row.mock_cpu_ms_per_turn)]
            memory = [f"{value:.0f}" if value else "" for value in (row.resident_mib, row.ray_resident_mib)]
            lines.append(
                f"| {name} | {row.concurrent:,} | {row.rollouts_per_s:.0f} | {row.cpu_ms_per_turn:.3f} | "
                + " | ".join((*shown, *memory, f"{row.machine_load:.1f}"))
                + " |"
            )
    return lines


NOTES = (
    "`ours` is the path of a training run: scheduler, Ray, client, conversation with SmolLM2's tokenizer, log of "
    "episodes; only the learner takes no time. CPU per turn is that of driver and workers; the columns of Ray's "
    "processes and of the mock are separate. Memory counts pages that several of our processes share once.",
    "",
    "The bare loop sends token ids and reads the answer with aiohttp: no environment, tokenizer, staleness, deadline "
    "or counts. verifiers uses its OpenAI-compatible client and keeps neither token ids nor logprobs.",
)


def as_json(columns: dict[str, list[Measured]]) -> dict[str, Any]:
    summary = {row.name: asdict(row) | {"reached": row.verdict} for row in targets(columns)}
    rows = {name: [asdict(row) for row in found] for name, found in columns.items()}
    return {"targets": summary, "columns": rows, "cores": os.cpu_count()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of it, without the peer; under a minute")
    parser.add_argument("--json", action="store_true", help="one object of figures on standard output")
    options = parser.parse_args()
    columns = run(options.quick)
    text = as_markdown(columns)
    print(text, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(as_json(columns)))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "rollout.json").write_text(json.dumps(as_json(columns), indent=1) + "\n")
        (RESULTS / "rollout.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
