"""The driver's side of the workers: places episodes, collects outcomes, replaces workers that die.

Invariant: every submitted episode reaches its receiver exactly once, as a trajectory or as a failure, unless it was
cancelled. The episodes of a worker that died come back as failures with the cause `worker_died`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_flash.background import all_or_first_error, error_of, start_background
from roll_flash.errors import RollFlashError, RunError
from roll_flash.inference.client_metrics import combined
from roll_flash.recent import RecentCount
from roll_flash.rollout.placement import Node, Placement, plan
from roll_flash.rollout.worker import EpisodeStatus, Outcome, WorkerActor, WorkerSettings
from roll_flash.sandboxes.pool_stats import PoolStats
from roll_flash.types import EpisodeFailure, EpisodeSpec

logger = logging.getLogger(__name__)

POLL_S = 2.0
CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
WATCH = "watch"
"""Concurrency group of the calls that must be answered while the worker's own event loop is stuck."""
WATCH_TIMEOUT_S = 3.0
WORKER_DIED = (RayActorError, WorkerCrashedError, OutOfMemoryError)
"""What Ray raises for an actor whose process is gone, killed for want of memory too."""
MAX_WORKER_DEATHS = 20
DEATH_WINDOW_S = 1800.0
"""Workers that may die within so many seconds before the run stops: a machine that loses one a day goes on."""

Receiver = Callable[[Outcome], None]


class NoAnswerError(RunError):
    """A worker did not answer a call in time."""


T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    index: int
    actor: Any
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while a dead worker is being replaced."""
    episodes: dict[str, EpisodeSpec] = field(default_factory=dict)
    """Placed here and not ended."""
    to_submit: dict[str, EpisodeSpec] = field(default_factory=dict)
    to_cancel: list[str] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to submit or to cancel."""


