"""Recipes: held-out success of the model as it is, after demonstrations, and after RL, synchronous beside asynchronous.

    python benchmarks/recipes.py {twc,miniwob,reasoning} [--seeds 0 1 2] [--orders asynchronous synchronous] [--add]
                                 [--quick] [--output FOLDER] [a.b=c ...]

Needs what the first lines of the recipe's config say. Trains configs/recipes/RECIPE.yaml: for each seed once
asynchronously and once with `scheduler.async_ratio=0`, with equal samples; each run evaluates its policy after the
demonstrations and in the end, on the same tasks, sampled at temperature 1. Random actions are drawn from the possible
ones; the own solution of some games does not succeed. Differences are paired by task; intervals are 95 %, by bootstrap
over tasks. An hour or more for each seed on 2 cores; results are written after each run, to
`recipe_RECIPE.{json,md,png}`. `--add` keeps the rows of other seeds and orders that are there. `--quick` trains the
tiny model for two steps and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine
from matplotlib.figure import Figure
from options import parse

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from roll_flash.config.tree import EnvConfig, load_config  # noqa: E402
from roll_flash.envs.check.agents import oracle  # noqa: E402
from roll_flash.envs.check.play import Agent, Player  # noqa: E402
from roll_flash.envs.held_out import HELD_OUT_SEEDS  # noqa: E402
from roll_flash.errors import EnvError  # noqa: E402
from roll_flash.evaluation.comparison import Comparison, compare_folders, estimate_difference  # noqa: E402
from roll_flash.monitor.metrics import REWARD, STEP_S  # noqa: E402
from roll_flash.processes.supervise import end_with_parent  # noqa: E402
from roll_flash.run.results import Run  # noqa: E402
from roll_flash.run.trained_tasks import hashes_by_task  # noqa: E402
from roll_flash.types import Message  # noqa: E402

RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class Recipe:
    title: str
    demonstrated: int
    """Tasks that the environment's oracle plays, as demonstrations."""
    lists_actions: bool = True


RECIPES = {
    "twc": Recipe("TextWorld Commonsense, one thing to put away", 200),
    "miniwob": Recipe("MiniWoB++, pages in a real browser", 400),
    "reasoning": Recipe("reasoning-gym, three data sets (RLVR)", 400, lists_actions=False),
}
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


def config_of(recipe: str) -> str:
    return f"configs/recipes/{recipe}.yaml"


def random_actions(draw: random.Random) -> Agent:
    """Return an agent that draws one of the possible actions."""

    async def act(env: Any, messages: Sequence[Message], turn: int) -> str:
        return str(draw.choice(env.valid_actions))

    return act


async def play(agent: Agent, env: EnvConfig, tasks: int) -> float:
    """Part of the held-out tasks that the agent wins within the recipe's turns."""

    async def within_turns(inner: Any, messages: Sequence[Message], turn: int) -> str:
        if turn >= env.max_turns:
            raise EnvError("no turns are left")
        return await agent(inner, messages, turn)

    player = Player(env.id, env.kwargs, provider="auto", timeout_s=60.0, run=f"recipes-{os.getpid()}")
    async with player:
        played = [await player.play(within_turns, HELD_OUT_SEEDS + number) for number in range(tasks)]
    return sum(bool(each.success) for each in played) / tasks


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


