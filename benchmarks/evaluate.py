"""Evaluation under load, beside verifiers, on the same chat endpoint in one run.

    python benchmarks/evaluate.py [--quick] [--json]

The endpoint is a mock that answers after 50 ms (`mock_token_server.py`). The column `ours` is what `roll-flash eval
--endpoint` runs: workers on Ray, the chat client, the environment, every episode and its transcript on disk, scores,
report. verifiers runs `evaluate` of a `MultiTurnEnv` with the same texts and turns. Prints a table (to standard error
with --json, which prints one object of figures on standard output) and, unless --quick, writes results/evaluate.json
and results/evaluate.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import machine
from rollout_engine import Measured, Processes, mock_servers
from rollout_env import TURNS
from rollout_peers import VERIFIERS_VERSION, verifiers

from roll_flash.config.tree import Config, load_config
from roll_flash.evaluation.evaluation import eval_sampling, evaluate
from roll_flash.processes.background import first_failure
from roll_flash.rollout.fleet import WorkerFleet
from roll_flash.rollout.worker import ChatEndpoint
from roll_flash.system.system import open_rollout

RESULTS = Path(__file__).parent / "results"
LATENCY_S = 0.05
MAIN = 512
TARGET = 10.0
OUR_ROLLOUTS = {16: 640, 128: 3072, 512: 6144}
PEER_ROLLOUTS = {16: 320, 128: 384, 512: 512}
QUICK_ROLLOUTS, QUICK_PEER_ROLLOUTS = {512: 3072}, {512: 192}
PEER = f"verifiers {VERIFIERS_VERSION}"
VERSIONS = ("ray", "uvloop", "aiohttp", "gymnasium")


def run(quick: bool) -> dict[str, list[Measured]]:
    """Both columns, load by load, so that both meet the machine in the same state."""
    columns: dict[str, list[Measured]] = {"ours": [], PEER: []}
    ours, peers = (QUICK_ROLLOUTS, QUICK_PEER_ROLLOUTS) if quick else (OUR_ROLLOUTS, PEER_ROLLOUTS)
    for concurrent, rollouts in ours.items():
        with mock_servers(1, LATENCY_S, [0]) as servers:
            columns["ours"].append(asyncio.run(measure(servers[0], concurrent, rollouts)))
            if (peer := verifiers(servers[0][0], concurrent, peers[concurrent])) is not None:
                columns[PEER].append(peer)
    return columns


async def measure(server: tuple[str, int], concurrent: int, rollouts: int) -> Measured:
    """Start the workers, warm up, evaluate; the clock covers what comes after the start of the workers."""
    url, mock_pid = server
    config = make_config(concurrent)
    with first_failure() as failure, tempfile.TemporaryDirectory(prefix="roll-flash-evaluate-") as folder:
        logs = Path(folder) / "logs"
        logs.mkdir()
        endpoint = ChatEndpoint(f"{url}/v1", "mock")
        async with open_rollout(config, None, failure, endpoint=endpoint, logs=logs) as fleet:
            await _evaluate(fleet, config, concurrent, Path(folder) / "warm")
            processes = Processes.find([mock_pid])
            before, began = processes.cpu_s(), time.perf_counter()
            scored = await _evaluate(fleet, config, rollouts, Path(folder) / "measured")
            seconds, after = time.perf_counter() - began, processes.cpu_s()
            memory = processes.resident_mib()
    spent = {role: after[role] - before[role] for role in after}
    return Measured.of(concurrent, rollouts, seconds, spent, memory, rollouts - scored)


def make_config(concurrent: int) -> Config:
    return load_config(
        {
            "model": {"path": "mock"},
            "envs": [{"id": "rollout_env:FourTurns-v0", "max_turns": TURNS}],
            "eval": {"max_concurrent": concurrent},
        }
    )


async def _evaluate(fleet: WorkerFleet, config: Config, rollouts: int, folder: Path) -> int:
    """Attempts that were scored; anything but all of them is no measurement of equal work."""
    result = await evaluate(
        fleet,
        env=config.envs[0],
        eval=config.eval.model_copy(update={"tasks": rollouts}),
        sampling=eval_sampling(config),
        max_concurrent=config.eval.max_concurrent or 1,
        folder=folder,
        label=folder.name,
    )
    return result.scored


def ratios(columns: dict[str, list[Measured]]) -> dict[int, tuple[float, float]]:
    """By concurrency: rollouts/s of ours against the peer's, and CPU per rollout of the peer's against ours."""
    peers = {row.concurrent: row for row in columns[PEER]}
    return {
        row.concurrent: (row.rollouts_per_s / peer.rollouts_per_s, peer.cpu_ms_per_turn / row.cpu_ms_per_turn)
        for row in columns["ours"]
        if (peer := peers.get(row.concurrent)) is not None
    }


def as_markdown(columns: dict[str, list[Measured]]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    found = ratios(columns)
    reached = "not measured" if MAIN not in found else "yes" if found[MAIN][0] >= TARGET else "no"
    value = "" if MAIN not in found else f"{found[MAIN][0]:.3g}"
    lost = sum(row.lost for row in columns["ours"])
    lines = [
        "# Evaluation",
        "",
        f"Made by `python benchmarks/evaluate.py` on {machine()}, "
        f"{versions}. Episodes of {TURNS} turns against a mock chat endpoint that answers "
        f"after {LATENCY_S * 1e3:g} ms; one worker. `load` is the load of the machine at the end of a row, "
        "including the benchmark itself: if it is above the number of cores, other work slowed the row.",
        "",
        "| figure | measured | target | reached |",
        "|---|---|---|---|",
        f"| rollouts/s against {PEER} at {MAIN} concurrent | {value} x | ≥ {TARGET:g} | {reached} |",
        f"| attempts lost, over all loads | {lost} | ≤ 0 | {'yes' if not lost else 'no'} |",
        "",
        "| concurrent | who | rollouts/s | against the peer | CPU ms per rollout | peer's CPU against ours | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for concurrent in sorted(row.concurrent for row in columns["ours"]):
        faster, cheaper = found.get(concurrent, (None, None))
        for name, rows in columns.items():
            for row in (row for row in rows if row.concurrent == concurrent):
                first = name == "ours" and faster is not None
                lines.append(
                    f"| {concurrent} | {name} | {row.rollouts_per_s:.0f} | {f'{faster:.1f} x' if first else ''} | "
                    f"{row.cpu_ms_per_turn * TURNS:.2f} | {f'{cheaper:.1f} x' if first else ''} | "
                    f"{row.machine_load:.1f} |"
                )
    return "\n".join([*lines, "", *NOTES]) + "\n"


NOTES = (
    "CPU is that of driver and workers; Ray's processes and the mock are separate (in the JSON file). `ours` writes "
    "every episode and its transcript to disk while it runs, and scores and renders the report at the end, all "
    "inside the measured time. verifiers uses its OpenAI-compatible client and is measured inside its process, after a "
    "first evaluation that warms it up; it writes nothing.",
)


def as_json(columns: dict[str, list[Measured]]) -> dict[str, Any]:
    rows = {
        name: [asdict(row) | {"cpu_ms_per_rollout": row.cpu_ms_per_turn * TURNS} for row in found]
        for name, found in columns.items()
    }
    compared = {
        str(concurrent): {"rollouts_per_s_ratio": faster, "cpu_ratio": cheaper}
        for concurrent, (faster, cheaper) in ratios(columns).items()
    }
    return {"ratios": compared, "target_at_512": TARGET, "columns": rows, "cores": os.cpu_count()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 concurrent only, less of it; under a minute")
    parser.add_argument("--json", action="store_true", help="one object of figures on standard output")
    options = parser.parse_args()
    columns = run(options.quick)
    text = as_markdown(columns)
    print(text, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(as_json(columns)))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "evaluate.json").write_text(json.dumps(as_json(columns), indent=1) + "\n")
        (RESULTS / "evaluate.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
