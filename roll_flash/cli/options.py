"""What the commands have in common: options, words `key=value`, and results as JSON."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_flash.errors import ConfigError
from roll_flash.terminal import say

Completion = Callable[[str], Sequence[str]]
"""What Tab offers for the beginning of a word."""


def option(metavar: str, about: str, *names: str, complete: Completion | None = None) -> Any:
    """An option that takes a value, for `Annotated`; without `names` it is called like its parameter."""
    return typer.Option(*names, metavar=metavar, help=about, autocompletion=complete)


def flag(name: str, about: str) -> Any:
    return typer.Option(name, help=about)


def argument(metavar: str, about: str, complete: Completion | None = None) -> Any:
    return typer.Argument(metavar=metavar, help=about, autocompletion=complete)


def runs_like(incomplete: str) -> list[str]:
    """Names of runs in the default folder that begin like this."""
    return sorted(path.parent.name for path in Path("runs").glob(f"{glob.escape(incomplete)}*/config.yaml"))


def example(words: str, more: str = "") -> str:
    """The last lines of a command's help."""
    return "\n\n".join(filter(None, [f"Example: roll-flash {words}", more]))


Text = str | None
Words = list[str] | None
RunName = Annotated[str, argument("RUN", "A run's name or folder.", runs_like)]
Json = Annotated[bool, flag("--json", "Print one JSON object or list for scripts.")]
ModelName = Annotated[Text, option("M", "A model folder, a model's name, or RUN[@step].")]
Trust = Annotated[bool, flag("--trust", "Run what the files of a run that was made elsewhere name.")]
Provider = Annotated[str, option("NAME", "Of sandboxes: docker, local, a plug-in's name, or auto.")]


def split_words(words: Sequence[str] | None) -> tuple[str | None, tuple[str, ...]]:
    """Split `CONFIG key=value ...`, in any order. A file may have `=` in its name."""
    files = [word for word in words or () if "=" not in word or os.path.isfile(word)]
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r}: one CONFIG is enough; an override is written key=value")
    return (files[0] if files else None), tuple(word for word in words or () if word not in files)


def show(value: Any, text: str, *, as_json: bool) -> None:
    """Print a result: `value` for scripts, or `text` for users."""
    say(json.dumps(value, indent=2, default=str) if as_json else text)


def standard_output_for_json(wanted: bool) -> AbstractContextManager[Any]:
    """With `--json` standard output carries only the one object; progress goes to standard error."""
    return redirect_stdout(sys.stderr) if wanted else nullcontext()
