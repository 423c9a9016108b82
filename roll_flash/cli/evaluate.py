"""`roll-flash eval` and `roll-flash eval-diff`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.evaluation import EvalRequest

Handler = Callable[[argparse.Namespace], int]
Command = Callable[[str, Handler, str, str], argparse.ArgumentParser]
SplitWords = Callable[[Sequence[str]], tuple[str | None, list[str]]]
OPTIONS: tuple[tuple[str, type, str, str], ...] = (
    ("--temperature", float, "T", "0 is greedy"),
    ("--max-concurrent", int, "N", "episodes in flight"),
    ("--max-tokens-total", int, "N", "stop before more tokens than that are used, prompts included"),
    ("--max-cost", float, "C", "stop before it costs more than that, in the currency of the prices"),
    ("--max-minutes", float, "M", "stop after so many minutes"),
    ("--price-prompt", float, "P", "price of a million prompt tokens"),
    ("--price-completion", float, "P", "price of a million tokens that the model writes"),
)


def add_eval(command: Command, split_words: SplitWords) -> None:
    """`command` makes a command's parser from its name, handler, help line and usage; `split_words` separates `CONFIG`
    from `a.b=c`."""
    usage = (
        "roll-flash eval [CONFIG | TASKS | --env ID] [--model M] [-n N] [-k K] [--endpoint URL] [a.b=c ...] [options]"
    )
    text = "evaluate a model on held-out tasks; the same command again resumes"
    parser = command("eval", lambda arguments: _eval(arguments, split_words), text, usage)
    parser.set_defaults(sets_config=True)
    parser.add_argument("words", nargs="*", metavar="CONFIG a.b=c", help="a YAML file or a task folder; keys to set")
    parser.add_argument("--env", metavar="ID", help="environment id")
    parser.add_argument("--model", metavar="M", help="a model folder, a model's name, or RUN[@step]")
    parser.add_argument("-n", "--tasks", type=int, metavar="N", help="number of held-out tasks")
    parser.add_argument("-k", "--attempts", type=int, metavar="K", help="attempts at each task")
    parser.add_argument("--pass-at", metavar="K,K", help="report pass@k for these; by default 1, 2, 4, ... up to -k")
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint that serves the model")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the endpoint's key")
    for name, kind, metavar, about in OPTIONS:
        parser.add_argument(name, type=kind, metavar=metavar, help=about)
    parser.add_argument("--out", metavar="DIR", help="where the results go, and are resumed from")
    parser.add_argument("--allow-weak", action="store_true", help="run without Docker too, in the weaker local sandbox")
    usage = "roll-flash eval-diff A B [--html FILE] [--json]"
    comparing = command("eval-diff", _eval_diff, "compare two evaluations of the same tasks", usage)
    comparing.add_argument("a", metavar="A", help="folder of an evaluation")
    comparing.add_argument("b", metavar="B", help="folder of another one")
    comparing.add_argument("--html", metavar="FILE", help="where the page goes; by default eval-diff.html in B")


def _request(arguments: argparse.Namespace, split_words: SplitWords) -> EvalRequest:
    from roll_flash.evaluation import EvalRequest

    config, overrides = split_words(arguments.words)
    named = [name.removeprefix("--").replace("-", "_") for name, *_ in OPTIONS]
    return EvalRequest(
        config=config,
        env=arguments.env,
        model=arguments.model,
        tasks=arguments.tasks,
        attempts=arguments.attempts,
        pass_at=arguments.pass_at,
        endpoint=arguments.endpoint,
        api_key_env=arguments.api_key_env,
        out=arguments.out,
        allow_weak=arguments.allow_weak,
        overrides=tuple(overrides),
        **{name: getattr(arguments, name) for name in named},
    )


def _eval(arguments: argparse.Namespace, split_words: SplitWords) -> int:
    import asyncio

    from roll_flash.evaluation import plan_evaluation, report, run_evaluation

    request = _request(arguments, split_words)
    try:
        with _progress() as status:
            result, folder = asyncio.run(run_evaluation(replace(request, status=status)))
    except KeyboardInterrupt:
        folder = plan_evaluation(request).folder
        say(f"roll-flash: interrupted; what had ended is in {folder}; the same command goes on", error=True)
        return 130
    if arguments.json:
        _print_json({**result.to_dict(), "folder": str(folder)})
    else:
        say(report(result, folder))
    return 0 if result.scored else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show progress to a user on a terminal; standard output is reserved for the result."""
    from roll_flash.monitor.progress import Progress

    with redirect_stdout(sys.stderr), Progress(0, stream=sys.stderr) as progress:
        yield progress.status


def _eval_diff(arguments: argparse.Namespace) -> int:
    from roll_flash.evaluate.comparison import compare_folders
    from roll_flash.evaluate.pages.comparison import write_comparison

    found = compare_folders(arguments.a, arguments.b)
    page = write_comparison(found, arguments.html)
    if arguments.json:
        _print_json({**found.to_dict(), "page": str(page)})
    else:
        say(found.table())
        say(f"  side by side in {page}")
    return 0


def _print_json(value: Any) -> None:
    say(json.dumps(value, indent=2, default=str))
