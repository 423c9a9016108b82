"""Simulates a training run in virtual time: the real scheduler with a discrete-event clock.

The scheduling is real: `roll_flash.scheduling.scheduler` decides which episodes start, are cancelled or are trained,
and the client's router which server takes a turn. The simulation models the servers (`servers.py`), the episodes
(`load.py`), sandboxes, stages, the learner and the publication of its weights (`learner.py`). The same settings and
load give the same run, event by event.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from roll_flash.errors import RunError
from roll_flash.planner.simulation.clock import Clock
from roll_flash.planner.simulation.learner import SimulatedLearner
from roll_flash.planner.simulation.load import EpisodePlan, Load
from roll_flash.planner.simulation.result import Activity, EpisodeSpan, Fate, SimulationResult, Timeline
from roll_flash.planner.simulation.servers import Request, Servers, SimulatedServer
from roll_flash.planner.simulation.services import SimulatedSandboxes, SimulatedScoring
from roll_flash.planner.simulation.settings import SimulationSettings
from roll_flash.scheduling.async_ratio import AsyncRatioController, StepMeasurement, controller_of
from roll_flash.scheduling.scheduler import Scheduler
from roll_flash.types import EpisodeFailure, EpisodeSpec, FinishedEpisode, FinishedGroup, SamplingParams, Task


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
    turn_began_s: float = 0.0
    is_cancelled: bool = False
    has_sandbox: bool = False
    span: EpisodeSpan | None = None


class Simulation:
    """One simulated run. Use once: `Simulation(settings, load).run(steps)`."""

    def __init__(self, settings: SimulationSettings, load: Load) -> None:
        self._settings = settings
        self._load = load
        self._scheduler = Scheduler(
            settings.scheduler,
            max_turns=1,
            sampling=SamplingParams(),
            retries=settings.retries,
            longest_episode_s=settings.longest_episode_s,
        )
        self._clock = Clock()
        self._servers = Servers(
            settings.servers,
            self._clock,
            self._on_generated,
            cores=settings.cores,
            background_cores=settings.background_cores,
        )
        self._timeline = Timeline() if settings.record else None
        self._learner = SimulatedLearner(
            settings.learner,
            self._clock,
            self._scheduler,
            self._servers,
            take=self._take_groups,
            on_step=self._on_step_finished,
            react=self._react,
            timeline=self._timeline,
        )
        self._sandboxes = SimulatedSandboxes(settings.sandboxes, self._clock) if settings.sandboxes else None
        self._scoring = SimulatedScoring(settings.scoring)
        self._scored_s: dict[str, float] = {}
        """Episode -> when its trajectory has its scores; only with stages."""
        self._controller = controller_of(settings.scheduler)
        self._server_of_group: dict[str, SimulatedServer] = {}
        self._episodes: dict[str, _Episode] = {}
        self._at_barrier: list[_Episode] = []
        self._free_slots = list(range(settings.slots)) if settings.record else []
        self._tasks = itertools.count()
        self._replays: Counter[int] = Counter()
        """Number of replays per task seed: each replay gets different episodes."""
        self._in_step: list[tuple[str, set[str]]] = []
        self._slot_busy_s = self._generate_s = 0.0
        self._empty_since_s: float | None = 0.0
        self._empty_s = 0.0
        """Time without a running episode, as `idle/servers` of a run counts it."""
        self._last_step = (0.0, 0.0, 0.0)
        """End of the last step, and at it the busy time of the learner and the time without episodes."""
        self._staleness: Counter[int] = Counter()
        self._staleness_of_step: Counter[int] = Counter()
        self._discarded_tokens = self._trained_tokens = self._trained_episodes = self._turns = 0
        self._submitted = [0.0, 0.0, 0.0]
        self._trained = [0.0, 0.0, 0.0]
        """`_submitted` and `_trained`: number of episodes, tokens and seconds of settled groups."""
        self._plans: dict[str, EpisodePlan] = {}

    def run(self, steps: int) -> SimulationResult:
        """Simulate until `steps` steps are trained. Raises RunError if no event is left before that, or if the
        scheduler reports a problem, as in a real run."""
        self._react()
        while self._scheduler.learner_version < steps:
            if (problem := self._scheduler.progress.problem) is not None:
                raise RunError(problem)
            if not self._clock:
                raise RunError(f"the simulation stands still in step {self._scheduler.learner_version}: no event left")
            handle, argument = self._clock.next()
            self._scheduler.now_s = self._clock.now_s
            handle(argument)
        return self._result()

    # Calls to the scheduler

    def _react(self) -> None:
        """Carry out the scheduler's decisions after every change."""
        self._learner.work()
        self._cancel(self._scheduler.take_cancelled())
        for dropped in self._scheduler.take_dropped():
            self._discarded_tokens += dropped.tokens_lost
            self._settle(dropped.group_id)
        for _ in range(self._scheduler.room()):
            self._admit()
        starting = self._scheduler.next_episodes(self._settings.slots - len(self._scheduler.running))
        for spec in starting:
            self._start(spec)
        self._note_emptiness()
        self._pass_barrier()

    def _admit(self) -> None:
        if (again := self._scheduler.admit_requeued()) is not None:
            self._replays[again.task.seed] += 1
            return
        seed = next(self._tasks)
        self._scheduler.admit(Task(f"t{seed}", "Simulated-v0", seed))

    def _start(self, spec: EpisodeSpec) -> None:
        earlier = self._replays[spec.task.seed] * (self._settings.retries + 1)
        plan = self._load.plan(spec.task.seed, spec.replica, earlier + spec.attempt)
        self._plans[spec.episode_id] = plan
        slot = heapq.heappop(self._free_slots) if self._timeline else 0
        episode = _Episode(spec, plan, self._clock.now_s, slot)
        self._episodes[spec.episode_id] = episode
        if self._timeline is not None:
            episode.span = EpisodeSpan(spec.episode_id, spec.group_id, slot, self._clock.now_s)
            self._timeline.episodes[spec.episode_id, self._clock.now_s] = episode.span
        if self._sandboxes is not None and self._settings.sandboxes and self._settings.sandboxes.is_leased_at_reset:
            episode.since_s = self._clock.now_s
            self._lease(episode)
        else:
            self._reset(episode)

    def _reset(self, episode: _Episode) -> None:
        episode.since_s = self._clock.now_s
        self._clock.soon(episode.plan.startup_s, self._begin_turn, episode)

    def _cancel(self, episode_ids: Iterable[str]) -> None:
        for episode_id in episode_ids:
            episode = self._leave(episode_id, "cancelled")
            episode.is_cancelled = True
            self._discarded_tokens += sum(tokens for _, tokens in episode.spans)
            request = episode.request
            if request is None:
                continue
            if request.server is not None:
                request.server.advance(self._clock.now_s)
                if request.begun_at is not None:
                    self._discarded_tokens += int(request.server.progress - request.begun_at)
                request.server.cancel(request)
                self._servers.changed(request.server)
            if self._settings.servers.routes:
                self._servers.routed_done(request, self._reserved(episode))

    def _leave(self, episode_id: str, fate: Fate) -> _Episode:
        episode = self._episodes.pop(episode_id)
        self._slot_busy_s += self._clock.now_s - episode.started_s
        if episode.has_sandbox and self._sandboxes is not None:
            self._sandboxes.release()
        if episode.span is not None:
            heapq.heappush(self._free_slots, episode.slot)
            episode.span.ended_s, episode.span.fate = self._clock.now_s, fate
            self._note(episode, "generate" if episode.request is not None else "environment")
        return episode

    def _note_emptiness(self) -> None:
        if self._scheduler.running:
            if self._empty_since_s is not None:
                self._empty_s += self._clock.now_s - self._empty_since_s
                self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = self._clock.now_s

    # An episode

    def _begin_turn(self, episode: _Episode) -> None:
        if episode.is_cancelled:
            return
        self._note(episode, "environment")
        episode.since_s = episode.turn_began_s = self._clock.now_s
        self._clock.soon(self._settings.servers.request_s, self._generate, episode)

    def _generate(self, episode: _Episode) -> None:
        if episode.is_cancelled:
            return
        plan, spec = episode.plan, episode.spec
        prompt = plan.prompts[episode.turn] if plan.prompts else 0
        episode.request = Request(
            episode,
            plan.turns[episode.turn][0],
            prompt,
            spec.episode_id,
            spec.group_id if plan.prompts else "",
            plan.prompts[0] if plan.prompts else 0,
        )
        if self._settings.servers.routes:
            self._servers.route(episode.request, self._reserved(episode))
        else:
            self._servers.send(episode.request, self._server_for(episode.spec))

    def _reserved(self, episode: _Episode) -> int:
        """Tokens that a client counts for a request: its prompt and the most new ones."""
        assert episode.request is not None
        return episode.request.prompt + max(episode.request.tokens, self._settings.max_new_tokens)

    def _server_for(self, spec: EpisodeSpec) -> SimulatedServer:
        if self._settings.scheduler.replicate:
            return self._servers.least_loaded()
        if spec.group_id not in self._server_of_group:
            self._server_of_group[spec.group_id] = self._servers.least_loaded()
        return self._server_of_group[spec.group_id]

    def _on_generated(self, server: SimulatedServer, done: Sequence[Request]) -> None:
        for request in done:
            self._generated(request.owner, server.versions_of(request))
        self._servers.changed(server)
        if self._settings.lockstep:
            self._pass_barrier()

    def _generated(self, episode: _Episode, spans: Iterable[tuple[int, int]]) -> None:
        episode.spans.extend(spans)
        self._turns += 1
        self._generate_s += self._clock.now_s - episode.turn_began_s
        self._note(episode, "generate")
        if self._settings.servers.routes and episode.request is not None:
            self._servers.routed_done(episode.request, self._reserved(episode))
        episode.request = None
        episode.since_s = self._clock.now_s
        if self._settings.lockstep:
            self._at_barrier.append(episode)
        elif self._sandboxes is not None and not episode.has_sandbox:
            self._lease(episode)
        else:
            self._step(episode)

    def _lease(self, episode: _Episode) -> None:
        assert self._sandboxes is not None

        def give() -> bool:
            if episode.is_cancelled:
                return False
            episode.has_sandbox = True
            self._note(episode, "wait")
            if episode.plan and not episode.spans:
                self._reset(episode)
            else:
                episode.since_s = self._clock.now_s
                self._step(episode)
            return True

        self._sandboxes.lease(give)

    def _step(self, episode: _Episode) -> None:
        self._clock.after(episode.plan.turns[episode.turn][1], self._on_step, episode)

    def _on_step(self, episode: _Episode) -> None:
        if episode.is_cancelled:
            return
        self._note_step(episode)
        episode.since_s = self._clock.now_s
        episode.turn += 1
        if episode.turn < len(episode.plan.turns):
            self._begin_turn(episode)
            return
        outcome = self._outcome(episode)
        failed = isinstance(outcome, EpisodeFailure)
        self._leave(episode.spec.episode_id, "failed" if failed else "unsettled")
        if failed:
            self._discarded_tokens += sum(tokens for _, tokens in episode.spans)
        elif self._settings.scoring:
            self._scored_s[episode.spec.episode_id] = self._scoring.scored_s(self._clock.now_s)
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
            episode.since_s = self._clock.now_s
            self._clock.after(slowest_s, self._on_step, episode)

    def _outcome(self, episode: _Episode) -> FinishedEpisode | EpisodeFailure:
        spec = episode.spec
        if episode.plan.fails:
            return spec.failed("env_error", "")
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
            finished_s=self._clock.now_s,
            prompt_length=episode.plan.prompts[0] if episode.plan.prompts else 0,
            policy_tokens=counts.total(),
            versions=tuple(sorted((version, count) for version, count in counts.items() if count)),
            packed_tokens=episode.plan.packed_tokens,
        )

    # Steps

    def _take_groups(self) -> list[tuple[FinishedGroup, float]]:
        """Return the groups that the step gets now, and when each has its scores."""
        taken = []
        for group in self._scheduler.take_ready():
            self._count_trained(group)
            scored = [self._scored_s.pop(trajectory.episode_id, 0.0) for trajectory in group.trajectories]
            taken.append((group, max(scored)))
        return taken

    def _on_step_finished(self) -> None:
        for group_id, trained in self._in_step:
            self._settle(group_id, trained)
        self._in_step.clear()
        if self._controller is not None:
            self._adapt(self._controller)
        self._staleness_of_step.clear()

    def _adapt(self, controller: AsyncRatioController) -> None:
        """Let `async_ratio: auto` decide, as after a step of a run."""
        now_s = self._clock.now_s
        empty_s = self._empty_s + (now_s - self._empty_since_s if self._empty_since_s is not None else 0.0)
        began_s, busy_s, was_empty_s = self._last_step
        self._last_step = (now_s, self._learner.worked_s(), empty_s)
        lasted_s = max(now_s - began_s, 1e-9)
        staleness = _mean(self._staleness_of_step)
        measured = StepMeasurement(
            learner_idle=min(1.0, max(0.0, 1 - (self._learner.worked_s() - busy_s) / lasted_s)),
            server_idle=min(1.0, max(0.0, (empty_s - was_empty_s) / lasted_s)),
            effective_sample_size=min(1.0, max(0.0, self._settings.sample_size(staleness))),
        )
        if controller.update(measured).changed:
            self._scheduler.set_async_ratio(controller.async_ratio)

    # Statistics

    def _count_trained(self, group: FinishedGroup) -> None:
        for trajectory in group.trajectories:
            for version, count in trajectory.versions:
                age = self._scheduler.learner_version - version
                self._staleness[age] += count
                self._staleness_of_step[age] += count
            self._trained_tokens += trajectory.policy_tokens
            self._trained_episodes += 1
            if self._timeline is not None:
                span = self._timeline.episodes[trajectory.episode_id, trajectory.started_s]
                span.fate, span.step = "trained", self._scheduler.learner_version
        self._in_step.append((group.group_id, {trajectory.episode_id for trajectory in group.trajectories}))

    def _settle(self, group_id: str, trained: Collection[str] = ()) -> None:
        """Count every started episode of the group, with its planned tokens and its time without other load."""
        self._server_of_group.pop(group_id, None)
        scheduler = self._settings.scheduler
        for replica in range(scheduler.replicas + scheduler.group_size):
            episode_id = f"{group_id}-r{replica}"
            self._scored_s.pop(episode_id, None)
            plan = self._plans.pop(episode_id, None)
            if plan is not None:
                alone_s = plan.tokens / self._settings.servers.tokens_per_s + sum(step_s for _, step_s in plan.turns)
                _add(self._submitted, plan.tokens, alone_s)
                if episode_id in trained:
                    _add(self._trained, plan.tokens, alone_s)

    def _note(self, episode: _Episode, activity: Activity) -> None:
        if episode.span is not None and self._clock.now_s > episode.since_s:
            episode.span.parts.append((activity, episode.since_s, self._clock.now_s))

    def _note_step(self, episode: _Episode) -> None:
        """Record an environment step and, in lockstep, the wait for the slowest environment after it."""
        if episode.span is not None:
            own_end_s = min(self._clock.now_s, episode.since_s + episode.plan.turns[episode.turn][1])
            episode.span.parts.append(("environment", episode.since_s, own_end_s))
            if own_end_s < self._clock.now_s:
                episode.span.parts.append(("wait", own_end_s, self._clock.now_s))

    def _result(self) -> SimulationResult:
        elapsed_s = max(self._clock.now_s, 1e-9)
        for server in self._servers.all:
            server.advance(self._clock.now_s)
        slot_s = self._slot_busy_s + sum(self._clock.now_s - episode.started_s for episode in self._episodes.values())
        length_ratio, latency_ratio = _ratios(self._trained, self._submitted)
        return SimulationResult(
            elapsed_s=elapsed_s,
            steps=self._scheduler.learner_version,
            step_ends_s=self._learner.step_ends_s,
            trained_episodes=self._trained_episodes,
            trained_tokens=self._trained_tokens,
            staleness=self._staleness,
            discarded_tokens=self._discarded_tokens,
            learner_idle=max(0.0, 1 - self._learner.worked_s() / elapsed_s),
            slots_idle=1 - slot_s / (elapsed_s * self._settings.slots),
            servers_idle=1 - sum(server.busy_s for server in self._servers.all) / (elapsed_s * len(self._servers.all)),
            bias=self._scheduler.bias.metrics(),
            true_length_ratio=length_ratio,
            true_latency_ratio=latency_ratio,
            dropped_groups=dict(self._scheduler.dropped_groups),
            groups=self._scheduler.counts(),
            cancelled_episodes=self._scheduler.cancelled_episodes,
            events=self._clock.events,
            turns=self._turns,
            generate_s=self._generate_s,
            timeline=self._timeline,
        )


def _mean(counts: Counter[int]) -> float:
    return sum(age * count for age, count in counts.items()) / max(1, counts.total())


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
