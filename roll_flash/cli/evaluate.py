"""`roll-flash eval` and `roll-flash eval-diff`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_flash.cli.options import Json, ModelName, Text, Trust, Words, argument, flag, option, show, split_words
from roll_flash.terminal import outliving_readers

STATUS_EVERY_S = 30.0
"""Seconds between lines of progress where there is no terminal."""


def evaluate(
    context: typer.Context,
    words: Annotated[Words, argument("CONFIG|TASKS key=value", "A YAML file or task folder; keys to set.")] = None,
    env: Annotated[Text, option("ID", "Environment id.")] = None,
    model: ModelName = None,
    tasks: Annotated[int | None, option("N", "Number of held-out tasks.", "-n", "--tasks")] = None,
    attempts: Annotated[int | None, option("K", "Attempts at each task.", "-k", "--attempts")] = None,
    pass_at: Annotated[Text, option("K,K", "Report pass@k for these; by default 1, 2, 4, ... up to -k.")] = None,
    endpoint: Annotated[Text, option("URL", "An OpenAI-compatible endpoint that serves the model.")] = None,
    api_key_env: Annotated[Text, option("NAME", "Environment variable that holds the endpoint's key.")] = None,
    temperature: Annotated[float | None, option("T", "0 is greedy.")] = None,
    max_concurrent: Annotated[int | None, option("N", "Episodes in flight.")] = None,
    max_tokens_total: Annotated[int | None, option("N", "Stop before more tokens are used, prompts included.")] = None,
    max_cost: Annotated[float | None, option("C", "Stop before it costs more, in the prices' currency.")] = None,
    max_minutes: Annotated[float | None, option("M", "Stop after so many minutes.")] = None,
    price_prompt: Annotated[float | None, option("P", "Price of a million prompt tokens.")] = None,
    price_completion: Annotated[float | None, option("P", "Price of a million tokens that the model writes.")] = None,
    out: Annotated[Text, option("DIR", "Where results go, and are resumed from.")] = None,
    allow_weak: Annotated[bool, flag("--allow-weak", "Run without Docker too, in the weaker local sandbox.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> int:
    """Evaluate a model on held-out tasks; repeat it to resume.

    Give a CONFIG, a folder of task folders, --env with --model, or --model RUN alone, which takes the run's config.
    """
    config, overrides = split_words(words)
    options = {name: value for name, value in context.params.items() if name not in ("words", "as_json")}
    return _evaluate({"config": config, "overrides": overrides, **options}, as_json)


def _evaluate(options: dict[str, Any], as_json: bool) -> int:
    from roll_flash.evaluator import EvalRequest, plan_evaluation, run_evaluation

    request = EvalRequest(**options)
    try:
        with outliving_readers(), _progress() as status:
            result, folder = asyncio.run(run_evaluation(replace(request, status=status)))
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"what had ended is in {plan_evaluation(request).folder}; the same command goes on")
        raise
    text = f"{result.table()}\n  results in {folder} (report.html, results.json, episodes.jsonl, transcripts/)"
    show({**result.to_dict(), "folder": str(folder)}, text, as_json=as_json)
    return 0 if result.scored else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show progress on a terminal, and in a pipe or a log a line now and then; standard output is for the result."""
    from roll_flash.monitor.progress import Progress

    said_s = time.monotonic()

    def status(text: str) -> None:
        nonlocal said_s
        progress.status(text)
        if not sys.stderr.isatty() and time.monotonic() - said_s > STATUS_EVERY_S:
            said_s = time.monotonic()
            progress.note(text)

    with redirect_stdout(sys.stderr), Progress(0, stream=sys.stderr) as progress:
        yield status


def compare(
    a: Annotated[str, argument("A", "Folder of an evaluation.")],
    b: Annotated[str, argument("B", "Folder of another one.")],
    html: Annotated[Text, option("FILE", "The page; by default eval-diff.html in B.")] = None,
    as_json: Json = False,
) -> int:
    """Compare two evaluations of the same tasks."""
    from roll_flash.checked_files import as_a_run_writes
    from roll_flash.evaluation.comparison import compare_folders
    from roll_flash.evaluation.pages.comparison import write_comparison

    with as_a_run_writes(Path(f"{a} or {b}")):
        found = compare_folders(a, b)
        page = write_comparison(found, html)
    show({**found.to_dict(), "page": str(page)}, f"{found.table()}\n  side by side in {page}", as_json=as_json)
    return 0
