"""The speeds and episodes that a simulation needs, measured from a run folder.

Servers and learner of one machine share its cores, so that each is slower while the other works: times are measured
with what worked at the same time, and kept as those of full speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from roll_flash.config.sections.distill import TEACHER
from roll_flash.config.tree import Config
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.monitor.episode_files.steps import removed_line
from roll_flash.monitor.metrics import STALENESS_MEAN
from roll_flash.planner.measured.episodes import MeasuredLoad, measured_load
from roll_flash.planner.measured.recording import LearnerSpan, Recording, merged, overlap_share
from roll_flash.planner.measured.turn_times import TurnTimes, fit_line, fit_turn_times
from roll_flash.planner.simulation.services import SandboxSpec, StageSpec

LEAST_ERROR = 0.05
"""Least relative error of speeds, however well the run itself is simulated."""
UNSEEN_ERROR = 0.1
"""Added where the slowdown of servers and learner beside each other could not be measured."""
PROXIMAL_SHARE = 1 / 3
"""Time of a forward pass alone, as a share of forward and backward."""
MAX_UNFINISHED = 0.05
"""Share of episodes without a trajectory from which on a plan warns: the slow ones are missing."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Times in seconds at full speed, of the servers and ranks that were measured."""

    request_s: float
    token_s: float
    """A token of a sequence that is alone, without `sequence_s`."""
    sequence_s: float
    """Added to each token for each sequence in the batch."""
    prompt_token_s: float
    call_s: float
    """A micro-batch of the learner without its tokens."""
    train_token_s: float
    """A token's forward and backward pass, with `ranks`."""
    proximal_token_s: float
    """A token's forward pass before the first of several minibatches."""
    update_s: float
    stage_s: float
    report_s: float
    pause_s: float
    """Pause of one server for new weights."""
    publish_delay_s: float
    """Before each pause, and the check after it."""
    ranks: int = 1
    cache_tokens: float = math.inf
    """Tokens in the key-value cache of a server."""
    has_prefix_cache: bool = True
    cores: float = math.inf
    """CPU cores that servers and learner share."""
    background_s: float = 0.0
    """Core seconds of the other processes per turn."""
    ess_loss: float = 0.0
    """Loss of effective sample size for each step of mean staleness."""

    def scaled(self, servers: float, learner: float) -> Speeds:
        """Return speeds with the times of servers and learner multiplied."""
        factors = dict.fromkeys(_OF_SERVERS, servers) | dict.fromkeys(_OF_LEARNER, learner)
        times: dict[str, Any] = {name: factor * getattr(self, name) for name, factor in factors.items()}
        return replace(self, **times)


