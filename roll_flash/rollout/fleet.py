"""The driver's side of the workers: places episodes, collects outcomes, replaces workers that die.

Invariant: every submitted episode reaches its receiver exactly once, as a trajectory or as a failure, unless it was
cancelled. The episodes of a worker that died come back as failures with the cause `worker_died`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_flash.errors import RollFlashError, RunError
from roll_flash.rollout.worker import EpisodeStatus, Outcome, WorkerActor, WorkerSettings
from roll_flash.types import EpisodeFailure, EpisodeSpec

logger = logging.getLogger(__name__)

POLL_S = 2.0
CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
MAX_WORKER_DEATHS = 20
"""Workers that may die in one run before it stops."""

Receiver = Callable[[Outcome], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    index: int
    actor: Any
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while a dead worker is being replaced."""
    episodes: dict[str, EpisodeSpec] = field(default_factory=dict)


class WorkerFleet:
    """`workers` Ray actors of `WorkerActor`. Ray must be initialised."""

    def __init__(self, settings: WorkerSettings, workers: int, *, ray_options: dict[str, Any] | None = None) -> None:
        self._settings = settings
        self._count = workers
        self._ray_options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000, **(ray_options or {})}
        self._members: list[_Member] = []
        self._receivers: dict[str, Receiver] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._deaths = 0
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Start every worker. Raises what a worker's start raised (SandboxError, RunError, ...)."""
        actors = await asyncio.gather(*(self._start_actor() for _ in range(self._count)))
        self._members = [_Member(index, actor) for index, actor in enumerate(actors)]
        for member in self._members:
            member.ready.set()
        self._tasks = [asyncio.create_task(self._collect(member)) for member in self._members]

    async def submit(self, episodes: Sequence[EpisodeSpec], receiver: Receiver) -> None:
        """Start episodes on the workers with the fewest; `receiver` gets each outcome once."""
        for episode in episodes:
            self._receivers[episode.episode_id] = receiver
        waiting = list(episodes)
        while waiting:
            batches = self._place(waiting, await self._ready_members())
            unplaced = await asyncio.gather(*(self._hand_over(member, batch) for member, batch in batches))
            waiting = [episode for batch in unplaced for episode in batch]

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        """Stop episodes wherever they are; their receivers hear nothing of them any more."""
        wanted = set(episode_ids)
        for member in self._members:
            here = [episode_id for episode_id in member.episodes if episode_id in wanted]
            for episode_id in here:
                del member.episodes[episode_id]
                self._receivers.pop(episode_id, None)
            if here:
                with contextlib.suppress(RunError, RayActorError):  # a dead worker has cancelled everything
                    await _within(member.actor.cancel.remote(here), CALL_TIMEOUT_S, "cancel")

    async def run(self, episodes: Sequence[EpisodeSpec], *, max_concurrent: int) -> AsyncIterator[Outcome]:
        """Play a fixed list, at most `max_concurrent` at once, and yield outcomes as they come."""
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        waiting = list(reversed(episodes))
        running: set[str] = set()
        try:
            while waiting or running:
                count = min(max_concurrent - len(running), len(waiting))
                batch = [waiting.pop() for _ in range(count)]
                running.update(episode.episode_id for episode in batch)
                if batch:
                    await self.submit(batch, outcomes.put_nowait)
                for outcome in await self._next_outcomes(outcomes):
                    running.discard(outcome.episode_id)
                    yield outcome
        finally:
            await self.cancel(running)

    async def status(self) -> list[EpisodeStatus]:
        """Every running episode and what it waits for."""
        calls = (_within(m.actor.status.remote(), CALL_TIMEOUT_S, "status") for m in self._members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [status for answer in answers if isinstance(answer, list) for status in answer]

    async def close(self) -> None:
        """Cancel everything, free every sandbox, end the actors. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            try:
                await _within(member.actor.close.remote(), CALL_TIMEOUT_S, "close")
            except (RunError, RayActorError) as error:
                logger.warning("worker %d did not close in order: %s", member.index, error)
            ray.kill(member.actor)
        self._members, self._tasks = [], []

    def _place(
        self, episodes: Iterable[EpisodeSpec], members: Sequence[_Member]
    ) -> list[tuple[_Member, list[EpisodeSpec]]]:
        batches: dict[int, list[EpisodeSpec]] = {member.index: [] for member in members}
        for episode in episodes:
            member = min(members, key=lambda m: len(m.episodes))
            member.episodes[episode.episode_id] = episode
            batches[member.index].append(episode)
        return [(member, batches[member.index]) for member in members if batches[member.index]]

    async def _hand_over(self, member: _Member, batch: list[EpisodeSpec]) -> list[EpisodeSpec]:
        """Returns what must be placed elsewhere because the worker is dead: none of it has begun."""
        try:
            await _within(member.actor.submit.remote(batch), CALL_TIMEOUT_S, "submit")
        except RunError as error:
            self._fail(member, batch, str(error))
        except RayActorError:
            member.ready.clear()
            return [episode for episode in batch if member.episodes.pop(episode.episode_id, None)]
        return []

    async def _ready_members(self) -> list[_Member]:
        """The workers that can take episodes; waits for one if all are being replaced."""
        self._raise_error()
        if not any(member.ready.is_set() for member in self._members):
            waits = [asyncio.ensure_future(member.ready.wait()) for member in self._members]
            try:
                await asyncio.wait(waits, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            self._raise_error()
        members = [member for member in self._members if member.ready.is_set()]
        if not members:
            raise RunError(f"no rollout worker came back within {START_TIMEOUT_S:g} s")
        return members

    async def _start_actor(self) -> Any:
        actor: Any = ray.remote(WorkerActor).options(**self._ray_options).remote(self._settings)
        await _within(actor.start.remote(), START_TIMEOUT_S, "start")
        return actor

    async def _collect(self, member: _Member) -> None:
        """Hand out what one worker finished; replace the worker when it dies."""
        while True:
            try:
                outcomes = await _within(member.actor.poll.remote(POLL_S), POLL_S + CALL_TIMEOUT_S, "poll")
            except (RunError, RayActorError) as error:
                await self._replace(member, error)
                continue
            for outcome in outcomes:
                member.episodes.pop(outcome.episode_id, None)
                self._deliver(outcome)

    async def _replace(self, member: _Member, error: Exception) -> None:
        self._deaths += 1
        member.ready.clear()
        self._fail(member, list(member.episodes.values()), f"its worker died: {_first_line(error)}")
        logger.warning("worker %d died: %s", member.index, _first_line(error))
        with contextlib.suppress(RayActorError):  # it may be hung rather than dead
            ray.kill(member.actor)
        try:
            if self._deaths > MAX_WORKER_DEATHS:
                raise RunError(f"{self._deaths} rollout workers died; the last said: {_first_line(error)}")
            member.actor = await self._start_actor()
        except Exception as failure:
            self._error = failure
            member.ready.set()  # who waits for it must see the error
            raise
        member.ready.set()

    def _fail(self, member: _Member, episodes: Iterable[EpisodeSpec], message: str) -> None:
        for spec in episodes:
            if member.episodes.pop(spec.episode_id, None) is not None:
                self._deliver(
                    EpisodeFailure(
                        spec.episode_id, spec.group_id, spec.task, "worker_died", message, turn=0, attempt=spec.attempt
                    )
                )

    def _deliver(self, outcome: Outcome) -> None:
        receiver = self._receivers.pop(outcome.episode_id, None)
        if receiver is not None:
            receiver(outcome)

    async def _next_outcomes(self, outcomes: asyncio.Queue[Outcome]) -> list[Outcome]:
        """At least one, unless the fleet broke; the episodes' own deadlines bound the wait."""
        while outcomes.empty():
            self._raise_error()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    return [await outcomes.get()]
        return [outcomes.get_nowait() for _ in range(outcomes.qsize())]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


async def _within(reference: Awaitable[T], timeout_s: float, what: str) -> T:
    """Await a call with a deadline, and raise what the worker raised rather than Ray's wrapper around it."""
    try:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that meets a finished call.
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError:
        raise RunError(f"a rollout worker did not answer {what!r} within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, RollFlashError):
            raise error.cause from None
        raise


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
