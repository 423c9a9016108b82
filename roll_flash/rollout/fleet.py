"""Manages the rollout workers from the driver: places episodes, collects outcomes, replaces dead workers.

Invariant: each submitted episode gives its receiver exactly one outcome, a trajectory or a failure, unless it is
cancelled. The episodes of a dead worker go on elsewhere after their last finished turn; those without one return as
failures with the cause `worker_died`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from roll_flash.cluster.parts import part_name
from roll_flash.engines.inference import ClientSpec
from roll_flash.engines.places import Places, turns_out_lost, unless_lost
from roll_flash.errors import PlacementError, RollFlashError, RunError, first_line
from roll_flash.inference.client.metrics import combined
from roll_flash.processes.background import (
    call_in_thread,
    cancel_and_wait,
    error_of,
    gather_or_cancel,
    start_background,
)
from roll_flash.processes.deadlines import RecentCount
from roll_flash.rollout.turns import TurnBook
from roll_flash.rollout.worker import EpisodeStatus, Outcome, WorkerActor, WorkerSettings
from roll_flash.sandboxes.pool.stats import PoolStats
from roll_flash.stream.blocks import fetch_trajectories, located
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode
from roll_flash.watchdog.activity import doing

logger = logging.getLogger(__name__)

POLL_S = 2.0
CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
DRAIN_S, DRAIN_POLL_S = 60.0, 0.2
"""Time in seconds in which a worker that is no longer wanted may end its episodes."""
WATCH = "watch"
"""Ray concurrency group of the calls that a worker answers even if its main event loop is blocked."""
WATCH_TIMEOUT_S = 3.0
WORKER_DIED = (RayActorError, ActorUnschedulableError, WorkerCrashedError, OutOfMemoryError)
"""Ray's errors for an actor whose process died, including a kill for lack of memory, or whose node is lost."""
MAX_WORKER_DEATHS = 20
MAX_MOVES = 2
"""Number of dead workers after which an episode fails: it may be what kills them."""
AWAY_RETRY_S = 5.0
"""Interval in seconds between two attempts to start a worker again whose node is lost."""
DEATH_WINDOW_S = 1800.0
"""Window in seconds for MAX_WORKER_DEATHS; more deaths in it stop the run. One death per day does not."""

Ended = FinishedEpisode | EpisodeFailure
Receiver = Callable[[Ended], None]


class NoAnswerError(RunError):
    """A worker did not answer a call in time."""


T = TypeVar("T")


@dataclass(slots=True)
class _WorkerHandle:
    index: int
    actor: Any
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker can take calls; cleared during its replacement."""
    episodes: dict[str, EpisodeSpec] = field(default_factory=dict)
    """Episodes placed on this worker and not ended."""
    to_submit: dict[str, EpisodeSpec] = field(default_factory=dict)
    to_cancel: list[str] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if there are episodes to submit or to cancel."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Its exchange with the driver."""


