"""One session: the calls of one episode, under one api key.

Calls may run side by side. Ending a session cancels those in flight; nothing is recorded after that. An answer that
never came for a reason that is not the agent's is remembered as `trouble`: such an episode must not be scored.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from roll_flash.gateway.api_error import ApiError
from roll_flash.gateway.history import CallRecord, History
from roll_flash.gateway.model_call import ModelCall, Requested
from roll_flash.gateway.session_work import SessionWork, WorkThreads
from roll_flash.types import FailureCause, SamplingParams

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 4096
"""Of an agent that names no limit, in a session that sets none."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """`sampling` overrides what the agent asks for, except that fewer tokens and further stop strings are its own to
    ask for: what a run trains on is sampled as the run says. None leaves it all to the agent."""

    sampling: SamplingParams | None = None
    max_calls: int | None = None
    routed_as: str | None = None
    """Name under which servers keep prefixes; the session's own where None."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the sample is masked."""

    cause: FailureCause
    message: str


class Session:
    """Use `run` for everything that a request waits for."""

    def __init__(
        self, session_id: str, settings: SessionSettings, timeout_s: float, threads: WorkThreads | None = None
    ) -> None:
        """`threads` are those of its gateway."""
        self.session_id = session_id
        self.api_key = f"rf-{secrets.token_urlsafe(24)}"
        self.settings = settings
        self.timeout_s = timeout_s
        """Of one call of the model."""
        self.work = SessionWork(threads or WorkThreads(), timeout_s)
        self.reading = asyncio.Lock()
        """Held while a large body is read: no agent fills the memory with them."""
        self.history = History()
        self.responses: dict[str, CallRecord] = {}
        """By the id that the agent was told, for `previous_response_id`."""
        self.started_s = time.time()
        self.used_s = time.monotonic()
        """When the last call came, was answered, or was given up."""
        self.calls = 0
        self.under_way = 0
        """Requests, from their head to their answer."""
        self.reached_max_calls = False
        self.context_was_full = False
        self.trouble: Trouble | None = None
        self.ended = False
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def requests_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def routed_as(self) -> str:
        return self.settings.routed_as or self.session_id

    def admit(self, answers: int = 1) -> int:
        """Count a call, once for each answer that it asks for; returns its number. Raises ApiError for a session that
        takes no more."""
        self.require_calls_left(answers)
        self.calls += answers
        self.used_s = time.monotonic()
        return self.calls - answers

    def require_calls_left(self, answers: int = 1) -> None:
        """Raises ApiError for a session that has ended or whose calls are used up."""
        self.require_open()
        limit = self.settings.max_calls
        if limit is not None and self.calls + answers > limit:
            self.reached_max_calls = True
            raise ApiError(403, "max_turns_reached", f"the episode's {limit} calls of the model are used up")

    def require_open(self) -> None:
        if self.ended:
            raise ApiError(410, "session_ended", "the session has ended: its episode was scored or given up")

    def note_trouble(self, cause: FailureCause, message: str) -> None:
        """The first counts."""
        if self.trouble is None:
            self.trouble = Trouble(cause, message)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` so that it ends with the session or with whoever waits for it, whichever is first."""
        task = asyncio.ensure_future(work)
        self._in_flight.add(task)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._in_flight.discard(task)
            self.used_s = time.monotonic()
        if task.cancelled() or self.ended:
            if not task.cancelled():
                task.exception()  # retrieved: nobody else will look at it
            self.require_open()
        return task.result()

    async def end(self) -> None:
        """No more calls; those in flight are cancelled, on the servers too."""
        self.ended = True
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def sampling(self, call: ModelCall, room: int) -> SamplingParams:
        """How to sample one call, `room` tokens being left in the context."""
        wanted, ruled = call.requested, self.settings.sampling
        if ruled is None:
            return _as_wanted(wanted, room)
        most = min(room, ruled.max_new_tokens, wanted.max_tokens or room)
        stop = (*ruled.stop, *(text for text in wanted.stop if text not in ruled.stop))
        return replace(ruled, max_new_tokens=most, stop=stop)


def _as_wanted(wanted: Requested, room: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        top_k=max(0, wanted.top_k or 0),
        max_new_tokens=min(room, wanted.max_tokens or DEFAULT_MAX_TOKENS),
        stop=wanted.stop,
        seed=wanted.seed,
    )
