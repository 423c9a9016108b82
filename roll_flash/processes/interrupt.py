"""Early end of a run: by Ctrl-C, SIGTERM, a closed terminal, or a background error.

The first signal stops the work and saves the state. Then everything closes in order; each further signal skips the
current wait.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from roll_flash.processes.background import FirstFailure

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Handle signals while the block runs. A signal cancels the block, which then raises KeyboardInterrupt; within
    `run_until_stopped` the work is first stopped and saved. `say` gets a message for the user at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0
        self._work_is_told: asyncio.Event | None = None
        self._numbers: list[signal.Signals] = []

    async def __aenter__(self) -> Interrupts:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._task = task
        # Under nohup SIGHUP stays ignored.
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
        self._numbers = [number for number in SIGNALS if number not in ignored]
        for number in self._numbers:
            loop.add_signal_handler(number, self._signalled, number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
        if kind is not None and issubclass(kind, asyncio.CancelledError) and self._count:
            while self._task.uncancel():
                pass
            raise KeyboardInterrupt from None

    async def run_until_stopped(
        self,
        work: Coroutine[Any, Any, T],
        *,
        failure: FirstFailure,
        save: Callable[[BaseException], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Await `work`. A signal or a background error cancels it. The reason of an early end, also an error of `work`,
        is passed to `save` and raised after that. A signal during `save` cancels it."""
        self._work_is_told = asyncio.Event()
        try:
            reason: BaseException = KeyboardInterrupt()
            task = asyncio.ensure_future(work)
            if await _first(task, self._work_is_told, failure.happened):
                if (error := task.exception()) is None:
                    return task.result()
                reason = failure.error or error  # the first one caused the other
            elif failure.error is not None:
                reason = failure.error
            self._work_is_told.clear()
            if save is not None:
                saving = asyncio.ensure_future(save(reason))
                if await _first(saving, self._work_is_told):
                    saving.result()
            raise reason
        finally:
            self._work_is_told = None

    def _signalled(self, number: signal.Signals) -> None:
        self._count += 1
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        more = "usually 5-40 s; once more cuts it short" if self._count == 1 else "not waiting for what is under way"
        self._say(f"stopping ({name}): {more}")
        if self._work_is_told is not None:
            self._work_is_told.set()
        else:
            self._task.cancel()


async def _first(task: asyncio.Future[Any], *events: asyncio.Event) -> bool:
    """Return True if the task was done before any of the events happened; else cancel it."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        for wait in waits:
            wait.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
