"""Thread pool for environments that block.

A thread cannot be stopped from outside. An abandoned call (deadline passed or episode cancelled) keeps its thread until
it returns, and a new thread replaces it: environments that hang do not block the others.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from roll_flash.errors import EnvError
from roll_flash.processes.background import carry_out

logger = logging.getLogger(__name__)

MAX_ABANDONED_CALLS = 256
"""Maximum number of abandoned calls that still run; above it new calls raise EnvError."""


class _Call(Future[Any]):
    """A call of an environment. Cancelling it while it runs abandons its thread."""

    def __init__(self, threads: EnvironmentThreads, work: Callable[[], Any]) -> None:
        super().__init__()
        self._threads = threads
        self.work = work
        self.has_returned = False
        self.is_given_up = False

    def cancel(self) -> bool:
        if super().cancel():
            return True
        self._threads._give_up(self)
        return False


class EnvironmentThreads(Executor):
    """Runs at most `size` calls at once, not counting abandoned ones. Its threads end with the process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        """Those that take calls."""
        self._open = 0
        """Calls that wait or run, without the abandoned ones. Counted, since a thread that begins to wait may take a
        call for which another was just started: with a count of idle threads their number grew with the steps."""
        self.lost = 0
        """Number of abandoned calls that have not returned."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call. Raises EnvError if `MAX_ABANDONED_CALLS` abandoned calls still run."""
        if self.lost >= MAX_ABANDONED_CALLS:
            raise EnvError(f"{self.lost} blocking calls of environments hang in this worker; find out which and why")
        call = _Call(self, lambda: fn(*args, **kwargs))
        with self._lock:
            self._open += 1
        self._queue.put(call)
        self._start_thread()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop idle threads now and busy threads after their call. Never waits, despite `wait`."""
        with self._lock:
            count = self._threads
        for _ in range(count):
            self._queue.put(None)

    def _start_thread(self) -> None:
        """Start a thread if there is one for fewer than all open calls."""
        with self._lock:
            if self._threads >= min(self._size, self._open):
                return
            self._threads += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call.has_returned or call.is_given_up:
                return
            call.is_given_up = True
            self.lost += 1
            self._threads -= 1
            self._open -= 1
        logger.warning("a call of a blocking environment was given up; %d hang in this worker", self.lost)
        self._start_thread()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if call.set_running_or_notify_cancel():
                carry_out(call, partial(self._run, call))
                if call.is_given_up:
                    return
            else:
                with self._lock:
                    self._open -= 1
        with self._lock:
            self._threads -= 1

    def _run(self, call: _Call) -> Any:
        """Run a call. It is open until just before its result is there, which is when the next may be submitted."""
        try:
            return call.work()
        finally:
            with self._lock:
                call.has_returned = True
                if call.is_given_up:
                    self.lost -= 1
                else:
                    self._open -= 1
