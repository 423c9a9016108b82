"""Command lines that documents and the summary of a run print: are they understood?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from roll_flash.cli.main import PROGRAM, app


def parse(words: Sequence[str]) -> None:
    """Parse a command line without running anything. Raises typer's error if the program does not take it."""
    program = _without_callbacks(get_command(app))
    with program.make_context(PROGRAM, list(words)) as context:
        program.invoke(context)


def _without_callbacks(command: Any) -> Any:
    for part in (command, *command.params):  # an option like --install-completion has one of its own
        part.callback = None
    for child in getattr(command, "commands", {}).values():
        _without_callbacks(child)
    return command
