"""`roll-flash status | watch`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from roll_flash.cli.options import Json, RunName

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from roll_flash.monitor.status import RunStatus

PIPE_WIDTH = 120
"""Columns of a status that is not printed on a terminal."""
LOOK_EVERY_S = 1.0


def status(run: RunName, as_json: Json = False) -> int:
    """Show what a run does now, wherever it was started.

    Exit code 1 if it failed, died or gives no sign of life.
    """
    import msgspec
    from rich.console import Console

    from roll_flash.monitor.status import read_status
    from roll_flash.monitor.status_view import StatusView
    from roll_flash.run.run_dir import find_run
    from roll_flash.terminal import say

    found = read_status(find_run(run))
    if as_json:
        say(json.dumps(msgspec.to_builtins(found, str_keys=True), indent=2))
    else:
        console, view = Console(highlight=False), StatusView(found, news=True)
        if console.is_terminal:
            console.print(view)
        else:
            say("\n".join(line.rstrip() for line in _plain(view)))
    return _exit_code(found)


def _plain(view: RenderableType) -> list[str]:
    """Lines for a pipe or a file."""
    from rich.console import Console

    console = Console(width=PIPE_WIDTH, color_system=None, file=sys.stdout)
    with console.capture() as captured:
        console.print(view)
    return captured.get().splitlines()


def watch(run: RunName) -> int:
    """Follow a run until it ends; Ctrl-C ends only the view.

    The run may have been started elsewhere. In a pipe: the lines that it prints from now on.
    """
    from rich.console import Console

    from roll_flash.run.run_dir import find_run

    folder, console = find_run(run), Console(highlight=False)
    try:
        found = _watch_on_terminal(folder, console) if console.is_terminal else _watch_in_pipe(folder)
    except KeyboardInterrupt:
        return 0
    return _exit_code(found)


def _watch_on_terminal(folder: Path, console: Console) -> RunStatus:
    from rich.live import Live

    from roll_flash.monitor.status import read_status
    from roll_flash.monitor.status_view import StatusView

    found = read_status(folder)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not found.is_over:
            live.update(StatusView(found, news=True), refresh=True)
            time.sleep(LOOK_EVERY_S)
            found = read_status(folder)
    console.print(StatusView(found, news=True))
    return found


def _watch_in_pipe(folder: Path) -> RunStatus:
    from roll_flash.monitor.progress import Progress
    from roll_flash.monitor.status import read_status

    found = read_status(folder)
    step, seen_s = found.step, time.time()
    with Progress(found.total_steps) as progress:
        progress.note(f"{found.name}: {found.state}, step {found.step}/{found.total_steps}")
        while not found.is_over:
            time.sleep(LOOK_EVERY_S)
            found = read_status(folder)
            for each in found.news:
                if each.time_s > seen_s:
                    seen_s = each.time_s
                    progress.note(each.text)
            if found.step > step:
                step = found.step
                progress.step(step, {name: values[-1] for name, values in found.recent.items()})
        progress.note(": ".join(filter(None, [f"{found.name} is over ({found.state})", found.error])))
    return found


def _exit_code(status: RunStatus) -> int:
    return int(status.state in ("failed", "died", "silent"))
