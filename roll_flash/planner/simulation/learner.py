"""The simulated learner: it computes groups as they come, updates, and publishes its weights to the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roll_flash.planner.simulation.clock import Clock
from roll_flash.planner.simulation.result import Timeline
from roll_flash.planner.simulation.servers import Servers
from roll_flash.planner.simulation.settings import LearnerSpec
from roll_flash.scheduling.scheduler import Scheduler
from roll_flash.types import FinishedGroup

Then = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Job:
    """Work of the learner, in seconds at full speed."""

    then: Then
    duration_s: float
    left_s: float
    started_s: float
    since_s: float
    ends_s: float = 0.0


class SimulatedLearner:
    """Owns the steps of a run. `take` returns new groups and when they are scored, `settle` ends a step's groups."""

    def __init__(
        self,
        spec: LearnerSpec,
        clock: Clock,
        scheduler: Scheduler,
        servers: Servers,
        *,
        take: Callable[[], Sequence[tuple[FinishedGroup, float]]],
        on_step: Callable[[], None],
        react: Callable[[], None],
        timeline: Timeline | None,
    ) -> None:
        self.busy_s = 0.0
        self.step_ends_s: list[float] = []
        self._spec = spec
        self._clock = clock
        self._scheduler = scheduler
        self._servers = servers
        self._take = take
        self._on_step = on_step
        self._react = react
        self._timeline = timeline
        self._accumulating = self._finishing = self._waiting_to_publish = self._publishing = False
        self._job: _Job | None = None
        self._pending: list[int] = []
        """Tokens of the groups of the step that wait for the learner."""
        self._unscored = 0
        """Groups of the step that wait for their scores."""
        self._late_tokens = 0
        servers.on_speed = self._on_speed

    def worked_s(self) -> float:
        """Return the time so far in which it worked."""
        if self._job is None or not self._spec.streams:
            return self.busy_s
        return self.busy_s - self._job.duration_s + self._clock.now_s - self._job.started_s

    def work(self) -> None:
        """Begin what can be done now."""
        if self._spec.streams:
            self._work_as_it_comes()
        elif not (self._accumulating or self._finishing):
            groups = self._take()
            if groups:
                self._accumulate(len(groups) * self._spec.group_s)
            elif self._scheduler.groups_wanted() == 0:
                self._finish()

    def _work_as_it_comes(self) -> None:
        if not self._finishing:
            for group, scored_s in self._take():
                tokens = group.packed_tokens if self._spec.computes_all or group.has_signal else 0
                if scored_s > self._clock.now_s:
                    self._unscored += 1
                    self._clock.at(scored_s, self._on_scored, tokens)
                else:
                    self._pending.append(tokens)
        if self._accumulating or self._finishing:
            return
        if self._pending:
            tokens = self._next_micro_batch()
            self._late_tokens += tokens
            self._accumulate(self._spec.call_s + tokens * self._spec.token_s)
        elif not self._unscored and self._scheduler.groups_wanted() == 0:
            self._finish()

    def _on_scored(self, tokens: int) -> None:
        self._unscored -= 1
        self._pending.append(tokens)
        self._react()

    def _next_micro_batch(self) -> int:
        """Take what fits, the oldest group always; return its tokens."""
        total, rest = self._pending[0], []
        for tokens in self._pending[1:]:
            if total + tokens <= self._spec.batch_tokens:
                total += tokens
            else:
                rest.append(tokens)
        self._pending = rest
        return total

    def _accumulate(self, duration_s: float) -> None:
        self._accumulating = True
        self._begin(duration_s, self._on_accumulated)

    def _finish(self) -> None:
        self._finishing = True
        self._begin(self._spec.step_s + self._late_tokens * self._spec.late_token_s, self._on_step_finished)
        self._late_tokens = 0

    def _on_accumulated(self) -> None:
        self._accumulating = False
        self._react()

    def _on_step_finished(self) -> None:
        self.step_ends_s.append(self._clock.now_s)
        self._scheduler.version_advanced(self._scheduler.learner_version + 1)
        self._on_step()
        self._waiting_to_publish = True
        self._stage()

    # Publication

    def _stage(self) -> None:
        """Start a publication, one at a time; the learner continues as soon as its newest weights are being sent."""
        if self._waiting_to_publish and not self._publishing:
            self._waiting_to_publish = False
            self._publishing = True
            if self._spec.stage_s:
                self._begin(self._spec.stage_s, self._on_staged)
            else:
                self._publish()
        self._react()

    def _on_staged(self) -> None:
        self._publish()
        self._react()

    def _publish(self) -> None:
        if self._spec.report_s:
            self._clock.after(self._spec.report_s, self._open_step)
        else:
            self._finishing = False
        self._prepare((0, self._scheduler.learner_version))

    def _open_step(self, _: None) -> None:
        self._finishing = False
        self._react()

    def _prepare(self, what: tuple[int, int]) -> None:
        """Load the weights beside those in use."""
        if not self._spec.publish_delay_s:
            return self._pause(what)
        self._servers.use_cores(1.0)
        self._clock.after(self._spec.publish_delay_s, self._on_prepared, what)

    def _on_prepared(self, what: tuple[int, int]) -> None:
        self._servers.use_cores(-1.0)
        self._pause(what)

    def _pause(self, what: tuple[int, int]) -> None:
        batch, version = what
        for server in self._servers.all[batch :: self._spec.publish_batches]:
            server.advance(self._clock.now_s)
            server.paused = True
            self._servers.changed(server)
        self._clock.after(self._spec.publish_s, self._on_loaded, (batch, version))

    def _on_loaded(self, what: tuple[int, int]) -> None:
        batch, version = what
        for server in self._servers.all[batch :: self._spec.publish_batches]:
            server.advance(self._clock.now_s)
            server.paused = False
            server.load_version(version)
            self._servers.changed(server)
        if batch + 1 < self._spec.publish_batches:
            self._prepare((batch + 1, version))
            return
        self._publishing = False
        self._scheduler.published(version)
        self._stage()

    # Work at the speed that the cores allow

    def _begin(self, duration_s: float, then: Then) -> None:
        self.busy_s += duration_s
        now_s = self._clock.now_s
        self._servers.use_cores(self._spec.threads)
        self._job = _Job(then, duration_s, duration_s, now_s, now_s)
        self._schedule(self._job)

    def _schedule(self, job: _Job) -> None:
        job.ends_s = self._clock.now_s + job.left_s / self._servers.speed
        self._clock.at(job.ends_s, self._on_job, job)

    def _on_speed(self) -> None:
        """Count the work so far, before and after the speed changes, and set its end anew."""
        if (job := self._job) is not None:
            job.left_s = max(0.0, job.left_s - (self._clock.now_s - job.since_s) * self._servers.speed)
            job.since_s = self._clock.now_s
            self._schedule(job)

    def _on_job(self, job: _Job) -> None:
        if job is not self._job or job.ends_s != self._clock.now_s:
            return
        self._job = None
        if self._timeline is not None and job.duration_s:
            self._timeline.learner.append((job.started_s, self._clock.now_s))
        if self._servers.shares_cores:
            self.busy_s += self._clock.now_s - job.started_s - job.duration_s
        self._servers.use_cores(-self._spec.threads)
        job.then()
