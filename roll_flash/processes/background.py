"""Concurrent work: background tasks, threads, and groups of tasks that need each other.

Work that runs in the background as long as a run is started only with `start_background`, so that no error is lost: the
first one ends the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from roll_flash.errors import RollFlashError, RunError

T = TypeVar("T")

_log = logging.getLogger(__name__)

Work = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Function that sets its event once it no longer needs the state that its caller will change."""


class FirstFailure:
    """First error of all background work on one event loop."""

    def __init__(self) -> None:
        self.error: RollFlashError | None = None
        self.happened = asyncio.Event()

    def report(self, name: str, error: BaseException) -> None:
        """Store the first error, log later ones; `name` identifies the work if the error does not."""
        reported = error
        if not isinstance(reported, RollFlashError):
            reported = RunError(f"{name} failed: {type(error).__name__}: {error}")
            reported.__cause__ = error
        if self.error is None:
            self.error = reported
            self.happened.set()
        else:
            _log.error("after the run had failed: %s", reported)

    def raise_error(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            raise self.error


_WATCHED: WeakKeyDictionary[asyncio.AbstractEventLoop, FirstFailure] = WeakKeyDictionary()


@contextmanager
def first_failure() -> Iterator[FirstFailure]:
    """Within this block, work from `start_background` on this event loop reports its errors to this object."""
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


def start_background(
    work: Coroutine[Any, Any, T], name: str, *, awaited: tuple[type[Exception], ...] = ()
) -> asyncio.Task[T]:
    """Start `work` as a background task. Its error is reported at once to the `first_failure` of this event loop, or
    logged if there is none; not those of the types `awaited`, which the caller gets when it awaits the task and can
    mend. The caller must cancel the task in the end."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(functools.partial(_report, awaited=awaited))
    return task


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, Any], name: str) -> AsyncIterator[None]:
    """Run `work` with `start_background` while the block runs."""
    task = start_background(work, name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def cancel_on_failure(failure: FirstFailure) -> AsyncIterator[None]:
    """Cancel the block at the first background error and raise that error: for a start, which may take minutes. The
    block's resources are closed outside of it, so that the cancellation does not interrupt their closing.

    If the block raises another error after that, it is a consequence, and the background error is raised instead.
    """
    block = asyncio.current_task()
    assert block is not None
    is_cancelled = False

    async def watch() -> None:
        nonlocal is_cancelled
        await failure.happened.wait()
        if not block.cancelling():  # else Ctrl-C has already cancelled it
            is_cancelled = True
            block.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
        await asyncio.sleep(0)  # delivers a cancellation that came as the block ended
        failure.raise_error()
    except (asyncio.CancelledError, Exception):
        if is_cancelled:
            block.uncancel()
        if not block.cancelling():  # else Ctrl-C came meanwhile
            failure.raise_error()
        raise
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def ends_this_task(error: BaseException) -> bool:
    """True if `error`, just caught, ends the running task on request (cancellation, GeneratorExit). False for errors of
    the called code, also a CancelledError that nothing requested, and the panic of a Rust library (no Exception)."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error of a task that is done; None if it finished or its cancellation was requested."""
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else RunError(f"{task.get_name()} was cancelled by what it waited for")


def _report(task: asyncio.Task[Any], *, awaited: tuple[type[Exception], ...]) -> None:
    if (error := error_of(task)) is None or isinstance(error, awaited):
        return
    failure = _WATCHED.get(task.get_loop())
    if failure is not None:
        failure.report(task.get_name(), error)
    else:
        _log.error("%s failed: %s: %s", task.get_name(), type(error).__name__, error)


async def begin_in_background(work: Work) -> asyncio.Task[None]:
    """Start `work` and return its task when it has set its event. Raises its error if it fails before.

    Cancelling this cancels the work.
    """
    may_continue = asyncio.Event()
    task = asyncio.create_task(work(may_continue))
    task.add_done_callback(lambda _: may_continue.set())
    try:
        await may_continue.wait()
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        task.result()
    return task


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended, in whatever way."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """Wait for all and return their results. The first failure cancels the others and is raised itself, not in an
    exception group."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


@asynccontextmanager
async def in_thread(
    context: AbstractContextManager[T], *, cancel: Callable[[], None] = lambda: None
) -> AsyncIterator[T]:
    """Enter and leave `context` in a separate thread, so that the event loop continues while it is busy.

    If cancelled while it enters, `cancel` can tell `context` to hurry; a second cancellation abandons the thread,
    which does not keep the process alive.
    """
    thread, loop = DaemonThread(), asyncio.get_running_loop()
    try:
        entering = loop.run_in_executor(thread, context.__enter__)
        try:
            value = await asyncio.shield(entering)
        except asyncio.CancelledError as error:
            # The thread continues: a context that was entered must be left.
            cancel()
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


class DaemonThreads(Executor):
    """Executor with one daemon thread per call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call, future = _prepared(fn, args, kwargs)
        name = getattr(fn, "__qualname__", "call").partition(".<locals>")[0]
        threading.Thread(target=call, name=name, daemon=True).start()
        return future


class DaemonThread(Executor):
    """Executor with one daemon thread for all calls, which lives until `shutdown`: a child process may die with the
    thread that started it (Linux then sends PR_SET_PDEATHSIG, which Ray's processes request)."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="background", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call, future = _prepared(fn, args, kwargs)
        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the thread after the submitted calls. Never waits."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _prepared(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], None], Future[Any]]:
    """Return a call that cannot raise, and the future of its result."""
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        if future.set_running_or_notify_cancel():
            carry_out(future, lambda: context.run(fn, *args, **kwargs))

    return call, future


def carry_out(future: Future[Any], work: Callable[[], Any]) -> None:
    """Run `work` and give `future` its result or error, also SystemExit: the waiting task must get it, not this
    thread."""
    try:
        result = work()
    except StopIteration as error:  # from `next`: an asyncio future rejects it, and its task would wait forever
        future.set_exception(RuntimeError(f"StopIteration: {error}" if error.args else "StopIteration"))
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def call_in_thread(function: Callable[[], T]) -> T:
    """Await a blocking call. Cancellation abandons the thread, because Python cannot end it."""
    result: T = await asyncio.get_running_loop().run_in_executor(DaemonThreads(), function)
    return result


async def call_sync_or_async(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a function of a user: a coroutine function directly, any other in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    named_call = functools.wraps(function)(lambda: function(*args, **kwargs))  # the thread has the function's name
    result = await call_in_thread(named_call)
    return await result if inspect.isawaitable(result) else result
