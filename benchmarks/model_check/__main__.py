"""Compares the learner with plain transformers: log-probabilities and gradients of models, in float32.

    python -m benchmarks.model_check [MODEL ...] [--vllm] [--write docs/models.md] [--json]

MODEL: model folders, or architectures of docs/models.md; none: all of these. With `--vllm` changed weights are
published to a vLLM server instead, which is compared with the learner. `--write` replaces the table of a page. The exit
code is 1 if a model differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model_check.architectures import check_names
from benchmarks.model_check.check import compare, publish
from benchmarks.model_check.comparison import Comparison
from benchmarks.model_check.publication import Published
from benchmarks.model_check.report import write_table
from roll_flash.errors import RollFlashError


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.model_check", description=__doc__.partition("\n")[0])
    parser.add_argument("models", metavar="MODEL", nargs="*")
    parser.add_argument("--vllm", action="store_true", help="publish to a vLLM server, and compare it")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="replace the table of a page")
    parser.add_argument("--json", action="store_true", help="print one JSON list for scripts")
    asked = parser.parse_args(words)
    if asked.write and asked.models:
        parser.error("--write needs all architectures: leave out the names")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    asked = arguments(words)
    results: list[Comparison | Published] = []
    try:
        check_names(asked.models)
        for result in publish(asked.models) if asked.vllm else compare(asked.models):
            line = f"{'' if result.is_ok else 'WRONG: '}{result.line()}"
            print(line, file=sys.stderr if asked.json else sys.stdout, flush=True)
            results.append(result)
        if asked.write:
            write_table(asked.write, results)
    except RollFlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    wrong = [result.name for result in results if not result.is_ok]
    summary = f"{len(results) - len(wrong)} of {len(results)} are exact"
    summary += f"; not: {', '.join(wrong)}" if wrong else ""
    print(json.dumps([result.as_dict() for result in results], indent=2) if asked.json else summary)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