_OF_SERVERS = ("request_s", "token_s", "sequence_s", "prompt_token_s")
_OF_LEARNER = ("call_s", "train_token_s", "proximal_token_s", "update_s", "stage_s")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a plan is made from."""

    source: str
    """Where the figures come from, for the user."""
    speeds: Speeds
    load: MeasuredLoad
    sandboxes: SandboxSpec | None = None
    scoring: tuple[StageSpec, ...] = ()
    error: float = LEAST_ERROR
    """Relative error of the speeds."""
    notes: tuple[str, ...] = field(default=())
    """What limits the plan, for the user."""


def calibrate(recording: Recording) -> Calibration:
    """Measure a run; `replay.fitted` makes the result agree with it."""
    cores = _shared_cores(recording)
    turns = _fit_turns(recording, shares_cores=math.isfinite(cores))
    slowed = 1 / (1 + turns.slowdown)
    usual_turn = turns.token_s + turns.sequence_s * _usual_batch(recording)
    leased_s, at_reset = _lease(recording)
    load = measured_load(
        recording.episodes,
        recording.failures,
        usual_turn,
        stopped=recording.stopped,
        lease_s=leased_s,
        leased_at_reset=at_reset,
    )
    speeds = _with_background(_speeds(recording, turns, slowed, cores), recording, slowed)
    return Calibration(
        source=f"measured in {recording.folder}: {len(recording.episodes)} episodes, {len(recording.steps)} steps",
        speeds=speeds,
        load=load,
        sandboxes=_sandboxes(recording, leased_at_reset=at_reset),
        scoring=_scoring(recording),
        error=math.hypot(LEAST_ERROR, 0.0 if turns.knows_slowdown or math.isinf(cores) else UNSEEN_ERROR),
        notes=tuple(_notes(recording, turns, cores)),
    )


def _fit_turns(recording: Recording, *, shares_cores: bool) -> TurnTimes:
    spans = recording.learner_spans if shares_cores else []
    return fit_turn_times(
        recording.episodes,
        recording.config.inference.servers,
        [(span.started_s, span.ended_s) for span in spans],
        has_prefix_cache=_has_prefix_cache(recording),
    )


def _has_prefix_cache(recording: Recording) -> bool:
    return recording.last("inference/server_prefix_cache_queries_0") > 0


def _shared_cores(recording: Recording) -> float:
    """The cores that servers and learner share: those of a machine without GPUs that does all by itself."""
    config, cores = recording.config, recording.timeline[-1].cpu_cores
    return float(cores) if cores and config.ray.address is None and config.learner.device != "cuda" else math.inf


def _usual_batch(recording: Recording) -> float:
    """Mean number of sequences at a server while it has any."""
    turns = [turn.span for episode in recording.episodes for turn in episode.turns]
    lasted_s = sum(end - start for start, end in merged(turns))
    return sum(end - start for start, end in turns) / max(lasted_s, 1e-9) / recording.config.inference.servers


def _speeds(recording: Recording, turns: TurnTimes, slowed: float, cores: float) -> Speeds:
    servers = recording.config.inference.servers
    paused_s = recording.mean("weights/paused_s") or 0.0
    published_s = recording.mean("weights/total_s") or 0.0
    staleness, sizes = recording.mean(STALENESS_MEAN) or 0.0, recording.mean("effective_sample_size")
    return Speeds(
        request_s=turns.request_s,
        token_s=turns.token_s,
        sequence_s=turns.sequence_s,
        prompt_token_s=turns.prompt_token_s,
        **_learner_times(recording, slowed),
        report_s=_report_s(recording),
        pause_s=paused_s,
        publish_delay_s=max(0.0, published_s / servers - paused_s),
        ranks=recording.config.learner.ranks,
        cache_tokens=recording.last("inference/server_kv_cache_tokens_0") or math.inf,
        has_prefix_cache=_has_prefix_cache(recording),
        cores=cores,
        ess_loss=max(0.0, 1 - sizes) / staleness if staleness and sizes is not None else 0.0,
    )


def _learner_times(recording: Recording, slowed: float) -> dict[str, float]:
    """Times of `_OF_LEARNER` at full speed: what was computed while servers worked ran at the speed `slowed`."""
    spans = recording.learner_spans
    turns = [turn.span for episode in recording.episodes for turn in episode.turns]
    shares = overlap_share([(span.started_s, span.ended_s) for span in spans], turns)
    seconds = [span.seconds * (1 - share * (1 - slowed)) for span, share in zip(spans, shares, strict=True)]
    of = {work: [(span, s) for span, s in zip(spans, seconds, strict=True) if span.work == work] for work in _WORKS}
    call_s, token_s = _micro_batches(of["accumulate"])
    late_s = (recording.mean("forward_backward_s") or 0.0) * slowed if computes_late(recording.config) else 0.0
    tokens = sum(span.tokens for span, _ in of["accumulate"]) / len(recording.timeline)
    late_token_s = late_s / max(1.0, tokens)
    return {
        "call_s": call_s,
        "train_token_s": late_token_s or token_s,
        "proximal_token_s": token_s if late_token_s else PROXIMAL_SHARE * token_s,
        "update_s": max(0.0, _mean([s for _, s in of["update"]]) - late_s),
        "stage_s": _mean([s for _, s in of["stage"]]),
    }


_WORKS = ("accumulate", "update", "stage")


def _micro_batches(spans: Sequence[tuple[LearnerSpan, float]]) -> tuple[float, float]:
    """Fit a line through tokens and seconds. The first call of a run, which warms up, is left out."""
    usual = spans[1:] if len(spans) > 2 else spans
    if not usual:
        return 0.0, 0.0
    return fit_line([span.tokens for span, _ in usual], [seconds for _, seconds in usual])


def _report_s(recording: Recording) -> float:
    """Time between the end of a step's work and the next step."""
    gaps = [
        max(0.0, following.started_s - step.learner[-1].ended_s)
        for step, following in zip(recording.timeline, recording.timeline[1:], strict=False)
        if step.learner and following.step == step.step + 1
    ]
    return median(gaps) if gaps else 0.0