def run(recipe: str, order: str, seed: int, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Train; compare the policy in the end with that after the demonstrations, task by task."""
    name = f"{order}-{seed}"
    words = [f"name={name}", f"runs={runs}", f"seed={seed}", ORDERS[order], *overrides]
    summary = command("train", config_of(recipe), *words)
    steps = [row for row in Run(runs / name).metrics() if REWARD in row]
    compared = compare_folders(runs / name / "eval/step_0", runs / name / f"eval/step_{summary['steps']}")
    return {
        "order": order,
        "seed": seed,
        "after_demonstrations": compared.value_a,
        "after_rl": compared.value_b,
        "difference": asdict(compared.difference),
        "by_task": by_task(compared),
        "steps": summary["steps"],
        "training_minutes": summary["seconds"] / 60,
        "rewards": [row[REWARD] for row in steps],
        "minutes": list(itertools.accumulate(row[STEP_S] / 60 for row in steps)),
    }


def by_task(compared: Comparison) -> dict[str, float]:
    """Mean difference of each task. Seeds may have the same one: then the model is shown the same."""
    tasks = hashes_by_task(record for pair in compared.pairs for record in pair.attempts_a)
    found = defaultdict[str, list[float]](list)
    for pair in compared.pairs:
        found[tasks.get(pair.task_id, pair.task_id)].append(pair.difference)
    return {task: fmean(differences) for task, differences in found.items()}


def as_page(result: dict[str, Any]) -> str:
    shown_random = f"Random actions {result['random']:.2f}. " if "random" in result else ""
    lines = [
        f"# {RECIPES[result['recipe']].title}",
        "",
        f"`{result['command']}` on {result['machine']}. Success on {result['rows'][0]['difference']['count']} held-out "
        f"tasks that differ, at most {result['turns']} turns.",
        "",
        f"{shown_random}The tasks' own solutions {result['gold']:.2f}; the model as it is {result['zero_shot']:.2f}.",
        "",
        "| run | seed | after demonstrations | after RL | difference (95 %, paired by task) | steps | minutes of RL |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['order']} | {row['seed']} | {row['after_demonstrations']:.2f} | {row['after_rl']:.2f} | "
        f"{shown(row['difference'])} | {row['steps']} | {row['training_minutes']:.1f} |"
        for row in result["rows"]
    ]
    for order, found in result["over_seeds"].items():
        lines += ["", f"Over the seeds, {order}: {shown(found)}."]
    if any(row.get("rewards") for row in result["rows"]):
        lines += ["", f"![Mean reward of a step, by samples and by minutes](recipe_{result['recipe']}.png)"]
    return "\n".join([*lines, ""])


def shown(found: dict[str, Any]) -> str:
    return f"{found['value']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"


def over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By order: the difference of the means over the seeds, paired by task."""
    found = {}
    for order in dict.fromkeys(row["order"] for row in rows):
        of_tasks = [row["by_task"] for row in rows if row["order"] == order]
        tasks = sorted(set.intersection(*map(set, of_tasks)))
        found[order] = asdict(estimate_difference([fmean(each[task] for each in of_tasks) for task in tasks]))
    return found


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean reward of each step, over the samples trained and over the minutes, one line for each run."""
    figure = Figure(figsize=(8, 3), dpi=130, layout="constrained")
    by_step, by_minute = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(ORDERS, ("tab:blue", "tab:orange"), strict=True))
    named = set[str]()
    for row in rows:
        label = None if row["order"] in named else row["order"]
        named.add(row["order"])
        style: dict[str, Any] = {"color": colors[row["order"]], "alpha": 0.8}
        by_step.plot(range(1, len(row["rewards"]) + 1), row["rewards"], label=label, **style)
        by_minute.plot(row["minutes"], row["rewards"], **style)
    by_step.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    by_minute.set(xlabel="minutes")
    by_step.legend()
    for panel in (by_step, by_minute):
        panel.grid(alpha=0.3)
    figure.savefig(path)


def other_rows(file: Path, planned: Collection[tuple[str, int]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the command and the rows of a result without those of the planned (order, seed)."""
    before = json.loads(file.read_text())
    return before["command"], [row for row in before["rows"] if (row["order"], row["seed"]) not in planned]


def save(result: dict[str, Any], folder: Path) -> None:
    path = folder / f"recipe_{result['recipe']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(as_page(result))
    draw_curves(result["rows"], path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, keys = parse(parser)
    options.output.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[options.recipe]
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        demonstrations = runs / "demonstrations.jsonl"
        overrides = [f"warm_start.demonstrations={demonstrations}", *(QUICK if options.quick else ()), *keys]
        config = load_config(ROOT / config_of(options.recipe), overrides)
        (env,), tasks = config.envs, config.eval.tasks
        kwargs = [f"{key}={json.dumps(value)}" for key, value in env.kwargs.items()]
        seeds = str(8 if options.quick else recipe.demonstrated)
        command("envs", "demonstrate", env.id, *kwargs, "--seeds", seeds, "-o", str(demonstrations))
        result: dict[str, Any] = {
            "recipe": options.recipe,
            "machine": machine(),
            "command": " ".join(["python benchmarks/recipes.py", *sys.argv[1:]]),
            "turns": env.max_turns,
            "gold": asyncio.run(play(oracle, env, tasks)),
            "rows": [],
        }
        if recipe.lists_actions:
            result["random"] = asyncio.run(play(random_actions(random.Random(0)), env, tasks))
        if options.add:
            planned = set(itertools.product(options.orders, options.seeds))
            before, result["rows"] = other_rows(options.output / f"recipe_{options.recipe}.json", planned)
            result["command"] = f"{before}`, then `{result['command']}"
        shot = command("eval", config_of(options.recipe), "--out", str(runs / "zero-shot"), *overrides)
        result["zero_shot"] = shot["success"]["value"]
        for seed in [0] if options.quick else options.seeds:
            for order in options.orders:
                result["rows"].append(run(options.recipe, order, seed, runs, overrides))
                result["over_seeds"] = over_seeds(result["rows"])
                if not options.quick:
                    save(result, options.output)
    print(as_page(result))


if __name__ == "__main__":
    main()
