"""Work side by side: behind the loop over steps, in threads, or all of several that need each other.

What runs in the background for as long as a run does is started with `start_background` alone, so that none of it can
end unseen: its first error ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from roll_flash.daemon_threads import DaemonThread
from roll_flash.errors import RollFlashError, RunError

T = TypeVar("T")

_log = logging.getLogger(__name__)

Work = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Sets the event it is given when it needs nothing more of what its caller will change."""


class FirstFailure:
    """The first error of all background work on one event loop."""

    def __init__(self) -> None:
        self.error: RollFlashError | None = None
        self.happened = asyncio.Event()

    def report(self, name: str, error: BaseException) -> None:
        """`name` says whose error it is, where the error does not say it in words of its own."""
        told = error
        if not isinstance(told, RollFlashError):
            told = RunError(f"{name} failed: {type(error).__name__}: {error}")
            told.__cause__ = error
        if self.error is None:
            self.error = told
            self.happened.set()
        else:
            _log.error("after the run had failed: %s", told)

    def raise_error(self) -> None:
        """Raises the error, if there was one."""
        if self.error is not None:
            raise self.error


_WATCHED: WeakKeyDictionary[asyncio.AbstractEventLoop, FirstFailure] = WeakKeyDictionary()


@contextmanager
def first_failure() -> Iterator[FirstFailure]:
    """Within this block, what `start_background` started on this event loop reports its errors here."""
    loop = asyncio.get_running_loop()
    before = _WATCHED.get(loop)
    failure = _WATCHED[loop] = FirstFailure()
    try:
        yield failure
    finally:
        if before is None:
            del _WATCHED[loop]
        else:
            _WATCHED[loop] = before


def start_background(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start `work` beside everything else. Its error goes to the `first_failure` of this event loop at once; where
    there is none it is logged. Who starts it cancels it in the end."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, Any], name: str) -> AsyncIterator[None]:
    """`start_background` for as long as the block runs."""
    task = start_background(work, name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def given_up_after(failure: FirstFailure) -> AsyncIterator[None]:
    """The first error in the background cancels the block, which then raises that error: for a start, in which nobody
    else looks at it for minutes. What the block started is closed outside of it, so that nothing cuts that short.

    Whatever else the block raises after that error is its consequence, and the error is raised instead.
    """
    block = asyncio.current_task()
    assert block is not None
    is_given_up = False

    async def watch() -> None:
        nonlocal is_given_up
        await failure.happened.wait()
        if not block.cancelling():  # what Ctrl-C has begun to end needs no second push
            is_given_up = True
            block.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
        await asyncio.sleep(0)  # where a cancellation arrives that came as the block ended
        failure.raise_error()
    except (asyncio.CancelledError, Exception):
        if is_given_up:
            block.uncancel()
        if not block.cancelling():  # else Ctrl-C has come since
            failure.raise_error()
        raise
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def ends_this_task(error: BaseException) -> bool:
    """Whether `error`, just caught, is how somebody ends the running task, and not what code of others raises: a
    cancellation that nobody asked for leaks out of what was called, a panic of a library in Rust is no Exception."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Why a task that is done did not come to its end; None where it did, or was cancelled by others."""
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else RunError(f"{task.get_name()} was cancelled by what it waited for")


def _report(task: asyncio.Task[Any]) -> None:
    if (error := error_of(task)) is None:
        return
    failure = _WATCHED.get(task.get_loop())
    if failure is not None:
        failure.report(task.get_name(), error)
    else:
        _log.error("%s failed: %s: %s", task.get_name(), type(error).__name__, error)


async def begin_in_background(work: Work) -> asyncio.Task[None]:
    """Start `work` and return its task when it has set its event. Raises what it raises before.

    Whoever cancels this cancels the work.
    """
    may_go_on = asyncio.Event()
    task = asyncio.create_task(work(may_go_on))
    task.add_done_callback(lambda _: may_go_on.set())
    try:
        await may_go_on.wait()
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        task.result()
    return task


async def all_or_first_error(*work: Awaitable[Any]) -> None:
    """Wait for all of them. The first failure gives the others up and is raised as it is, not in a group."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def in_thread(
    context: AbstractContextManager[T], *, give_up: Callable[[], None] = lambda: None
) -> AsyncIterator[T]:
    """`context`, entered and left in a thread of its own: the event loop goes on while it is busy.

    When it is cancelled while it enters, `give_up` may tell `context` to be quick; being cancelled once more leaves the
    thread to itself, and it does not keep the process from ending.
    """
    thread, loop = DaemonThread(), asyncio.get_running_loop()
    try:
        entering = loop.run_in_executor(thread, context.__enter__)
        try:
            value = await asyncio.shield(entering)
        except asyncio.CancelledError as error:
            # The thread goes on: what it has begun must be left in order.
            give_up()
            await asyncio.wait([entering])
            if entering.exception() is None:
                await loop.run_in_executor(thread, context.__exit__, type(error), error, error.__traceback__)
            raise
        try:
            yield value
        except BaseException as error:
            if not await loop.run_in_executor(thread, context.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await loop.run_in_executor(thread, context.__exit__, None, None, None)
    finally:
        thread.shutdown()
