"""One session: the calls of one episode, under one api key.

Calls may run concurrently. Ending a session cancels its running calls; nothing is recorded after that. A failed call
that the agent did not cause is stored as `trouble`: such an episode must not be scored.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from roll_flash.gateway.apis.api_error import ApiError
from roll_flash.gateway.model_call import ModelCall, RequestedSampling
from roll_flash.gateway.sessions.history import CallRecord, History
from roll_flash.gateway.sessions.work import SessionWork, WorkThreads
from roll_flash.processes.background import cancel_and_wait
from roll_flash.types import FailureCause, SamplingParams

if TYPE_CHECKING:
    from roll_flash.gateway.backend import Backend

T = TypeVar("T")

MAX_GENERATIONS = 8
"""Maximum answers of a session that servers make at the same time. With more, an agent could slow down all others, and
its own calls so far that they exceed their deadline, which is no sample."""
DEFAULT_MAX_TOKENS = 4096
"""Default token limit of an answer if neither agent nor session sets one."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """`sampling` overrides the agent's parameters, so that a run samples as configured; the agent may only ask for
    fewer tokens and more stop strings. None leaves all parameters to the agent."""

    sampling: SamplingParams | None = None
    max_calls: int | None = None
    routed_as: str | None = None
    """Session name for prefix caching on the servers; None uses the session id."""


@dataclass(frozen=True, slots=True)
class SessionFailure:
    """Reason why the sample is masked."""

    cause: FailureCause
    message: str


class Session:
    """A session; use `run` for all work that a request waits for."""

    def __init__(
        self, session_id: str, settings: SessionSettings, timeout_s: float, threads: WorkThreads | None = None
    ) -> None:
        """`threads`: the threads of the gateway."""
        self.session_id = session_id
        self.backend: Backend
        """Answers its calls; the gateway sets it."""
        self.api_key = f"rf-{secrets.token_urlsafe(24)}"
        self.settings = settings
        self.timeout_s = timeout_s
        """Timeout in seconds of one model call."""
        self.work = SessionWork(threads or WorkThreads(), timeout_s)
        self.reading = asyncio.Lock()
        """Held while a large body is read, so that an agent cannot fill the memory."""
        self.generating = asyncio.Semaphore(MAX_GENERATIONS)
        """Held by each answer that a server makes. The wait for it does not count towards the deadline of a call."""
        self.history = History()
        self.responses: dict[str, CallRecord] = {}
        """Answers by the response id that the agent was given, for `previous_response_id`."""
        self.started_s = self.history.clock.now_s()
        self.last_activity_s = time.monotonic()
        """Monotonic time in seconds when the last call started or ended."""
        self.calls = 0
        self.open_requests = 0
        """Requests, from their head to their answer."""
        self.reached_max_calls = False
        self.context_was_full = False
        self.refusal = ""
        """What the newest request that was refused was told."""
        self.trouble: SessionFailure | None = None
        self.ended = False
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def requests_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def routed_as(self) -> str:
        return self.settings.routed_as or self.session_id

    def admit(self, answers: int = 1) -> int:
        """Count a call, once per requested answer; return its number. Raises ApiError if no more calls are allowed."""
        self.require_calls_left(answers)
        self.calls += answers
        self.last_activity_s = time.monotonic()
        return self.calls - answers

    def require_calls_left(self, answers: int = 1) -> None:
        """Check the call limit. Raises ApiError if the session has ended or has no calls left."""
        self.require_open()
        limit = self.settings.max_calls
        if limit is not None and self.calls + answers > limit:
            self.reached_max_calls = True
            raise ApiError(403, "max_turns_reached", f"the episode's {limit} calls of the model are used up")

    def require_open(self) -> None:
        if self.ended:
            raise ApiError(410, "session_ended", "the session has ended: its episode was scored or given up")

    def note_trouble(self, cause: FailureCause, message: str) -> None:
        """Record a failure; only the first counts."""
        if self.trouble is None:
            self.trouble = SessionFailure(cause, message)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` until it ends, the session ends or the caller is cancelled."""
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
            self.last_activity_s = time.monotonic()
        if task.cancelled() or self.ended:
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved
            self.require_open()
        return task.result()

    async def end(self) -> None:
        """End the session and cancel its running calls, also on the servers."""
        self.ended = True
        await cancel_and_wait(self._in_flight)

    def sampling(self, call: ModelCall, room: int, number: int) -> SamplingParams:
        """Sampling parameters of the call `number`; `room`: tokens left in the context."""
        wanted, ruled = call.requested, self.settings.sampling
        if ruled is None:
            sampling = as_requested(wanted)
            return replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))
        most = min(room, ruled.max_new_tokens, wanted.max_tokens or room)
        stop = (*ruled.stop, *(text for text in wanted.stop if text not in ruled.stop))
        return replace(ruled.with_own_seed(number), max_new_tokens=most, stop=stop)


def why_no_answer(sessions: Sequence[Session]) -> str:
    """Return why an agent with these sessions may have got no answer: mostly it asks for another model, at another
    path or with another key, and the program says nothing of it."""
    calls = sum(session.calls for session in sessions)
    refusal = next((f"; a request was refused: {each.refusal}" for each in sessions if each.refusal), "")
    return f"the agent got no answer of the model; it asked {calls} times with the key of its episode{refusal}"


def as_requested(wanted: RequestedSampling) -> SamplingParams:
    """Sampling parameters of a request, with the defaults for those that it does not set."""
    return SamplingParams(
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=1.0 if wanted.top_p is None else wanted.top_p,
        top_k=max(0, wanted.top_k or 0),
        max_new_tokens=wanted.max_tokens or DEFAULT_MAX_TOKENS,
        stop=wanted.stop,
        seed=wanted.seed,
    )
