"""Threads for what may hang, such as users' code: they do not keep the process from ending."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads(Executor):
    """A daemon thread for each call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call, future = _prepared(fn, args, kwargs)
        threading.Thread(target=call, name="environment", daemon=True).start()
        return future


class DaemonThread(Executor):
    """One daemon thread for all calls, which lives until `shutdown`: what a call has started may end with the thread
    that started it (Linux sends PR_SET_PDEATHSIG then, which Ray's processes ask for)."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="background", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call, future = _prepared(fn, args, kwargs)
        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """After the calls that were submitted. Never waits."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _prepared(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], None], Future[Any]]:
    """A call that cannot raise, and the future of what it gives."""
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        if future.set_running_or_notify_cancel():
            carry_out(future, lambda: context.run(fn, *args, **kwargs))

    return call, future


def carry_out(future: Future[Any], work: Callable[[], Any]) -> None:
    """Settles `future`, whatever `work` raises: also SystemExit, which belongs to who waits and not to this thread."""
    try:
        result = work()
    except StopIteration as error:  # of `next`: an asyncio future does not take it, and who waits would wait for ever
        future.set_exception(RuntimeError(f"StopIteration: {error}" if error.args else "StopIteration"))
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def call_in_thread(function: Callable[[], Result]) -> Result:
    """Await a blocking call. When the waiting is cancelled the thread is left to itself: Python cannot end it."""
    result: Result = await asyncio.get_running_loop().run_in_executor(DaemonThreads(), function)
    return result
