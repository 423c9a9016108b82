"""Threads for environments that block.

A thread cannot be stopped from outside. So a call that is given up (its deadline passed, or its episode was cancelled)
keeps its thread until it returns, and another thread takes its place: environments that hang do not starve the others.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from roll_flash.daemon_threads import carry_out
from roll_flash.errors import EnvError

logger = logging.getLogger(__name__)

MOST_LOST = 256
"""Calls that may hang at the same time; beyond that new calls are refused."""


class _Call(Future[Any]):
    """Cancelling one that runs gives its thread up."""

    def __init__(self, threads: EnvironmentThreads, work: Callable[[], Any]) -> None:
        super().__init__()
        self._threads = threads
        self.work = work
        self.is_given_up = False

    def cancel(self) -> bool:
        if super().cancel():
            return True
        self._threads._give_up(self)
        return False


class EnvironmentThreads(Executor):
    """At most `size` calls at once, beside those that were given up. Its threads end with the process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0
        self._idle = threading.Semaphore(0)
        self.lost = 0
        """Calls that were given up and have not returned."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises EnvError when `MOST_LOST` calls hang."""
        if self.lost >= MOST_LOST:
            raise EnvError(f"{self.lost} blocking calls of environments hang in this worker; find out which and why")
        call = _Call(self, lambda: fn(*args, **kwargs))
        self._queue.put(call)
        if not self._idle.acquire(blocking=False):
            self._start_thread()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that wait; those that work end after their call. Never waits for them."""
        with self._lock:
            count = self._running
        for _ in range(count):
            self._queue.put(None)

    def _start_thread(self) -> None:
        with self._lock:
            if self._running >= self._size:
                return
            self._running += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call.done() or call.is_given_up:
                return
            call.is_given_up = True
            self.lost += 1
            self._running -= 1
        logger.warning("a call of a blocking environment was given up; %d hang in this worker", self.lost)
        if not self._queue.empty():
            self._start_thread()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if call.set_running_or_notify_cancel():
                carry_out(call, call.work)
                with self._lock:
                    if call.is_given_up:
                        self.lost -= 1
                        return
            if self._queue.empty():
                self._idle.release()
        with self._lock:
            self._running -= 1
