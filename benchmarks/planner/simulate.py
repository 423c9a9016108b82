"""Simulates a training run in virtual time: the real scheduler with a discrete-event clock.

The scheduling is real: `roll_flash.scheduling.scheduler` decides which episodes start, are cancelled or are trained.
The simulation models the servers (`servers.py`), the episodes (`load.py`), the learner and the publication of its
weights. The same settings and load give the same run, event by event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from roll_flash.errors import RunError
from roll_flash.scheduling.scheduler import Scheduler
from roll_flash.scheduling.selection_bias import SelectionBias
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, FinishedGroup, SamplingParams, Task

from .load import EpisodePlan, Load
from .result import Activity, EpisodeSpan, Fate, SimulationResult, Timeline
from .servers import LeastLoaded, Request, SimulatedServer
from .settings import SimulationSettings


@dataclass(slots=True, eq=False)
class _Episode:
    spec: EpisodeSpec
    plan: EpisodePlan
    started_s: float
    slot: int
    turn: int = 0
    request: Request | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) sampled so far."""
    since_s: float = 0.0
    is_cancelled: bool = False
    span: EpisodeSpan | None = None


class Simulation:
    """One simulated run. Use once: `Simulation(settings, load).run(steps)`."""

    def __init__(self, settings: SimulationSettings, load: Load) -> None:
        self._settings = settings
        self._load = load
        self._scheduler = Scheduler(
            settings.rule,
            settings.policy,
            max_turns=1,
            sampling=SamplingParams(),
            bias=SelectionBias(longest_s=settings.longest_episode_s),
        )
        self._servers = [SimulatedServer(index, settings.servers) for index in range(settings.servers.count)]
        self._least_loaded = LeastLoaded(self._servers)
        self._server_of_group: dict[str, SimulatedServer] = {}
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._event_count = 0
        self._episodes: dict[str, _Episode] = {}
        self._at_barrier: list[_Episode] = []
        self._free_slots = list(range(settings.slots)) if settings.record else []
        self._tasks = itertools.count()
        self._replays: Counter[int] = Counter()
        """Number of replays per task seed: each replay gets different episodes."""
        self._in_step: list[tuple[str, set[str]]] = []
        self._accumulating = self._finishing = self._waiting_to_publish = self._publishing = False
        self._learner_busy_s = self._slot_busy_s = 0.0
        self._staleness: Counter[int] = Counter()
        self._discarded_tokens = self._trained_tokens = self._trained_episodes = 0
        self._submitted = [0.0, 0.0, 0.0]
        self._trained = [0.0, 0.0, 0.0]
        """`_submitted` and `_trained`: number of episodes, tokens and seconds of settled groups."""
        self._plans: dict[str, EpisodePlan] = {}
        self._step_ends_s: list[float] = []
        self._timeline = Timeline() if settings.record else None

    def run(self, steps: int) -> SimulationResult:
        """Simulate until `steps` steps are trained. Raises RunError if no event is left before that, or if the
        scheduler reports a `problem`, as in a real run."""
        self._react()
        while self._scheduler.learner_version < steps:
            if self._scheduler.problem is not None:
                raise RunError(self._scheduler.problem)
            if not self._events:
                raise RunError(f"the simulation stands still in step {self._scheduler.learner_version}: no event left")
            self._now_s, _, handle, argument = heapq.heappop(self._events)
            self._scheduler.now_s = self._now_s
            self._event_count += 1
            handle(argument)
        return self._result()

    # Time

    def _at(self, time_s: float, handle: Callable[[Any], None], argument: Any = None) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), handle, argument))

    def _after(self, delay_s: float, handle: Callable[[Any], None], argument: Any = None) -> None:
        self._at(self._now_s + delay_s, handle, argument)

    # Calls to the scheduler

    def _react(self) -> None:
        """Carry out the scheduler's decisions after every change."""
        self._learn()
        self._cancel(self._scheduler.take_cancelled())
        for dropped in self._scheduler.take_dropped():
            self._discarded_tokens += dropped.tokens_lost
            self._settle(dropped.group_id)
        for _ in range(self._scheduler.room()):
            self._admit()
        starting = self._scheduler.next_episodes(self._settings.slots - self._scheduler.running)
        for spec in starting:
            self._start(spec)
        self._pass_barrier()

    def _admit(self) -> None:
        if (again := self._scheduler.admit_requeued()) is not None:
            self._replays[again.seed] += 1
            return
        seed = next(self._tasks)
        self._scheduler.admit(Task(f"t{seed}", self._settings.task_name(seed), seed))

    def _start(self, spec: EpisodeSpec) -> None:
        earlier = self._replays[spec.task.seed] * (self._settings.policy.retries + 1)
        plan = self._load.plan(spec.task.seed, spec.replica, earlier + spec.attempt)
        self._plans[spec.episode_id] = plan
        slot = heapq.heappop(self._free_slots) if self._timeline else 0
        episode = _Episode(spec, plan, self._now_s, slot)
        self._episodes[spec.episode_id] = episode
        if self._timeline is not None:
            episode.span = EpisodeSpan(spec.episode_id, spec.group_id, slot, self._now_s)
            self._timeline.episodes[spec.episode_id, self._now_s] = episode.span
        self._generate(episode)

    def _cancel(self, episode_ids: Iterable[str]) -> None:
        for episode_id in episode_ids:
            episode = self._leave(episode_id, "cancelled")
            episode.is_cancelled = True
            self._discarded_tokens += sum(tokens for _, tokens in episode.spans)
            request = episode.request
            if request is not None and request.server is not None:
                request.server.advance(self._now_s)
                if request.begun_at is not None:
                    self._discarded_tokens += int(request.server.progress - request.begun_at)
                request.server.cancel(request)
                self._watch(request.server)

    def _leave(self, episode_id: str, fate: Fate) -> _Episode:
        episode = self._episodes.pop(episode_id)
        self._slot_busy_s += self._now_s - episode.started_s
        if episode.span is not None:
            heapq.heappush(self._free_slots, episode.slot)
            episode.span.ended_s, episode.span.fate = self._now_s, fate
            self._note(episode, "generate" if episode.request is not None else "environment")
        return episode

    # An episode

    def _generate(self, episode: _Episode) -> None:
        episode.request = Request(episode, episode.plan.turns[episode.turn][0])
        episode.since_s = self._now_s
        server = self._server_for(episode.spec)
        server.advance(self._now_s)
        server.add(episode.request)
        self._watch(server)

    def _server_for(self, spec: EpisodeSpec) -> SimulatedServer:
        if self._settings.policy.replicate:
            return self._least_loaded.choose()
        if spec.group_id not in self._server_of_group:
            self._server_of_group[spec.group_id] = self._least_loaded.choose()
        return self._server_of_group[spec.group_id]

    def _watch(self, server: SimulatedServer) -> None:
        """Set the next event of a changed server, if it is earlier. An event that is too early only checks again."""
        self._least_loaded.changed(server)
        done_s = server.next_done_s(self._now_s)
        if done_s is not None and done_s < server.event_s:
            server.event_s = done_s
            self._at(done_s, self._on_server, server)

    def _on_server(self, server: SimulatedServer) -> None:
        if self._now_s != server.event_s:
            return
        server.event_s = math.inf
        server.advance(self._now_s)
        for request in server.pop_done():
            self._generated(request.owner, server.versions_of(request))
        self._watch(server)
        if self._settings.lockstep:
            self._pass_barrier()

    def _generated(self, episode: _Episode, spans: Iterable[tuple[int, int]]) -> None:
        episode.spans.extend(spans)
        self._note(episode, "generate")
        episode.request = None
        episode.since_s = self._now_s
        if self._settings.lockstep:
            self._at_barrier.append(episode)
        else:
            self._after(episode.plan.turns[episode.turn][1], self._on_step, episode)

    def _on_step(self, episode: _Episode) -> None:
        if episode.is_cancelled:
            return
        self._note_step(episode)
        episode.since_s = self._now_s
        episode.turn += 1
        if episode.turn < len(episode.plan.turns):
            self._generate(episode)
            return
        outcome = self._outcome(episode)
        failed = isinstance(outcome, EpisodeFailure)
        self._leave(episode.spec.episode_id, "failed" if failed else "unsettled")
        if failed:
            self._discarded_tokens += sum(tokens for _, tokens in episode.spans)
        self._scheduler.finished(outcome)
        self._react()

    def _pass_barrier(self) -> None:
        """Lockstep: once all running episodes have generated, step their environments for the slowest one's time."""
        waiting = [episode for episode in self._at_barrier if not episode.is_cancelled]
        if not waiting or len(waiting) < len(self._episodes):
            return
        slowest_s = max(episode.plan.turns[episode.turn][1] for episode in waiting)
        self._at_barrier = []
        for episode in waiting:
            self._note(episode, "wait")
            episode.since_s = self._now_s
            self._after(slowest_s, self._on_step, episode)

    def _outcome(self, episode: _Episode) -> FinishedEpisode | EpisodeFailure:
        spec = episode.spec
        if episode.plan.fails:
            return EpisodeFailure(spec.episode_id, spec.group_id, spec.task, "env_error", "", 0, spec.attempt)
        counts: Counter[int] = Counter()
        for version, tokens in episode.spans:
            counts[version] += tokens
        return FinishedEpisode(
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            task=spec.task,
            reward=episode.plan.reward,
            success=None,
            started_s=episode.started_s,
            finished_s=self._now_s,
            prompt_length=0,
            policy_tokens=counts.total(),
            versions=tuple(sorted((version, count) for version, count in counts.items() if count)),
        )

    # The learner

    def _learn(self) -> None:
        if self._accumulating or self._finishing:
            return
        groups = self._scheduler.take_ready()
        for group in groups:
            self._count_trained(group)
        if groups:
            self._accumulating = True
            self._learner_works(len(groups) * self._settings.learner.group_s, self._on_accumulated)
        elif self._scheduler.groups_wanted() == 0:
            self._finishing = True
            self._learner_works(self._settings.learner.step_s, self._on_step_finished)

    def _learner_works(self, duration_s: float, then: Callable[[Any], None]) -> None:
        self._learner_busy_s += duration_s
        if self._timeline is not None and duration_s:
            self._timeline.learner.append((self._now_s, self._now_s + duration_s))
        self._after(duration_s, then)

    def _on_accumulated(self, _: Any) -> None:
        self._accumulating = False
        self._react()

    def _on_step_finished(self, _: Any) -> None:
        self._step_ends_s.append(self._now_s)
        self._scheduler.version_advanced(self._scheduler.learner_version + 1)
        for group_id, trained in self._in_step:
            self._settle(group_id, trained)
        self._in_step.clear()
        self._waiting_to_publish = True
        self._publish()

    def _publish(self) -> None:
        """Start a publication, one at a time; the learner continues as soon as its newest weights are being sent."""
        if self._waiting_to_publish and not self._publishing:
            self._waiting_to_publish = self._finishing = False
            self._publishing = True
            self._load_weights((0, self._scheduler.learner_version))
        self._react()

    def _load_weights(self, what: tuple[int, int]) -> None:
        wave, version = what
        servers = self._servers[wave :: self._settings.learner.publish_waves]
        for server in servers:
            server.advance(self._now_s)
            server.paused = True
            self._watch(server)
        if self._timeline is not None:
            self._timeline.publications.append((self._now_s, self._now_s + self._settings.learner.publish_s))
        self._after(self._settings.learner.publish_s, self._on_loaded, (wave, version))

    def _on_loaded(self, what: tuple[int, int]) -> None:
        wave, version = what
        for server in self._servers[wave :: self._settings.learner.publish_waves]:
            server.advance(self._now_s)
            server.paused = False
            server.load_version(version)
            self._watch(server)
        if wave + 1 < self._settings.learner.publish_waves:
            self._load_weights((wave + 1, version))
            return
        self._publishing = False
        self._scheduler.published(version)
        self._publish()

    # Statistics

    def _count_trained(self, group: FinishedGroup) -> None:
        for trajectory in group.trajectories:
            for version, count in trajectory.versions:
                self._staleness[self._scheduler.learner_version - version] += count
            self._trained_tokens += trajectory.policy_tokens
            self._trained_episodes += 1
            if self._timeline is not None:
                span = self._timeline.episodes[trajectory.episode_id, trajectory.started_s]
                span.fate, span.step = "trained", self._scheduler.learner_version
        self._in_step.append((group.group_id, {trajectory.episode_id for trajectory in group.trajectories}))

    def _settle(self, group_id: str, trained: Collection[str] = ()) -> None:
        """Count every started episode of the group, with its planned tokens and its time without other load."""
        self._server_of_group.pop(group_id, None)
        policy = self._settings.policy
        for replica in range(policy.replicas + policy.group_size):
            plan = self._plans.pop(f"{group_id}-r{replica}", None)
            if plan is not None:
                alone_s = plan.tokens / self._settings.servers.tokens_per_s + sum(step_s for _, step_s in plan.turns)
                _add(self._submitted, plan.tokens, alone_s)
                if f"{group_id}-r{replica}" in trained:
                    _add(self._trained, plan.tokens, alone_s)

    def _note(self, episode: _Episode, activity: Activity) -> None:
        if episode.span is not None and self._now_s > episode.since_s:
            episode.span.parts.append((activity, episode.since_s, self._now_s))

    def _note_step(self, episode: _Episode) -> None:
        """Record an environment step and, in lockstep, the wait for the slowest environment after it."""
        if episode.span is not None:
            own_end_s = min(self._now_s, episode.since_s + episode.plan.turns[episode.turn][1])
            episode.span.parts.append(("environment", episode.since_s, own_end_s))
            if own_end_s < self._now_s:
                episode.span.parts.append(("wait", own_end_s, self._now_s))

    def _result(self) -> SimulationResult:
        elapsed_s = max(self._now_s, 1e-9)
        for server in self._servers:
            server.advance(self._now_s)
        slot_s = self._slot_busy_s + sum(self._now_s - episode.started_s for episode in self._episodes.values())
        length_ratio, latency_ratio = _ratios(self._trained, self._submitted)
        if self._timeline is not None:
            self._timeline.steps = list(self._step_ends_s)
        return SimulationResult(
            elapsed_s=elapsed_s,
            steps=self._scheduler.learner_version,
            step_ends_s=self._step_ends_s,
            trained_episodes=self._trained_episodes,
            trained_tokens=self._trained_tokens,
            staleness=self._staleness,
            discarded_tokens=self._discarded_tokens,
            learner_idle=max(0.0, 1 - self._learner_busy_s / elapsed_s),
            slots_idle=1 - slot_s / (elapsed_s * self._settings.slots),
            servers_idle=1 - sum(server.busy_s for server in self._servers) / (elapsed_s * len(self._servers)),
            bias=self._scheduler.bias.metrics(),
            true_length_ratio=length_ratio,
            true_latency_ratio=latency_ratio,
            dropped_groups=dict(self._scheduler.dropped_groups),
            groups=self._scheduler.counts(),
            cancelled_episodes=self._scheduler.cancelled_episodes,
            events=self._event_count,
            timeline=self._timeline,
        )


def _add(sums: list[float], tokens: int, seconds: float) -> None:
    sums[0] += 1
    sums[1] += tokens
    sums[2] += seconds


def _ratios(part: list[float], whole: list[float]) -> tuple[float, float]:
    """Return the ratios of mean tokens and of mean seconds, `part` to `whole`; 1 if nothing was trained."""
    if not part[0]:
        return 1.0, 1.0
    share = part[0] / whole[0]
    return part[1] / (share * whole[1]), part[2] / (share * whole[2])