class WorkerFleet:
    """Runs `workers` Ray actors of type `WorkerActor`. Ray must be initialised."""

    def __init__(
        self,
        settings: WorkerSettings,
        workers: int,
        *,
        places: Places | None = None,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        """`places`: where the workers run; None: they reserve nothing, and Ray chooses their nodes."""
        self._settings = settings
        self._count = workers
        self._places = places
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._members: list[_WorkerHandle] = []
        self._receivers: dict[str, Receiver] = {}
        self.turns = TurnBook()
        """Finished turns of the running episodes; those of an episode to come are played again (`submit`)."""
        self._moves: Counter[str] = Counter()
        """How often each running episode was moved away from a dead worker."""
        self._longest_s = 0.0
        """Longest episode of an evaluation so far, in seconds."""
        self._deaths = RecentCount(DEATH_WINDOW_S)
        self._turns_ended = 0
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Start every worker. Without a model in the settings they take episodes after `serve`.

        Raises the error of a worker's start (SandboxError, RunError, ...); by then no worker is still starting, and
        `close` ends the started ones.
        """
        await gather_or_cancel(*(self._start_worker(index) for index in range(self._count)))
        if self._settings.model is not None:
            self._begin_all()

    async def serve(self, model: ClientSpec) -> None:
        """Give workers that were started without a model its servers. Raises errors as `start` does."""
        self._settings = replace(self._settings, model=model)
        started, self._members = self._members, []
        await gather_or_cancel(*(self._serve_worker(member, model) for member in started))
        self._begin_all()

    def _begin_all(self) -> None:
        self._members.sort(key=lambda member: member.index)
        for member in self._members:
            self._begin(member)

    def _begin(self, member: _WorkerHandle) -> None:
        member.ready.set()
        for work in (self._collect(member), self._feed(member)):
            task = start_background(work, f"the exchange with rollout worker {member.index}")
            task.add_done_callback(self._note_failure)
            member.tasks.append(task)

    async def submit(self, episodes: Sequence[EpisodeSpec], receiver: Receiver) -> None:
        """Start episodes on the least loaded workers, after those of their `turns` that are known; `receiver` gets each
        outcome once.

        Waits only while all workers are being replaced, not for a worker to answer.
        """
        for episode in episodes:
            self._receivers[episode.episode_id] = receiver
        self._place([self._with_turns(episode) for episode in episodes], await self._ready_members())

    async def cancel(self, episode_ids: Iterable[str]) -> None:
        """Cancel episodes, running or not yet sent; their receivers get no outcome."""
        wanted = set(episode_ids)
        for member in self._members:
            for episode_id in wanted & member.episodes.keys():
                del member.episodes[episode_id]
                self._receivers.pop(episode_id, None)
                self._forget(episode_id)
                if member.to_submit.pop(episode_id, None) is None:
                    member.to_cancel.append(episode_id)
                    member.has_news.set()

    async def run(self, episodes: Iterable[EpisodeSpec], *, max_concurrent: int) -> AsyncGenerator[Outcome, None]:
        """Play episodes, at most `max_concurrent` at once, and yield outcomes as they arrive.

        Takes the next item of `episodes` only when it can start, so the caller can end the iterator at any time.
        """
        outcomes: asyncio.Queue[Ended] = asyncio.Queue()
        waiting = iter(episodes)
        running: set[str] = set()
        try:
            while (batch := list(islice(waiting, max_concurrent - len(running)))) or running:
                running.update(episode.episode_id for episode in batch)
                if batch:
                    await self.submit(batch, outcomes.put_nowait)
                ended = await self._next_outcomes(outcomes)
                running.difference_update(outcome.episode_id for outcome in ended)
                for outcome in await _whole(ended):
                    yield outcome
        finally:
            await self.cancel(running)

    async def status(self, timeout_s: float = CALL_TIMEOUT_S) -> list[EpisodeStatus]:
        """Return the status of every running episode; workers that do not answer are left out."""
        return [status for answer in await self._ask_all("status", timeout_s) for status in answer]

    async def states(self, timeout_s: float) -> Counter[str]:
        """Count the running episodes by state (`Worker.states`), without those of workers that do not answer."""
        return sum(await self._ask_all("states", timeout_s), Counter())

    async def client_metrics(self) -> dict[str, float]:
        """Return the combined metrics of the workers' model-server clients."""
        return combined(await self._ask_all("client_metrics"))

    async def sandbox_metrics(self) -> dict[str, float]:
        """Return the combined metrics of the workers' sandbox pools; empty without pools."""
        total = PoolStats()
        pools = [stats for stats in await self._ask_all("pool_stats") if stats is not None]
        for pool in pools:
            total.merge(pool)
        return total.as_metrics() if pools else {}

    async def _ask_all(self, method: str, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Call a method of all workers; return the answers of those that do answer."""
        calls = (_within(getattr(m.actor, method).remote(), timeout_s, method) for m in self._members)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    @property
    def size(self) -> int:
        """Number of workers, also those that are being started again."""
        return len(self._members)

    async def use(self, model: ClientSpec) -> None:
        """Let all workers use the servers of `model` from now on. One that does not answer is found by its poll."""
        self._settings = replace(self._settings, model=model)
        members = [member for member in self._members if member.ready.is_set()]
        calls = (_within(member.actor.use.remote(model), CALL_TIMEOUT_S, "use") for member in members)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, NoAnswerError | WORKER_DIED):
                raise answer

    async def resize(self, workers: int) -> None:
        """Start more workers, or end the last ones: these get no more episodes, and what they play within DRAIN_S ends
        as usual. Raises the error of a worker's start; those that started stay."""
        for index in range(len(self._members), workers):
            try:
                await self._start_worker(index)
            except BaseException:
                if self._places is not None:
                    await self._places.give_back(part_name("worker", index))
                raise
            self._begin(self._members[-1])
        leaving, self._members = self._members[workers:], self._members[:workers]
        await asyncio.gather(*(self._end(member) for member in leaving))

    async def _end(self, member: _WorkerHandle) -> None:
        member.ready.clear()
        deadline = time.monotonic() + DRAIN_S
        while member.episodes and time.monotonic() < deadline:  # noqa: ASYNC110 - several tasks change it
            await asyncio.sleep(DRAIN_POLL_S)
        await cancel_and_wait(member.tasks)
        if others := [other for other in self._members if other.ready.is_set()]:
            self._place(self._take_moving(member), others)
        self._fail(member, list(member.episodes.values()), "its worker was no longer wanted (roll-flash scale)")
        await _close(member)
        if self._places is not None:
            await self._places.give_back(part_name("worker", member.index))

    async def close(self) -> None:
        """Cancel all episodes, free every sandbox, stop the actors. Safe to call twice."""
        await cancel_and_wait(task for member in self._members for task in member.tasks)
        await asyncio.gather(*(_close(member) for member in self._members))
        self._members = []

    def _place(self, episodes: Iterable[EpisodeSpec], members: Sequence[_WorkerHandle]) -> None:
        for episode in episodes:
            member = min(members, key=lambda m: len(m.episodes))
            member.episodes[episode.episode_id] = episode
            member.to_submit[episode.episode_id] = episode
            member.has_news.set()

    async def _feed(self, member: _WorkerHandle) -> None:
        """Send submits and cancels to one worker; those that arrive during a call go into the next one."""
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
                if member.actor is actor:  # `_collect` gets the same error and replaces the worker
                    member.ready.clear()
                lost = [episode for episode in submit if member.episodes.pop(episode.episode_id, None)]
                await self._place_again(lost)

    async def _place_again(self, episodes: Sequence[EpisodeSpec]) -> None:
        """Place episodes again that a dead worker cannot have started."""
        try:
            self._place(episodes, await self._ready_members())
        except RollFlashError as error:
            for spec in episodes:
                self._deliver(spec.failed("worker_died", str(error)))

    async def _ready_members(self) -> list[_WorkerHandle]:
        """Return the workers that can take episodes; wait for one if all are being replaced."""
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

    async def _start_worker(self, index: int) -> None:
        """Start a worker that is new. Raises RunError if it cannot reach all servers, or dies again and again."""
        while True:
            try:
                member = _WorkerHandle(index, await self._start_actor(index))
                return await self._admit(member)
            except WORKER_DIED as error:
                self._count_death_at_start(index, error)

    async def _serve_worker(self, member: _WorkerHandle, model: ClientSpec) -> None:
        """Give a worker its servers. One that has died is started again."""
        try:
            await self._admit(member, model)
        except WORKER_DIED as error:
            self._count_death_at_start(member.index, error)
            await self._start_worker(member.index)

    async def _admit(self, member: _WorkerHandle, model: ClientSpec | None = None) -> None:
        """Let a new worker take episodes if it reaches all servers. `model`: those that it was started without."""
        index = member.index
        try:
            if model is not None:
                await _within(member.actor.use.remote(model), CALL_TIMEOUT_S, "use")
            lost = await _within(member.actor.unreachable_servers.remote(), CALL_TIMEOUT_S, "unreachable_servers")
            if lost:
                raise RunError(
                    f"rollout worker {index}{await self._where(index)} cannot reach {', '.join(lost)}: let the nodes "
                    "reach each other's ports, or set inference.port and open that one and the next ones"
                )
        except BaseException:
            await _close(member)
            raise
        self._members.append(member)

    async def _where(self, index: int) -> str:
        if self._places is None:
            return ""
        place = await self._places.place(part_name("worker", index))
        return f" on {place.node_name} ({place.address})"

    async def _start_actor(self, index: int) -> Any:
        part = part_name("worker", index)
        place = None if self._places is None else await self._places.place(part)
        reserved = {"num_cpus": 0} if place is None else place.options
        remote_class: Any = ray.remote(concurrency_groups={WATCH: 1})(WorkerActor)  # type: ignore[call-overload]
        options = {**reserved, "max_restarts": 0, "max_concurrency": 1000}
        actor: Any = remote_class.options(**options).remote(self._settings)
        try:
            start = unless_lost(actor.open.remote(f"rollout {part}"), self._places, part)
            await _within(start, START_TIMEOUT_S, "start")
        except BaseException:
            ray.kill(actor)
            raise
        return actor

    async def _start_again(self, index: int) -> Any:
        """Start a worker again. While its node is lost and no other one has room, the other workers play on. One that
        dies while it starts is counted like any other."""
        is_away = False
        while True:
            try:
                actor = await self._start_actor(index)
            except (PlacementError, *WORKER_DIED) as error:
                if not await turns_out_lost(self._places, part_name("worker", index)):
                    if isinstance(error, PlacementError):
                        raise
                    self._count_death_at_start(index, error)
                    continue
                if not is_away:
                    logger.warning("rollout worker %d is away, its node is lost: %s", index, first_line(error))
                is_away = True
                await asyncio.sleep(AWAY_RETRY_S)
            else:
                return actor

    async def _is_lost(self, index: int) -> bool:
        """Return true if the node of a worker is lost."""
        return self._places is not None and await self._places.is_lost(part_name("worker", index))

    async def _collect(self, member: _WorkerHandle) -> None:
        """Deliver the outcomes of one worker; replace the worker if it dies or does not answer in time."""
        limit_s = POLL_S + self._heartbeat_timeout_s
        then = f"it is replaced after {limit_s:g} s (rollout.heartbeat_timeout_s)"
        with doing(f"rollout worker {member.index}", "no answer", announced_s=POLL_S, then=then) as answer:
            while True:
                try:
                    poll, *stored = member.actor.collect.options(num_returns=4).remote(POLL_S)
                    outcomes, turns = await _within(poll, limit_s, "poll")
                except WORKER_DIED as error:
                    await self._replace(member, f"died: {first_line(error)}")
                    answer.begin()
                    continue
                except NoAnswerError:
                    await self._replace(member, await self._describe_hang(member))
                    answer.begin()
                    continue
                answer.moved()
                self._turns_ended += len(turns)
                for turn in turns:
                    if turn.episode_id in member.episodes:
                        self.turns.add(turn)
                for outcome in located(outcomes, *stored):
                    member.episodes.pop(outcome.episode_id, None)
                    self._deliver(outcome)

    async def _describe_hang(self, member: _WorkerHandle) -> str:
        """Ask the worker where its event loop is blocked; a second event loop of the worker answers."""
        try:
            call = member.actor.stuck_at.options(concurrency_group=WATCH).remote()
            place = await _within(call, WATCH_TIMEOUT_S, "stuck_at")
        except (RunError, *WORKER_DIED) as error:
            place = f"not known ({first_line(error)})"
        silence = f"gave no sign of life for {self._heartbeat_timeout_s:g} s"
        return f"{silence} (rollout.heartbeat_timeout_s); its event loop is held up in {place}"

    async def _replace(self, member: _WorkerHandle, what: str) -> None:
        member.ready.clear()
        moving = self._take_moving(member)
        self._fail(member, list(member.episodes.values()), f"its worker {what}")
        member.to_submit, member.to_cancel = {}, []
        logger.warning("rollout worker %d %s; it is replaced", member.index, what)
        others = [other for other in self._members if other.ready.is_set()]
        self._place(moving, others or [member])  # without others they wait for its replacement
        with contextlib.suppress(*WORKER_DIED):  # it may hang and not be dead
            ray.kill(member.actor)
        try:
            if not await self._is_lost(member.index):
                self._count_death(what)
            member.actor = await self._start_again(member.index)
            logger.warning("rollout worker %d is back", member.index)
        finally:
            member.ready.set()  # its waiters must see the error too

    def _count_death_at_start(self, index: int, error: Exception) -> None:
        what = f"died while it started: {first_line(error)}"
        self._count_death(what)
        logger.warning("rollout worker %d %s; it is started again", index, what)

    def _count_death(self, what: str) -> None:
        """Raise RunError if too many workers died lately."""
        if (deaths := self._deaths.add(time.monotonic())) > MAX_WORKER_DEATHS:
            within = f"within {DEATH_WINDOW_S / 60:g} minutes"
            raise RunError(f"{deaths} rollout workers died {within}; the last one {what}")

    def _take_moving(self, member: _WorkerHandle) -> list[EpisodeSpec]:
        """Take from a dead worker the episodes that go on elsewhere."""
        specs = [self._with_turns(spec) for spec in member.episodes.values()]
        moving = [spec for spec in specs if spec.played and self._moves[spec.episode_id] < MAX_MOVES]
        for spec in moving:
            del member.episodes[spec.episode_id]
            self._moves[spec.episode_id] += 1
            self.turns.moved_episodes += 1
            self.turns.moved_turns += len(spec.played)
        return moving

    def _with_turns(self, spec: EpisodeSpec) -> EpisodeSpec:
        return replace(spec, played=self.turns.of(spec.episode_id))

    def _forget(self, episode_id: str) -> None:
        self.turns.forget(episode_id)
        self._moves.pop(episode_id, None)

    def _fail(self, member: _WorkerHandle, episodes: Iterable[EpisodeSpec], message: str) -> None:
        for spec in episodes:
            if member.episodes.pop(spec.episode_id, None) is not None:
                self._deliver(spec.failed("worker_died", message))

    def _deliver(self, outcome: Ended) -> None:
        self._forget(outcome.episode_id)
        receiver = self._receivers.pop(outcome.episode_id, None)
        if receiver is not None:
            receiver(outcome)

    async def _next_outcomes(self, outcomes: asyncio.Queue[Ended]) -> list[Ended]:
        """Return at least one outcome; the deadlines of the episodes bound the wait. Raises the fleet's error."""
        ended: list[Ended] = []
        limit_s = self._settings.deadlines.episode_s
        with doing("the evaluation", "no turn and no episode ended", may_take_s=limit_s, learns=False) as waiting:
            turns_ended = self._turns_ended
            while outcomes.empty() and not ended:
                self._raise_error()
                if self._turns_ended > turns_ended:
                    turns_ended = self._turns_ended
                    waiting.begin()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        ended.append(await outcomes.get())
            ended += [outcomes.get_nowait() for _ in range(outcomes.qsize())]
            played_s = [each.finished_s - each.started_s for each in ended if isinstance(each, FinishedEpisode)]
            self._longest_s = max([self._longest_s, *played_s])
            if self._longest_s:
                waiting.moved(self._longest_s)  # episodes that begin together end together, after a long wait
        return ended

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """Keep the error of a background task, to raise it in the callers that wait for outcomes."""
        self._error = self._error or error_of(task)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


async def _close(member: _WorkerHandle) -> None:
    try:
        await _within(member.actor.close.remote(), CALL_TIMEOUT_S, "close")
    except (RunError, *WORKER_DIED) as error:
        logger.warning("worker %d did not close in order: %s", member.index, error)
    finally:
        ray.kill(member.actor)


async def _within(reference: Awaitable[T], timeout_s: float, what: str) -> T:
    """Await a call with a timeout; raise the worker's error without Ray's wrapper. Raises NoAnswerError."""
    try:
        # Not asyncio.wait_for: before Python 3.12 it ignores a cancellation if the call has just finished.
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError:
        raise NoAnswerError(f"a rollout worker did not answer {what!r} within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, RollFlashError):
            raise error.cause from None
        raise


async def _whole(ended: Sequence[Ended]) -> list[Outcome]:
    """Fetch the trajectories among these outcomes."""
    data = [outcome.data for outcome in ended if isinstance(outcome, FinishedEpisode)]
    trajectories = iter(await call_in_thread(lambda: fetch_trajectories(data)))
    return [outcome if isinstance(outcome, EpisodeFailure) else next(trajectories) for outcome in ended]
