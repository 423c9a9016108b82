"""Work that a client has asked for and fetches later, by its name.

Invariants: at most `MAX_OPEN` pieces of work are under way; a request that is sent again is done once; a result stays
until newer ones need its place, and one that goes unread is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from roll_flash.errors import RollFlashError
from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.processes.background import cancel_and_wait

MAX_OPEN = 1024
MAX_KEPT_BYTES = 256 * 2**20
OVERHEAD_BYTES = 1024
"""What a result takes besides its bytes, about."""

Result = bytes | dict[str, Any]
"""A Protocol Buffer, or what becomes JSON."""
_log = logging.getLogger(__name__)


class Futures:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Task[Result]] = {}
        self._done: OrderedDict[str, Result] = OrderedDict()
        self._unread: set[str] = set()
        self._kept_bytes = 0
        self.started = 0
        self.failed = 0
        self.dropped_unread = 0

    def require_room(self) -> None:
        """Raises ApiError, after which clients wait and ask again."""
        if len(self._open) >= MAX_OPEN:
            raise ApiError(429, "too_many_futures", f"{MAX_OPEN} requests are under way; fetch their results first")

    def knows(self, name: str) -> bool:
        return name in self._open or name in self._done

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> None:
        """Begin `work`, whose name must be new."""
        self.started += 1
        task = self._open[name] = asyncio.create_task(self._outcome(name, work), name=f"tinker {name}")
        task.add_done_callback(lambda _: self._give_up(name))

    async def wait(self, name: str, timeout_s: float) -> Result | None:
        """Return the result; None if it does not come within `timeout_s`. Raises ApiError if there is no such work."""
        if (task := self._open.get(name)) is not None:
            await asyncio.wait([task], timeout=timeout_s)
        if name in self._done:
            self._unread.discard(name)
            return self._done[name]
        if name in self._open:
            return None
        raise ApiError(410, "future_not_found", f"no request {name[:200]!r} is known: its result was given up, or lost")

    async def cancel(self, prefix: str) -> None:
        """Cancel the work whose name begins like this."""
        await cancel_and_wait([task for name, task in self._open.items() if name.startswith(prefix)])

    def _give_up(self, name: str) -> None:
        """Give an answer for work that was cancelled, perhaps before it began, and so left none."""
        if self._open.pop(name, None) is not None:
            self._keep(name, _failure("it was cancelled, because its session has ended", "user"))

    async def _outcome(self, name: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        try:
            result = await work()
        except ApiError as error:
            result = _failure(error.message, "user")
        except TimeoutError:
            result = _failure("no answer of the model in time (rollout.generate_timeout_s)", "server")
        except RollFlashError as error:
            result = _failure(str(error), "server")
        except Exception as error:  # a bug of ours; the client still gets an answer
            _log.exception("%s", name)
            result = _failure(f"{type(error).__name__}: {error}", "server")
        self._open.pop(name, None)
        self._keep(name, result)
        return result

    def _keep(self, name: str, result: Result) -> None:
        self.failed += isinstance(result, dict) and "error" in result
        self._done[name] = result
        self._unread.add(name)
        self._kept_bytes += _size(result)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._done) > 1:
            oldest, given_up = self._done.popitem(last=False)
            self._kept_bytes -= _size(given_up)
            self.dropped_unread += oldest in self._unread
            self._unread.discard(oldest)


def _failure(message: str, category: str) -> Result:
    return {"error": message, "category": category}


def _size(result: Result) -> int:
    return OVERHEAD_BYTES + (len(result) if isinstance(result, bytes) else 0)
