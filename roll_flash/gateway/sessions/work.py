"""Schedule CPU work of a gateway's sessions, so that no agent delays another.

Invariants: each session runs one piece of work at a time, in order of arrival; large work runs in a thread, at most one
per session, even if its agent disconnects; between two small pieces of one session the event loop gets control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from roll_flash.errors import InferenceError
from roll_flash.gateway.apis.api_error import ApiError

T = TypeVar("T")

THREADS = 4
SMALL_CHARACTERS = 4096
"""Maximum size of work on the event loop (read, render, tokenize): a few milliseconds."""


class WorkThreads:
    """Threads of a gateway, shared by its sessions in first-come, first-served order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._pool.submit(work)

    async def close(self) -> None:
        """Wait for running work, whose size is bounded."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


class SessionWork:
    """Work of one session. Belongs to one event loop."""

    def __init__(self, threads: WorkThreads, timeout_s: float) -> None:
        self._threads = threads
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._in_thread: Future[Any] | None = None
        """May still run after the caller was cancelled."""

    async def do(self, work: Callable[[], T], characters: int) -> T:
        """Run `work` on a text of `characters`. Cancelling does not stop a running thread, but delays new work until
        its end.

        Raises ApiError if the session's own work takes too long, InferenceError if other sessions' work does.
        """
        await self._acquire_turn()
        try:
            if characters > SMALL_CHARACTERS:
                return await self._do_in_thread(work)
            found = work()
            await asyncio.sleep(0)
            return found
        finally:
            self._turn.release()

    async def _acquire_turn(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise self._busy() from None

    async def _do_in_thread(self, work: Callable[[], T]) -> T:
        if self._in_thread is not None and not self._in_thread.done():
            await self._wait_for(self._in_thread)
            if not self._in_thread.done():
                raise self._busy()
        submitted = self._threads.submit(work)
        self._in_thread = submitted
        await self._wait_for(submitted)
        if not submitted.done():  # the agent's own doing: as a failure of ours it would save an episode from its score
            raise ApiError(413, "request_too_large", f"to read the request takes more than {self._timeout_s:g} s")
        return submitted.result()

    async def _wait_for(self, submitted: Future[Any]) -> None:
        """Wait until the end of work, or the deadline. Raises InferenceError if it has not begun; then it never does.

        Work of a caller that was cancelled keeps its place: without this an agent could fill the queue.
        """
        future = asyncio.wrap_future(submitted)
        future.add_done_callback(_retrieve)
        await asyncio.wait([future], timeout=self._timeout_s)
        if submitted.cancel():
            raise InferenceError(f"the gateway had no thread for a request for {self._timeout_s:g} s")

    def _busy(self) -> ApiError:
        message = f"the other requests of this session took more than {self._timeout_s:g} s to read"
        return ApiError(429, "session_busy", message)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved if no caller waits any more."""
    if not future.cancelled():
        future.exception()