def computes_late(config: Config) -> bool:
    """True if gradients are computed only when the last group of a step has come."""
    return config.learner.keeps_groups or AdvantageConfig.of(config.learner).needs_whole_batch


def _with_background(speeds: Speeds, recording: Recording, slowed: float) -> Speeds:
    """Find what the other processes use, from how much servers and learner slow each other down."""
    if math.isinf(speeds.cores) or slowed >= 1:
        return speeds
    config = recording.config
    wanted = config.inference.servers * config.inference.threads + config.learner.ranks * config.learner.threads
    others = min(speeds.cores, max(0.0, speeds.cores - slowed * wanted))
    lasted_s = max(e.finished_s for e in recording.episodes) - min(e.started_s for e in recording.episodes)
    turns_per_s = sum(len(episode.turns) for episode in recording.episodes) / max(lasted_s, 1e-9)
    return replace(speeds, background_s=others / turns_per_s)


def _lease(recording: Recording) -> tuple[float, bool]:
    """Mean wait for a sandbox, and whether it is part of the reset (else of the first step)."""
    waited_s = recording.last("sandbox/wait_s.mean") if recording.last("sandbox/leases") else 0.0
    return waited_s, waited_s > 0 and fmean(e.startup_s for e in recording.episodes) >= waited_s / 2


def _sandboxes(recording: Recording, *, leased_at_reset: bool) -> SandboxSpec | None:
    if not recording.last("sandbox/leases"):
        return None
    sandbox = recording.config.sandbox
    starts = sandbox.max_parallel_starts * max(1, len(sandbox.engines))
    start_s = recording.last("sandbox/start_s.mean")
    return SandboxSpec(sandbox.pool_size, starts, start_s, sandbox.reuse, leased_at_reset)


def _scoring(recording: Recording) -> tuple[StageSpec, ...]:
    config, found = recording.config, []
    teacher = {TEACHER: config.distill.workers} if config.distill else {}
    for name, count in ({stage.name: stage.workers for stage in config.stages} | teacher).items():
        rows = recording.last(f"stages/{name}/rows")
        if rows:
            found.append(StageSpec(count, recording.last(f"stages/{name}/seconds") / rows))
    return tuple(found)


def _notes(recording: Recording, turns: TurnTimes, cores: float) -> list[str]:
    notes = [line] if (line := removed_line(recording.folder / "episodes")) else []
    if recording.damaged:
        notes.append(f"{recording.damaged} damaged lines of episodes/ were left out")
    num_episodes = len(recording.stopped) + len(recording.episodes)
    share = len(recording.stopped) / num_episodes
    unknown = sum(episode.turns == 0 for episode in recording.stopped) / num_episodes
    unfinished = recording.last("bias/unfinished") - share
    if unfinished > MAX_UNFINISHED:
        notes.append(
            f"{unfinished:.0%} of the run's episodes failed, or were stopped when their group was complete, and slow "
            "ones more often: the plan is too fast. Measure without redundancy"
        )
    if unknown > MAX_UNFINISHED:
        notes.append(
            f"{unknown:.0%} of the run's episodes were stopped as stale with no turn recorded, so how long they would "
            "have lasted is not known: settings that wait for every episode, such as scheduler.async_ratio=0, may be "
            "slower than planned. Measure with scheduler.on_stale=wait"
        )
    if not turns.knows_slowdown and math.isfinite(cores):
        notes.append(
            "servers and learner hardly worked at the same time (or always did), so how much they slow each other down "
            "is not measured; measure with scheduler.async_ratio=1"
        )
    drift = _drift(recording)
    if drift > 0.2:
        notes.append(
            f"episodes have changed during the run: their tokens by {drift:.0%} from its first to its last third"
        )
    return notes


def _drift(recording: Recording) -> float:
    ordered = sorted(recording.episodes, key=lambda episode: episode.started_s)
    third = len(ordered) // 3
    first, last = (fmean(episode.tokens for episode in part) for part in (ordered[:third], ordered[-third:]))
    return abs(last - first) / first


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
