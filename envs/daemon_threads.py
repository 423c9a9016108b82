"""Threads for users' code, which may hang: they do not keep the process from ending."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads(Executor):
    """A daemon thread for each call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        context = contextvars.copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(fn, *args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, name="environment", daemon=True).start()
        return future


async def call_in_thread(function: Callable[[], Result]) -> Result:
    """Await a blocking call. When the waiting is cancelled the thread is left to itself: Python cannot end it."""
    result: Result = await asyncio.get_running_loop().run_in_executor(DaemonThreads(), function)
    return result
