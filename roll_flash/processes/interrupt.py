"""Early end of a run: by Ctrl-C, SIGTERM, a closed terminal, or a background error.

The first signal stops the work and saves the state. Then everything closes in order; each further signal skips the
current wait. Where an event loop runs already, as in a notebook, the work has a loop and a thread of its own, and
Ctrl-C is passed on to it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from roll_flash.processes.background import DaemonThread, FirstFailure

T = TypeVar("T")

SIGNAL_POLL_S = 0.2
"""Python runs signal handlers between waits: a signal that arrives just as an endless wait begins does not end it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _CtrlC:
    """Passes Ctrl-C on to work in another thread: to its newest listener, which is called in that thread."""

    def __init__(self) -> None:
        self.count = 0
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Callable[[], Any]]] = []

    def listen(self, listener: Callable[[], Any]) -> None:
        self._listeners.append((asyncio.get_running_loop(), listener))

    def forget(self) -> None:
        """Remove the newest listener."""
        self._listeners.pop()

    def press(self) -> None:
        self.count += 1
        with suppress(IndexError, RuntimeError):  # the work has not begun, or has just ended
            loop, listener = self._listeners[-1]
            loop.call_soon_threadsafe(listener)


_CTRL_C: ContextVar[_CtrlC | None] = ContextVar("_CTRL_C", default=None)
"""Set in work that runs in another thread than Ctrl-C arrives in."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, also where an event loop runs already: there in a thread of its own, while the caller waits.

    Raises KeyboardInterrupt after Ctrl-C, when the work has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    thread, ctrl_c = DaemonThread(), _CtrlC()
    token = _CTRL_C.set(ctrl_c)
    try:
        with _pressed_by_signal(ctrl_c):
            future = thread.submit(asyncio.run, _cancelled_by(ctrl_c, work))
            while not future.done():
                wait([future], timeout=SIGNAL_POLL_S)
            result: T = future.result()
            return result
    finally:
        _CTRL_C.reset(token)
        thread.shutdown()


@contextmanager
def _pressed_by_signal(ctrl_c: _CtrlC) -> Iterator[None]:
    """Signals arrive in the main thread, whose event loop may have a handler that waits for its caller."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: ctrl_c.press())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def _cancelled_by(ctrl_c: _CtrlC, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    ctrl_c.listen(task.cancel)
    if ctrl_c.count:  # pressed before this had begun
        task.cancel()
    try:
        return await work
    except asyncio.CancelledError:
        if ctrl_c.count:
            raise KeyboardInterrupt from None
        raise
    finally:
        ctrl_c.forget()


class Interrupts:
    """Handle signals while the block runs. A signal cancels the block, which then raises KeyboardInterrupt; within
    `run_until_stopped` the work is first stopped and saved. `say` gets a message for the user at once.

    In another thread than the main one only Ctrl-C is handled, and only if `run_to_end` has started that thread.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._count = 0
        self._stop_requested: asyncio.Event | None = None
        self._numbers: list[signal.Signals] = []

    async def __aenter__(self) -> Interrupts:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._task = task
        if (ctrl_c := _CTRL_C.get()) is not None:
            ctrl_c.listen(lambda: self._signalled(signal.SIGINT))
        elif threading.current_thread() is threading.main_thread():
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
        if (ctrl_c := _CTRL_C.get()) is not None:
            ctrl_c.forget()
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
        self._stop_requested = asyncio.Event()
        try:
            reason: BaseException = KeyboardInterrupt()
            task = asyncio.ensure_future(work)
            if await _first(task, self._stop_requested, failure.happened):
                if (error := task.exception()) is None:
                    return task.result()
                reason = failure.error or error  # the first one caused the other
            elif failure.error is not None:
                reason = failure.error
            self._stop_requested.clear()
            if save is not None:
                saving = asyncio.ensure_future(save(reason))
                if await _first(saving, self._stop_requested):
                    saving.result()
            raise reason
        finally:
            self._stop_requested = None

    def _signalled(self, number: signal.Signals) -> None:
        self._count += 1
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        more = "usually 5-40 s; once more cuts it short" if self._count == 1 else "not waiting for what is under way"
        if self._stop_requested is not None:
            self._stop_requested.set()
        else:
            self._task.cancel()
        self._say(f"stopping ({name}): {more}")  # last: it fails if nobody reads it any more


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
