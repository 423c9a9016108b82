"""Runs the checks of one group, in a process of their own: `python -m roll_flash.gpu_check.child JOB EVENTS`.

JOB is a JSON file with the settings and the group. Everything that is reported is appended to EVENTS, one JSON object a
line, when it happens: `begin`, then any number of `note`, `figures`, `slow`, `fits` and `remark`, then `end`, for each
check; at last `closing`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TextIO

from roll_flash.errors import RollFlashError
from roll_flash.gpu_check.check import Bench, Check, Group, NotPossibleError
from roll_flash.gpu_check.settings import Settings
from roll_flash.processes.terminal_logs import make_logs_printable


async def run_group(group: Group, bench: Bench, emit: Callable[[dict[str, Any]], None]) -> None:
    async with AsyncExitStack() as stack:
        opened: tuple[Any, ...] = ()
        if group.opens is not None:
            opening = group.opens

            async def enter() -> Any:
                return await stack.enter_async_context(_function(opening)(bench, **opening.arguments))

            found = await _run(opening, enter, emit)
            if found is None:
                return
            opened = (found,)
        for check in group.checks:
            await _run(check, lambda check=check: _called(check, bench, *opened), emit)  # type: ignore[misc]
        emit({"kind": "closing", "text": "stopping what was started" if opened else ""})


def _function(check: Check) -> Callable[..., Any]:
    module, _, name = check.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


async def _called(check: Check, bench: Bench, *opened: Any) -> Any:
    answer = _function(check)(bench, *opened, **check.arguments)
    return await answer if inspect.isawaitable(answer) else answer


async def _run(check: Check, work: Callable[[], Awaitable[Any]], emit: Callable[[dict[str, Any]], None]) -> Any:
    """Return what `work` returns; None if it failed."""
    emit({"kind": "begin", "name": check.name})
    began, answer = time.monotonic(), None
    status, text = "passed", ""
    try:
        answer = await work()
    except NotPossibleError as error:
        status, text = "not possible", str(error)
    except Exception as error:  # a check may raise anything, and the others go on
        traceback.print_exc()
        is_ours = isinstance(error, RollFlashError)
        status, text = "failed", str(error) if is_ours else f"{type(error).__name__}: {error}"
    emit({"kind": "end", "status": status, "text": text, "seconds": round(time.monotonic() - began, 2)})
    return answer


def _writer(file: TextIO) -> Callable[[dict[str, Any]], None]:
    def emit(event: dict[str, Any]) -> None:
        file.write(json.dumps(event, default=str) + "\n")
        file.flush()

    return emit


def main(job: Path, events: Path) -> None:
    make_logs_printable()
    tree = json.loads(job.read_text())
    with events.open("a") as file:
        emit = _writer(file)
        asyncio.run(run_group(Group.of(tree["group"]), Bench(Settings.of(tree["settings"]), emit), emit))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
