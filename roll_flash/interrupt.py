"""Ctrl-C and SIGTERM: stop the work, save what there is, and let everything close in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_until_interrupted(work: Coroutine[Any, Any, T], *, on_interrupt: Callable[[], Awaitable[None]]) -> T:
    """Await `work`. The first signal cancels it, awaits `on_interrupt` and raises KeyboardInterrupt; a second one
    cancels that too."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, interrupted.set)
    try:
        if (finished := await _until(asyncio.ensure_future(work), interrupted)) is not None:
            return finished.result()
        interrupted.clear()
        if (saved := await _until(asyncio.ensure_future(on_interrupt()), interrupted)) is not None:
            saved.result()
        raise KeyboardInterrupt
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _until(task: asyncio.Future[T], interrupted: asyncio.Event) -> asyncio.Future[T] | None:
    """The finished task, or None when the signal came first (the task is cancelled then)."""
    signalled = asyncio.ensure_future(interrupted.wait())
    try:
        both: set[asyncio.Future[Any]] = {task, signalled}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signalled.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return None if task.cancelled() else task
