"""The same training with TRL: one file of questions and answers, one model, equal samples, on the same cores in turn.

    python benchmarks/against_trl.py [--seeds 0 1 2] [--steps 20] [--trl-environment FOLDER] [--quick] [--json]

`roll-flash train` (vLLM, asynchronous, defaults) and TRL's GRPO trainer (generation by transformers, its default)
train SmolLM2-135M in float32 on the rows of benchmarks/own_data.py; which of the two comes first alternates.
Rewards, groups, learning rate, betas and the limits of lengths are the same; TRL may use all cores. A command's time
has its start and end, with the model saved; memory is the peak of all its processes, without files. Both models answer
the same 100 other questions 4 times, at temperature 1; differences are paired by question, with 95 % intervals. TRL's
asynchronous trainer needs a server that takes weights over NCCL. Results go to results/against_trl.{json,md} after each
seed, those of --quick (the tiny model, two steps) nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from long_run import memory_mib
from machine import machine
from own_data import CONFIG, write_rows
from trl_peer import VERSION, install

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from roll_flash.config.tree import Config, load_config  # noqa: E402
from roll_flash.evaluation.comparison import compare_folders  # noqa: E402
from roll_flash.models.prepare import resolve_model  # noqa: E402
from roll_flash.monitor.metrics import REWARD, STEP_S, read_metrics  # noqa: E402
from roll_flash.processes.supervise import end_with_parent  # noqa: E402

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 2 * 3600.0
LOOK_EVERY_S = 1.0
HELD_OUT_SEED = 1000
"""Added to the seed of the questions that no training has."""
HELD_OUT_ROWS = 2000
SIDES = ("roll_flash", "trl")
QUICK = ["model.path=tiny", "model.max_length=256", "scheduler.groups_per_step=2", "scheduler.group_size=2"]


def measured(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[str, dict[str, float]]:
    """Run a command; return what it printed, and its seconds, its processor time and its peak of memory. What a process
    does within the last look before its end is not seen."""
    began, cpu_s, peak_mib = time.monotonic(), dict[tuple[int, float], float](), 0.0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(
            command, cwd=ROOT, stdout=printed, text=True, env=environment, preexec_fn=end_with_parent
        ) as process,
    ):
        try:
            while process.poll() is None:
                if time.monotonic() - began > timeout_s:
                    sys.exit(f"{command[1:4]} took longer than {timeout_s:g} s")
                peak_mib = max(peak_mib, look(process.pid, cpu_s))
                time.sleep(LOOK_EVERY_S)
        finally:
            process.terminate()
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with exit code {process.returncode}")
        printed.seek(0)
        text = printed.read()
    return text, {"seconds": time.monotonic() - began, "cpu_s": sum(cpu_s.values()), "peak_mib": peak_mib}


def look(pid: int, cpu_s: dict[tuple[int, float], float]) -> float:
    """Return the MiB of memory of a process and its descendants; note the processor time of each."""
    memory = 0.0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:  # it has just ended
        return 0.0
    for each in family:
        try:
            memory += memory_mib(each.pid)
            cpu_s[each.pid, each.create_time()] = sum(each.cpu_times()[:2])
        except (psutil.Error, OSError):
            continue
    return memory


def train(config: Path, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train with roll-flash; the model goes to FOLDER/roll_flash/model."""
    name = SIDES[0]
    command = [sys.executable, "-m", "roll_flash", "train", str(config), f"name={name}", f"runs={folder}", "--json"]
    _, took = measured([*command, *words, "eval.before_and_after=false"])
    steps = [row for row in read_metrics(folder / name) if STEP_S in row]
    training_s = steps[-1]["time"] - steps[0]["time"] + steps[0][STEP_S]
    return took | {"training_s": training_s, "rewards": [row[REWARD] for row in steps]}


def train_trl(settings: Config, folder: Path, python: Path) -> dict[str, Any]:
    """Train with TRL as `settings` say; the model goes to FOLDER/trl/model."""
    wanted = {
        **settings.scheduler.model_dump(include={"groups_per_step", "group_size"}),
        **settings.learner.model_dump(include={"learning_rate", "betas", "max_grad_norm"}),
        **settings.model_dump(include={"seed", "steps"}),
        "max_new_tokens": settings.rollout.max_new_tokens,
    }
    places = resolve_model(settings.model.path), folder / "orders.jsonl", folder / SIDES[1]
    script = Path(__file__).with_name("trl_train.py")
    printed, took = measured([str(python), str(script), *map(str, places), json.dumps(wanted)])
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return took | found


