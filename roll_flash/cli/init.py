"""`roll-flash init`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from roll_flash.cli.options import Json, Text, argument, option, show
from roll_flash.errors import ConfigError

FOLDER, KIND, MODEL = "my-project", "data", "smollm2-135m"


def _kinds_like(incomplete: str) -> list[str]:
    from roll_flash.envs.new_project import ABOUT

    return [kind for kind in ABOUT if kind.startswith(incomplete)]


def init(
    folder: Annotated[Text, argument("FOLDER", "A new or empty folder; its name is the project's.")] = None,
    kind: Annotated[Text, option("KIND", "What you have: data, environment or tools.", complete=_kinds_like)] = None,
    model: Annotated[Text, option("M", "A model's name, ORG/NAME of a hub, or a folder.")] = None,
    as_json: Json = False,
) -> int:
    """Write a small project that works as it stands.

    It has a config, an environment or data with a reward, and a test.

    Asks for what is not given; without a terminal it takes my-project, data and smollm2-135m.
    """
    from roll_flash.envs.new_project import ABOUT, require_kind, require_place, write_project

    folder = folder or _ask("Folder of the project", FOLDER, require_place)
    if kind is None:
        _tell("What do you have?", *(f"  {name}: {about}" for name, about in ABOUT.items()))
        kind = _ask("data, environment or tools", KIND, require_kind)
    model = model or _ask("Which model? smollm2-135m, tiny (random, for tests), ORG/NAME of a hub, or a folder", MODEL)
    project = write_project(folder, kind, model)
    text = (
        f"{project.folder}: {', '.join(project.files)}\n"
        f"try it:  cd {shlex.quote(folder)} && roll-flash envs check train.yaml\n"
        "train:   roll-flash train train.yaml"
    )
    show({"folder": str(project.folder), "files": list(project.files)}, text, as_json=as_json)
    return 0


def _tell(*lines: str) -> None:
    from roll_flash.terminal import say

    if sys.stdin.isatty():
        for line in lines:
            say(line, error=True)


def _ask(question: str, default: str, check: Callable[[str], object] = str) -> str:
    """Return the first answer that passes; the default if there is nobody to ask.

    Raises KeyboardInterrupt after Ctrl-C or Ctrl-D.
    """
    while sys.stdin.isatty():
        try:
            answer = str(typer.prompt(question, default=default, err=True))
            check(answer)
            return answer
        except typer.Abort:
            raise KeyboardInterrupt from None
        except ConfigError as error:
            _tell(str(error))
    return default
