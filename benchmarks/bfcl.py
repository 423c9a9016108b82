"""BFCL-v4 against bfcl-eval itself, on all 800 items of the four multi-turn categories, in real sandboxes.

    python benchmarks/bfcl.py [--quick] [--json] [--category multi_turn_base] [--seeds 2] [--provider docker]

Replays the ground truth, written as BFCL's Python lists and as native tool calls: both must score 100 %. Then replays
it corrupted (calls dropped, swapped, changed, repeated, moved, made unknown, a turn emptied; fixed seeds) and compares
verdict and kind of error, item by item, with what bfcl-eval's own checker says about the same calls in this process.
Prints a table; `--json` prints one object of figures by category. `--quick` takes 8 items of each category.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).parent.parent / "tests" / "envs"))
from bfcl_replay import Outcome, corrupted_case, official, oracle, replay, scripted

from roll_flash.envs.adapters.bfcl.items import CATEGORIES, load_items
from roll_flash.sandboxes import SandboxPool

CONCURRENT = 4
QUICK_ITEMS = 8
Result = TypeVar("Result")


async def in_turn(plays: Sequence[Awaitable[Result]]) -> list[Result]:
    """The results in order, `CONCURRENT` at a time."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(play: Awaitable[Result]) -> Result:
        async with gate:
            return await play

    return list(await asyncio.gather(*map(one, plays)))


async def run_category(pool: SandboxPool, category: str, items: int, seeds: int) -> dict[str, Any]:
    step = len(load_items(category)) // items
    indices = range(0, step * items, step)
    began = time.perf_counter()
    python = await in_turn([replay(pool, category, i, oracle) for i in indices])
    seconds = time.perf_counter() - began
    native = await in_turn([replay(pool, category, i, oracle, "native") for i in indices])
    cases = [corrupted_case(category, i, seed) for seed in range(seeds) for i in indices]
    numbers = [i for _ in range(seeds) for i in indices]
    here = await in_turn(
        [replay(pool, category, i, scripted(calls)) for i, (_, _, calls) in zip(numbers, cases, strict=True)]
    )
    there = [official(item, calls) for item, _, calls in cases]
    return {
        "items": items,
        "ground_truth_python": _score(python),
        "ground_truth_native": _score(native),
        "seconds_per_item": seconds / items,
        "corrupted": len(cases),
        "corrupted_same_verdict": sum(a == b for a, b in zip(here, there, strict=True)),
        "corrupted_valid": sum(outcome.valid for outcome in there),
        "corrupted_by_kind": dict(sorted(Counter(kind for _, kind, _ in cases).items())),
        "errors_by_type": dict(sorted(Counter(outcome.error_type for outcome in there if not outcome.valid).items())),
        "differing": [
            f"{item.item_id} ({kind}): {a} here, {b} there"
            for (item, kind, _), a, b in zip(cases, here, there, strict=True)
            if a != b
        ],
    }


def _score(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.valid for outcome in outcomes) / len(outcomes)


async def run_all(categories: Sequence[str], quick: bool, seeds: int, provider: str) -> dict[str, Any]:
    pool = SandboxPool(provider=provider, size=CONCURRENT, run=f"bench-bfcl-{os.getpid()}")
    try:
        return {
            category: await run_category(
                pool, category, QUICK_ITEMS if quick else len(load_items(category)), 1 if quick else seeds
            )
            for category in categories
        }
    finally:
        await pool.close()


def as_table(figures: dict[str, Any]) -> str:
    lines = [
        "| category | items | ground truth, Python | ground truth, native | corrupted | same as bfcl-eval's checker |",
        "|---|---|---|---|---|---|",
    ]
    for category, found in figures.items():
        lines.append(
            f"| {category} | {found['items']} | {found['ground_truth_python']:.1%} | "
            f"{found['ground_truth_native']:.1%} | {found['corrupted']} ({found['corrupted_valid']} still valid) | "
            f"{found['corrupted_same_verdict']} |"
        )
    return "\n".join([*lines, *(text for found in figures.values() for text in found["differing"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ITEMS} items of each category")
    parser.add_argument("--json", action="store_true", help="one object of figures")
    parser.add_argument("--category", choices=CATEGORIES, help="only this one")
    parser.add_argument("--seeds", type=int, default=2, help="how often each item is corrupted")
    parser.add_argument("--provider", default="auto", help="of the sandboxes: docker or local")
    arguments = parser.parse_args()
    categories = (arguments.category,) if arguments.category else CATEGORIES
    figures = asyncio.run(run_all(categories, arguments.quick, arguments.seeds, arguments.provider))
    print(json.dumps(figures) if arguments.json else as_table(figures))


if __name__ == "__main__":
    main()
