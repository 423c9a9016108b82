"""SmolLM2-135M learns from a file of questions and answers, by YAML alone: held-out success before and after.

    python benchmarks/own_data.py [--seeds 0 1 2] [--quick] [--json] [a.b=c ...]

The file has 1,000 made-up messages of customers, each with a question for its order number. The config is CONFIG below:
what a user writes. Evaluations sample as training does, at temperature 1; at temperature 0 the model is right half the
time from the start. Each seed also makes a file of its own. One run after the other, on an otherwise idle machine;
`minutes` is the whole command, start and both evaluations included. `--quick` trains the tiny model for two steps.
Results go to `benchmarks/results/own_data.{json,md}`, those of `--quick` nowhere but standard output.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine
from options import parse
from quickstart import figures, table, train

RESULTS = Path(__file__).parent / "results"
CONFIG = """\
model: {path: smollm2-135m, max_length: 160}
envs:
  - {id: Dataset-v0, data: orders.jsonl, reward: number, kwargs: {answer_in: last_number}}
rollout: {max_new_tokens: 24}
eval: {tasks: 48, temperature: 1.0}
"""
NAMES = ["Anna Berg", "Tom Weiss", "Mei Lin", "Omar Haddad", "Lucia Rossi", "Jan Novak", "Sara Cohen", "Ivan Petrov"]
THINGS = ["lamp", "chair", "kettle", "bag", "mirror", "clock", "table", "jacket"]
MESSAGES = [
    "Hello, this is {name}. My {thing} from order {order} arrived on {day} May and is broken.",
    "Order {order} ({thing}, paid on {day} May) has not come yet. Please call {name} at {phone}.",
    "I am {name}, phone {phone}. Can I return the {thing} of order {order}? I have it for {day} days.",
    "{name} here: {day} days ago I bought a {thing}, order number {order}, and got a {other}.",
]


def write_rows(path: Path, seed: int, rows: int = 1000) -> None:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            order = draw.randint(10_000, 99_999)
            message = draw.choice(MESSAGES).format(
                name=draw.choice(NAMES),
                thing=draw.choice(THINGS),
                other=draw.choice(THINGS),
                order=order,
                day=draw.randint(2, 28),
                phone=f"0{draw.randint(100, 999)} {draw.randint(1000, 9999)}",
            )
            prompt = f"{message}\nWhat is the order number? Reply with the number only."
            file.write(json.dumps({"prompt": prompt, "answer": order}) + "\n")


def run(seed: int, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder, "orders.jsonl"), seed)
        config = Path(folder, "orders.yaml")
        config.write_text(CONFIG)
        began = time.monotonic()
        found = figures(seed, train(str(config), seed, folder, overrides))
        return {**found, "minutes": round((time.monotonic() - began) / 60, 2)}


def save(result: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "own_data.json").write_text(json.dumps(result, indent=2) + "\n")
    text = (
        f"# A file of questions and answers\n\n`python benchmarks/own_data.py` on {result['machine']}. The config:\n\n"
    )
    (RESULTS / "own_data.md").write_text(f"{text}```yaml\n{CONFIG}```\n\n{table(result['rows'])}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments, keys = parse(parser)
    overrides, seeds = keys, arguments.seeds
    if arguments.quick:
        tiny = ["model.path=tiny", "model.max_length=256", "steps=2", "eval.tasks=8", "scheduler.groups_per_step=2"]
        overrides, seeds = [*tiny, *overrides], [0]
    rows: list[dict[str, Any]] = []
    result = {"benchmark": "own_data", "machine": machine(), "rows": rows}
    for seed in seeds:
        rows.append(run(seed, overrides))
        if not arguments.quick:
            save(result)
    print(json.dumps(result) if arguments.json else f"{result['machine']}\n{table(rows)}")


if __name__ == "__main__":
    main()