class WorkerFleet:
    """`workers` Ray actors of `WorkerActor`. Ray must be initialised."""

    def __init__(
        self,
        settings: WorkerSettings,
        workers: int,
        *,
        placement: Placement = "pack",
        resources: Mapping[str, float] | None = None,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        self._settings = settings
        self._count = workers
        self._resources = dict(resources or {})
        self._placement = placement
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._members: list[_Member] = []
        self._receivers: dict[str, Receiver] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._deaths = RecentCount(DEATH_WINDOW_S)
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Start every worker. Raises what a worker's start raised (SandboxError, RunError, ...); then none is starting
        any more, and `close` ends those that have."""
        await all_or_first_error(*(self._start_member(index) for index in range(self._count)))
        self._members.sort(key=lambda member: member.index)
        for member in self._members:
            member.ready.set()
            for work in (self._collect(member), self._feed(member)):
                task = start_background(work, f"the exchange with rollout worker {member.index}")
                task.add_done_callback(self._note_failure)
                self._tasks.append(task)

    async def submit(self, episodes: Sequence[EpisodeSpec], receiver: Receiver) -> None:
        """Start episodes on the workers with the fewest; `receiver` gets each outcome once.

        Waits only while no worker is there to take them, not for a worker to answer.
        """
        for episode in episodes:
            self._receivers[episode.episode_id] = receiver
        self._place(episodes, await self._ready_members())

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        """Stop episodes wherever they are; their receivers hear nothing of them any more."""
        wanted = set(episode_ids)
        for member in self._members:
            for episode_id in wanted & member.episodes.keys():
                del member.episodes[episode_id]
                self._receivers.pop(episode_id, None)
                if member.to_submit.pop(episode_id, None) is None:
                    member.to_cancel.append(episode_id)
                    member.has_news.set()

    async def run(self, episodes: Iterable[EpisodeSpec], *, max_concurrent: int) -> AsyncIterator[Outcome]:
        """Play episodes, at most `max_concurrent` at once, and yield outcomes as they come.

        `episodes` is asked for the next one only when it can start, so that its owner may stop it at any time.
        """
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        waiting = iter(episodes)
        running: set[str] = set()
        try:
            while (batch := list(islice(waiting, max_concurrent - len(running)))) or running:
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

    async def client_metrics(self) -> dict[str, float]:
        """What the workers' clients of the model servers have counted, all together."""
        calls = (_within(m.actor.client_metrics.remote(), CALL_TIMEOUT_S, "client_metrics") for m in self._members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return combined(answer for answer in answers if isinstance(answer, dict))

    async def sandbox_metrics(self) -> dict[str, float]:
        """What the workers' sandbox pools have counted, all together; empty where there are none."""
        calls = (_within(m.actor.pool_stats.remote(), CALL_TIMEOUT_S, "pool_stats") for m in self._members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        total = PoolStats()
        pools = [answer for answer in answers if isinstance(answer, PoolStats)]
        for pool in pools:
            total.merge(pool)
        return total.as_metrics() if pools else {}

    async def close(self) -> None:
        """Cancel everything, free every sandbox, end the actors. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(_close(member) for member in self._members))
        self._members, self._tasks = [], []

    def _place(self, episodes: Iterable[EpisodeSpec], members: Sequence[_Member]) -> None:
        for episode in episodes:
            member = min(members, key=lambda m: len(m.episodes))
            member.episodes[episode.episode_id] = episode
            member.to_submit[episode.episode_id] = episode
            member.has_news.set()

    async def _feed(self, member: _Member) -> None:
        """Tell one worker what to start and to stop: all that came up during the last call in one."""
        while True:
            await member.has_news.wait()
            await member.ready.wait()
            member.has_news.clear()
            submit, member.to_submit = list(member.to_submit.values()), {}
            cancel, member.to_cancel = member.to_cancel, []
            actor = member.actor
            try:
                await _within(actor.update.remote(submit, cancel), self._heartbeat_timeout_s, "update")
            except NoAnswerError as error:
                self._fail(member, submit, str(error))
            except WORKER_DIED:
                if member.actor is actor:  # `_collect` will see it too and replace the worker
                    member.ready.clear()
                lost = [episode for episode in submit if member.episodes.pop(episode.episode_id, None)]
                await self._place_again(lost)

    async def _place_again(self, episodes: Sequence[EpisodeSpec]) -> None:
        """What a dead worker had been given but cannot have begun."""
        try:
            self._place(episodes, await self._ready_members())
        except RollFlashError as error:
            for spec in episodes:
                self._deliver(_worker_died(spec, str(error)))

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

    async def _start_member(self, index: int) -> None:
        self._members.append(_Member(index, await self._start_actor(index)))

    async def _start_actor(self, index: int) -> Any:
        planned = plan(self._placement, self._count, self._resources, await asyncio.to_thread(_living_nodes))
        remote_class: Any = ray.remote(concurrency_groups={WATCH: 1})(WorkerActor)  # type: ignore[call-overload]
        actor: Any = remote_class.options(**ray_options(self._resources, planned[index])).remote(self._settings)
        try:
            await _within(actor.start.remote(), START_TIMEOUT_S, "start")
        except NoAnswerError as error:
            ray.kill(actor)
            raise RunError(f"{error}{await asyncio.to_thread(_lacking, self._resources)}") from None
        except BaseException:
            ray.kill(actor)
            raise
        return actor

    async def _collect(self, member: _Member) -> None:
        """Hand out what one worker finished; replace the worker when it dies or does not answer in time."""
        while True:
            try:
                outcomes = await _within(member.actor.poll.remote(POLL_S), POLL_S + self._heartbeat_timeout_s, "poll")
            except WORKER_DIED as error:
                await self._replace(member, f"died: {_first_line(error)}")
                continue
            except NoAnswerError:
                await self._replace(member, await self._describe_hang(member))
                continue
            for outcome in outcomes:
                member.episodes.pop(outcome.episode_id, None)
                self._deliver(outcome)

    async def _describe_hang(self, member: _Member) -> str:
        """The call goes to another event loop of the worker, which may be able to look at the one that is stuck."""
        try:
            call = member.actor.stuck_at.options(concurrency_group=WATCH).remote()
            place = await _within(call, WATCH_TIMEOUT_S, "stuck_at")
        except (RunError, *WORKER_DIED) as error:
            place = f"not known ({_first_line(error)})"
        silence = f"gave no sign of life for {self._heartbeat_timeout_s:g} s"
        return f"{silence} (rollout.heartbeat_timeout_s); its event loop is held up in {place}"

    async def _replace(self, member: _Member, what: str) -> None:
        deaths = self._deaths.add(time.monotonic())
        member.ready.clear()
        self._fail(member, list(member.episodes.values()), f"its worker {what}")
        member.to_submit, member.to_cancel = {}, []
        logger.warning("rollout worker %d %s; it is replaced", member.index, what)
        with contextlib.suppress(*WORKER_DIED):  # it may be hung rather than dead
            ray.kill(member.actor)
        try:
            if deaths > MAX_WORKER_DEATHS:
                within = f"within {DEATH_WINDOW_S / 60:g} minutes"
                raise RunError(f"{deaths} rollout workers died {within}; the last one {what}")
            member.actor = await self._start_actor(member.index)
        finally:
            member.ready.set()  # who waits for it must see the error too

    def _fail(self, member: _Member, episodes: Iterable[EpisodeSpec], message: str) -> None:
        for spec in episodes:
            if member.episodes.pop(spec.episode_id, None) is not None:
                self._deliver(_worker_died(spec, message))

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

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """Who waits for outcomes must hear that there will be none."""
        self._error = self._error or error_of(task)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


async def _close(member: _Member) -> None:
    try:
        await _within(member.actor.close.remote(), CALL_TIMEOUT_S, "close")
    except (RunError, *WORKER_DIED) as error:
        logger.warning("worker %d did not close in order: %s", member.index, error)
    finally:
        ray.kill(member.actor)


async def _within(reference: Awaitable[T], timeout_s: float, what: str) -> T:
    """Await a call with a deadline, and raise what the worker raised rather than Ray's wrapper around it."""
    try:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that meets a finished call.
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError:
        raise NoAnswerError(f"a rollout worker did not answer {what!r} within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, RollFlashError):
            raise error.cause from None
        raise


def _worker_died(spec: EpisodeSpec, message: str) -> EpisodeFailure:
    return EpisodeFailure(spec.episode_id, spec.group_id, spec.task, "worker_died", message, 0, spec.attempt)


def ray_options(resources: Mapping[str, float], node_id: str | None) -> dict[str, Any]:
    """How Ray is asked for a worker. A worker mostly waits, so it takes no CPU unless `resources` says so."""
    named = dict(resources)
    affinity = None if node_id is None else NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {
        "num_cpus": named.pop("CPU", 0),
        "num_gpus": named.pop("GPU", 0),
        "resources": named,
        "scheduling_strategy": affinity or "DEFAULT",
        "max_restarts": 0,
        "max_concurrency": 1000,
    }


def _living_nodes() -> list[Node]:
    """The driver's first."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [Node(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node.node_id != here, node.node_id))


def _lacking(resources: Mapping[str, float]) -> str:
    """What of `resources` the cluster does not have enough of for one worker, as the rest of a message."""
    there = ray.cluster_resources()
    lacking = [f"{name}: {amount:g}" for name, amount in resources.items() if there.get(name, 0) < amount]
    wanted = ", ".join(lacking)
    return f"; rollout.worker_resources asks for {wanted}, which the Ray cluster does not have" if wanted else ""


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