def evaluate(config: Path, words: Sequence[str], tasks: int, model: Path, out: Path) -> float:
    """Return the success of a model; its answers go to the folder `out`."""
    command = [sys.executable, "-m", "roll_flash", "eval", str(config), *words, "--model", str(model), "-n", str(tasks)]
    printed, _ = measured([*command, "-k", "4", "--temperature", "1", "--out", str(out), "--json"])
    return float(json.loads(printed)["success"]["value"])


def compare(seed: int, place: int, words: Sequence[str], tasks: int, python: Path) -> dict[str, Any]:
    """Train with both, and evaluate both models. `words`: keys of both configs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "orders.jsonl", seed)
        write_rows(folder / "held_out.jsonl", HELD_OUT_SEED + seed, HELD_OUT_ROWS)
        config, others = folder / "orders.yaml", folder / "held_out.yaml"
        config.write_text(CONFIG)
        others.write_text(CONFIG.replace("orders.jsonl", "held_out.jsonl"))
        settings = load_config(config, words)
        row: dict[str, Any] = {"seed": seed, "first": SIDES[place % 2]}
        for side in SIDES if place % 2 == 0 else SIDES[::-1]:
            row[side] = train_trl(settings, folder, python) if side == "trl" else train(config, words, folder)
        asked = partial(evaluate, others, words, tasks)
        row["before"] = asked(resolve_model(settings.model.path), folder / "before")
        for side in SIDES:
            row[side]["success"] = asked(folder / side / "model", folder / f"eval_{side}")
        paired = compare_folders(folder / "eval_trl", folder / "eval_roll_flash")
        return {**row, "difference": asdict(paired.difference)}


def as_markdown(result: Mapping[str, Any]) -> str:
    lines = [
        "# The same training with TRL",
        "",
        f"`{result['command']}` on {result['machine']}, load {result['load']:.1f} at the start, TRL {VERSION}.",
        "",
        " ".join(__doc__.split("\n\n")[2].split()),
        "",
        "| seed | with | minutes | of these training | processor minutes | peak of memory, GiB | held-out success |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        for side in SIDES:
            of = row[side]
            cells = (
                f"{of['seconds'] / 60:.1f}",
                f"{of['training_s'] / 60:.1f}",
                f"{of['cpu_s'] / 60:.1f}",
                f"{of['peak_mib'] / 1024:.1f}",
                f"{row['before']:.2f} → {of['success']:.2f}",
            )
            lines.append(f"| {row['seed']} | {side} | " + " | ".join(cells) + " |")
    for row in result["rows"]:
        paired = row["difference"]
        lines += [
            "",
            f"Seed {row['seed']}: TRL takes {ratio(row, 'seconds'):.2f} times as long, {ratio(row, 'training_s'):.2f} "
            f"times without start and end, and {ratio(row, 'cpu_s'):.2f} times the processor time. Success with "
            f"roll_flash minus that with TRL: {paired['value']:+.2f} [{paired['low']:+.2f}, {paired['high']:+.2f}].",
        ]
    return "\n".join(lines) + "\n"


def ratio(row: Mapping[str, Any], figure: str) -> float:
    return float(row["trl"][figure] / row["roll_flash"][figure])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trl-environment", type=Path, help="a virtual environment that has TRL already")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seeds, steps, tasks = ([0], 2, 4) if options.quick else (options.seeds, options.steps, 100)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "benchmark": "against_trl",
        "machine": machine(),
        "load": os.getloadavg()[0],
        "command": f"python benchmarks/against_trl.py --seeds {' '.join(map(str, seeds))} --steps {steps}",
        "rows": rows,
    }
    with ExitStack() as stack:
        environment = options.trl_environment
        if environment is None:
            environment = install(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "environment")
        for place, seed in enumerate(seeds):
            words = [*(QUICK if options.quick else []), f"steps={steps}", f"seed={seed}"]
            rows.append(compare(seed, place, words, tasks, environment / "bin" / "python"))
            if not options.quick:
                (RESULTS / "against_trl.json").write_text(json.dumps(result, indent=1) + "\n")
                (RESULTS / "against_trl.md").write_text(as_markdown(result))
    print(json.dumps(result) if options.json else as_markdown(result))


if __name__ == "__main__":
    main()
