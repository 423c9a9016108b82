"""How much of a GPU a training step uses, by model size and options.

    python benchmarks/gpu_step.py [--shapes Qwen3-0.6B,...] [--options SETTINGS ...] [--output DIR] [--json]

Random weights in the shape of each model, sequences of 4,096 tokens in groups of eight that share a quarter, and the
step of `gpu-check`, without servers. Each row runs in processes of its own. The operations counted are those that a
step needs, without what checkpointing computes again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_flash.gpu_check.check import Check, Group, Result
from roll_flash.gpu_check.groups import all_groups
from roll_flash.gpu_check.report import Report
from roll_flash.gpu_check.runner import Runner
from roll_flash.gpu_check.settings import Settings, create_folder, make_settings

OPTIONS = (
    "learner.micro_batch_tokens=8192",
    "learner.micro_batch_tokens=16384",
    "learner.micro_batch_tokens=16384 learner.gradient_checkpointing=false",
    "learner.micro_batch_tokens=16384 learner.compile=true",
    "learner.micro_batch_tokens=16384 learner.compile=true learner.gradient_checkpointing=false",
)
COLUMNS = ("mfu", "tflops", "tokens_per_s", "step_s", "forward_backward_s", "optimizer_s", "peak_gib", "first_pass_s")


def groups_of(settings: Settings, options: list[str]) -> list[Group]:
    """Return the checks of the machine and of its raw speed, and one group with a step for each of `options`."""
    machine, kernels = all_groups(settings)[:2]
    speed = replace(kernels, name="speed", checks=kernels.checks[:1])
    return [machine, speed, *(_step(words) for words in options)]


def _step(words: str) -> Group:
    overrides = {"overrides": words.split(), "serves": False, "must_fit": False}
    opens = Check(f"start: {words}", "", "roll_flash.gpu_check.servers:models", 400, overrides)
    step = Check(f"step: {words}", "", "roll_flash.gpu_check.training:step", 300)
    return Group(words, (step,), opens=opens)


def measure(shape: str, options: list[str], output: Path) -> dict[str, Any]:
    settings = make_settings(output / shape, None, (f"model.path={shape}", "learner.warmup_steps=0"))
    create_folder(settings.output)
    report = Report(settings)
    try:
        for result in Runner(settings, lambda line: print(line, file=sys.stderr, flush=True)).run(
            groups_of(settings, options)
        ):
            report.results.append(result)
    finally:
        report.write()
    return {"shape": shape, "line": report.line(), "rows": [_row(each) for each in report.results if _is_step(each)]}


def _is_step(result: Result) -> bool:
    return result.name.startswith(("step: ", "start: ")) and (result.status != "passed" or "step_s" in result.figures)


def _row(result: Result) -> dict[str, Any]:
    figures = {name: result.figures.get(name) for name in COLUMNS}
    return {"options": result.name, "status": result.status, "text": result.text, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="Qwen3-0.6B")
    parser.add_argument("--options", nargs="*", default=list(OPTIONS), help="each a string of key=value words")
    parser.add_argument("--output", type=Path, default=Path("gpu-step"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = [measure(shape, arguments.options, arguments.output) for shape in arguments.shapes.split(",")]
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for model in found:
        print(model["line"])
        for row in model["rows"]:
            values = " ".join(f"{name} {row[name]:.4g}" for name in COLUMNS if row[name] is not None)
            print(f"{row['status']:<12} {row['options']}: {values} {row['text']}")


if __name__ == "__main__":
    main()
