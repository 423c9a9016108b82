"""Every command and its options as a Markdown page, made from the command line itself:
`python docs/tools/commands.py > docs/commands.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from typer.main import get_command

from roll_flash.cli.main import PROGRAM, app

INTRODUCTION = f"""\
# Every command

`{PROGRAM} COMMAND --help` prints the same. Words of the form `key=value` set [keys of the config](config.md).
`--install-completion` lets Tab complete commands and options; `--debug`, at any place, shows tracebacks.
[Errors](errors.md) has the exit codes.

`python docs/tools/commands.py > docs/commands.md` makes this page.
"""


def reference() -> str:
    """Return the page. Commands are in the order of `--help`."""
    return "\n".join([INTRODUCTION, *_sections(get_command(app), PROGRAM)])


def _sections(command: Any, path: str) -> Iterator[str]:
    """Yield the section of a command, or those of the commands in a group."""
    children = getattr(command, "commands", {})
    if not children:
        yield f"## `{path}`\n\n```text\n{_usage(command, path)}\n```\n\n{_paragraphs(command.help)}\n"
        yield from _table(command)
    for name, child in children.items():
        yield from _sections(child, f"{path} {name}")


def _usage(command: Any, path: str) -> str:
    arguments = [_argument(param) for param in command.params if param.param_type_name == "argument"]
    return " ".join([path, *arguments, "[OPTIONS]"])


def _argument(param: Any) -> str:
    shown = param.metavar or param.name.upper()
    shown += " ..." if param.nargs == -1 and not shown.endswith("...") else ""
    return shown if param.required or shown.startswith("[") else f"[{shown}]"


def _table(command: Any) -> Iterator[str]:
    params = [param for param in command.params if param.name not in ("help", "install_completion", "show_completion")]
    if not params:
        return
    yield "| argument or option | meaning |\n|---|---|"
    for param in params:
        is_option = param.param_type_name == "option"
        value = f" {param.metavar or _choices(param)}" if is_option and not param.is_flag else ""
        names = ", ".join(param.opts) if is_option else param.metavar or param.name.upper()
        yield f"| `{_cell(names + value)}` | {_cell(param.help or '')}{_default(param) if is_option else ''} |"
    yield ""


def _choices(param: Any) -> str:
    return "|".join(map(str, get_args(param.type_descriptor.annotation))) or "VALUE"


def _default(param: Any) -> str:
    shown = param.default not in (None, False, "", ()) and not callable(param.default)
    return f" Default: `{param.default}`." if shown else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").strip().split("\n\n"))


if __name__ == "__main__":
    print(reference(), end="")
