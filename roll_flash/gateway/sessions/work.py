"""Schedule CPU work of a gateway's sessions, so that no agent delays another.

Invariants: each session runs one piece of work at a time, in order of arrival; large work runs in a thread, at most one
per session, even if its agent disconnects; between two small pieces of one session the event loop gets control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._pool.submit(work))

    async def close(self) -> None:
        """Wait for running work, whose size is bounded."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


class SessionWork:
    """Work of one session. Belongs to one event loop."""

    def __init__(self, threads: WorkThreads, timeout_s: float) -> None:
        self._threads = threads
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._in_thread: asyncio.Future[Any] | None = None
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
            message = f"the other requests of this session took more than {self._timeout_s:g} s to read"
            raise ApiError(429, "session_busy", message) from None

    async def _do_in_thread(self, work: Callable[[], T]) -> T:
        if self._in_thread is not None:
            await asyncio.wait([self._in_thread])
        has_begun = False

        def begin() -> T:
            nonlocal has_begun
            has_begun = True
            return work()

        future = self._threads.submit(begin)
        self._in_thread = future
        future.add_done_callback(_retrieve)
        await asyncio.wait([future], timeout=self._timeout_s)
        if not future.done():
            if has_begun:  # the agent's own doing: as a failure of ours it would save an episode from its score
                raise ApiError(413, "request_too_large", f"to read the request takes more than {self._timeout_s:g} s")
            raise InferenceError(f"the gateway had no thread for a request for {self._timeout_s:g} s")
        return future.result()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved if no caller waits any more."""
    if not future.cancelled():
        future.exception()
