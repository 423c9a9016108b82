"""Rules about speed and losses: idle parts, staleness, sandboxes that hang or queue, biased drops, disk and memory."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from roll_flash.diagnosis.findings import Evidence, Finding
from roll_flash.diagnosis.run_view import RunView
from roll_flash.monitor.machine import DISK_FREE, MEMORY_AVAILABLE
from roll_flash.monitor.metrics import LEARNER_IDLE, SERVERS_IDLE, STALENESS_MEAN
from roll_flash.types import FailureCause

WINDOW = 10
"""Steps that are averaged: short waits even out."""
IDLE = 0.5
"""Share of the time from which a part that waits costs more than a rebalancing saves."""
ENVIRONMENT_SHARE = 0.5
"""Share of an episode in which it does not wait for the model."""
DROPPED_SHARE = 0.1
"""Share of trajectories that are dropped: sampling costs most, so a tenth of it is worth a change of settings."""
HANGING_SHARE = 0.1
"""Share of the episodes that ran into a timeout or were stopped before: most that hang are evicted as stale."""
TIMEOUT_SHARE = 0.02
"""Share that must have run into a timeout: episodes are stopped for other reasons too."""
HANGING_WINDOW = 20
HANGING = 5
"""Episodes that ran into a timeout; fewer may have one odd cause."""
FAILING_SHARE = 0.1
"""Share of the episodes that failed for other reasons: their time is lost, and groups lack replicas."""
HANGS = ("env_timeout", "sandbox_error", "episode_timeout")
"""Causes of failures that something which does not answer has."""
QUEUE_S = 1.0
QUEUE_SHARE = 0.25
"""Wait for a sandbox as a share of the time for which it is then used."""
BIAS = 0.8
"""Mean length (or duration) of trained episodes over that of all: the upper bound of what it can be."""
BIAS_EPISODES = 100
FORECAST_STEPS = 20
FIT = 0.8
"""Share of the variance that a straight line explains: less is no steady loss."""
RESERVE_GIB = 1.0
"""A run stops with less free disk than this, and the system becomes slow with less memory."""


def staleness_at_bound(view: RunView) -> Finding | None:
    """Many trajectories are dropped because they are beyond the largest staleness that is allowed."""
    steps = view.recent.last(WINDOW + 1)
    produced, dropped = steps.growth("books/produced"), steps.growth("books/dropped_stale")
    share = dropped / produced if produced > 0 else 0.0
    bound = math.floor(view.settings.async_ratio)
    if share < DROPPED_SHARE:
        return None
    return Finding(
        "staleness-at-bound",
        "warning",
        f"{share:.0%} of the trajectories are dropped as too old: episodes take longer than async_ratio={bound} allows",
        (
            Evidence("dropped as stale", dropped, *steps.span),
            Evidence("produced", produced, *steps.span),
            Evidence(STALENESS_MEAN, steps.mean(STALENESS_MEAN), *steps.span),
        ),
        "Raise scheduler.async_ratio (or auto), start fewer groups ahead (scheduler.extra_groups), or keep long "
        "episodes with scheduler.on_stale=wait or requeue",
    )


def learner_starved(view: RunView) -> Finding | None:
    """The learner mostly waits: for environments, or on GPUs of its own for servers that are too few."""
    steps = view.recent.last(WINDOW)
    idle = steps.mean(LEARNER_IDLE)
    played = [
        (each.seconds, each.texts) for each in view.episodes if each.texts is not None and each.reward is not None
    ]
    seconds = sum(took for took, _ in played)
    if len(steps) < WINDOW or not idle >= IDLE or not seconds > 0:
        return None
    outside = 1 - sum(texts.generate_s for _, texts in played if texts is not None) / seconds
    evidence = [Evidence(LEARNER_IDLE, idle, *steps.span)]
    evidence.append(Evidence("share of an episode outside of the model", outside, *steps.span))
    evidence.append(Evidence(SERVERS_IDLE, steps.mean(SERVERS_IDLE), *steps.span))
    if outside >= ENVIRONMENT_SHARE:
        why = f"episodes spend {outside:.0%} of their time in environments and sandboxes"
        remedy = "Play more episodes at once (rollout.max_concurrent, rollout.workers), or make the environment faster"
    elif view.settings.is_on_gpus:
        why = "servers generate too slowly for it"
        remedy = "Give servers more GPUs and the learner fewer (inference.servers, learner.ranks)"
    else:  # on CPUs an idle learner leaves its cores to the servers
        return None
    return Finding(
        "learner-starved",
        "warning",
        f"the learner waits {idle:.0%} of the time: {why}",
        tuple(evidence),
        f"{remedy}; `roll-flash plan CONFIG --from RUN` compares settings",
    )


def servers_idle(view: RunView) -> Finding | None:
    """No episode runs for much of the time: those that may start have ended, and the step is not done."""
    steps = view.recent.last(WINDOW)
    idle = steps.mean(SERVERS_IDLE)
    if len(steps) < WINDOW or not idle >= IDLE:
        return None
    return Finding(
        "servers-idle",
        "warning",
        f"no episode runs {idle:.0%} of the time: with async_ratio {view.settings.async_ratio:g} no more may start "
        "before the step is done",
        (Evidence(SERVERS_IDLE, idle, *steps.span), Evidence(LEARNER_IDLE, steps.mean(LEARNER_IDLE), *steps.span)),
        "Raise scheduler.async_ratio (or auto), or make what the step waits for faster (learner, stages); "
        "`roll-flash plan CONFIG --from RUN` compares settings",
    )


def sandbox_hangs(view: RunView) -> Finding | None:
    """Many episodes fail because an environment, or its sandbox, does not answer in time."""
    steps = view.recent.last(HANGING_WINDOW)
    hung = sum(steps.growth(f"books/failed_{cause}") for cause in HANGS)
    ended = steps.growth("books/produced") + steps.growth_of("books/failed_")
    stopped = steps.growth("books/cancelled")
    if len(steps) < 2:  # nothing is in the books yet, or one step: the log of episodes says more
        hung = sum(each.cause in HANGS for each in view.episodes)
        ended = float(len(view.episodes))
    if hung < max(HANGING, TIMEOUT_SHARE * ended) or hung + stopped < HANGING_SHARE * (ended + stopped):
        return None
    uses_sandboxes = steps.mean("sandbox/leases") > 0
    what = "sandbox" if uses_sandboxes else "environment"
    return Finding(
        f"{what}-hangs",
        "error",
        f"{hung:.0f} of {ended:.0f} episodes failed because their {what} did not answer in time",
        (
            Evidence("episodes that ran into a timeout", hung, *steps.span),
            Evidence("episodes", ended, *steps.span),
            Evidence("episodes that were stopped before their end", stopped, *steps.span),
        ),
        "Look at `message` of the failures in episodes/ and at what runs in the environment then (a command without an "
        "end, a network that does not answer); rollout.step_timeout_s is the time it is given",
    )


def episodes_fail(view: RunView) -> Finding | None:
    """Many episodes have no reward, for other reasons than those of `sandbox_hangs`."""
    steps = view.recent.last(HANGING_WINDOW)
    others = (cause for cause in get_args(FailureCause) if cause not in (*HANGS, "cancelled"))
    failed = {cause: steps.growth(f"books/failed_{cause}") for cause in others}
    number, ended = sum(failed.values()), steps.growth("books/produced") + steps.growth_of("books/failed_")
    if number < HANGING or number < FAILING_SHARE * ended:
        return None
    causes = sorted((cause for cause in failed if failed[cause]), key=lambda cause: -failed[cause])
    return Finding(
        "episodes-fail",
        "warning",
        f"{number:.0f} of {ended:.0f} episodes failed: "
        + ", ".join(f"{cause} {failed[cause]:.0f}" for cause in causes),
        (Evidence("episodes that failed", number, *steps.span), Evidence("episodes", ended, *steps.span)),
        "Look at `message` of the failures in episodes/, which the dashboard counts: an environment that raises an "
        "error gives no sample, so what the model can cause itself should end the episode with a reward",
    )


def sandbox_queue(view: RunView) -> Finding | None:
    """Episodes wait for a sandbox to start."""
    steps = view.recent.last(1)
    wait, use = steps.mean("sandbox/wait_s.mean"), steps.mean("sandbox/lease_s.mean")
    if not (wait >= QUEUE_S and wait >= QUEUE_SHARE * use):
        return None
    return Finding(
        "sandbox-queue",
        "warning",
        f"an episode waits {wait:.1f} s for its sandbox and then uses it for {use:.1f} s",
        (
            Evidence("wait for a sandbox in s", wait, *steps.span),
            Evidence("use of a sandbox in s", use, *steps.span),
            Evidence("waiting now", steps.mean("sandbox/waiting"), *steps.span),
        ),
        "Keep more sandboxes ready (sandbox.pool_size, sandbox.reuse), start more at once "
        "(sandbox.max_parallel_starts), add engines (sandbox.engines), or "
        "play fewer episodes at once (rollout.max_concurrent)",
    )


def eviction_bias(view: RunView) -> Finding | None:
    """Trained episodes are shorter than those that were started: the long ones are dropped."""
    steps = view.recent.last(1)
    ratios = {name: steps.mean(f"bias/{name}_ratio_high") for name in ("length", "latency")}
    name = min(ratios, key=lambda each: ratios[each] if math.isfinite(ratios[each]) else math.inf)
    if not ratios[name] <= BIAS or not steps.mean("books/produced") >= BIAS_EPISODES:
        return None
    what = {"length": "tokens", "latency": "seconds"}[name]
    return Finding(
        "eviction-bias",
        "warning",
        f"trained episodes have at most {ratios[name]:.0%} of the {what} of all that were started: long tasks are lost",
        (
            Evidence(f"{name}, trained to started", ratios[name], *steps.span),
            Evidence("dropped as stale", steps.mean("books/dropped_stale"), *steps.span),
        ),
        "Set scheduler.on_stale=wait, requeue or scheduler.in_order=true, or raise scheduler.async_ratio; without "
        "extra_replicas and extra_groups the fastest replicas do not win",
    )


def disk_runs_out(view: RunView) -> Finding | None:
    """At the rate of the last steps the disk is full before the run ends."""
    return _runs_out(
        view,
        DISK_FREE,
        "disk-runs-out",
        "disk",
        "Free some, move the run (docs/operations.md), or lower checkpoint.keep and checkpoint.keep_every",
    )


def memory_runs_out(view: RunView) -> Finding | None:
    """At the rate of the last steps the memory of the driver's machine is used up before the run ends."""
    return _runs_out(
        view,
        MEMORY_AVAILABLE,
        "memory-runs-out",
        "memory",
        "Look for the process that grows (top); an environment that keeps what it made is a usual cause",
    )


def _runs_out(view: RunView, metric: str, name: str, what: str, remedy: str) -> Finding | None:
    steps = view.recent.last(FORECAST_STEPS)
    values = steps[metric]
    left = view.settings.steps - view.last_step
    if len(steps) < FORECAST_STEPS or left <= 0 or not values[-1] < values[0]:
        return None
    slope, fit = _line(values)
    if not (slope < 0 and fit >= FIT):
        return None
    enough_for = (float(values[-1]) - RESERVE_GIB) / -slope
    if enough_for >= left:
        return None
    seconds = max(0.0, enough_for) * steps.mean("step_s")
    return Finding(
        name,
        "error" if enough_for < FORECAST_STEPS else "warning",
        f"the {what} is enough for {max(0.0, enough_for):.0f} more steps (about {seconds / 3600:.1f} h), but {left} "
        "are left",
        (
            Evidence(f"free {what} in GiB", float(values[0]), steps.span[0], steps.span[0]),
            Evidence(f"free {what} in GiB", float(values[-1]), steps.span[1], steps.span[1]),
        ),
        remedy,
    )


def _line(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the slope of the line of least squares per step, and the share of the variance that it explains."""
    numbers = np.arange(len(values)) - (len(values) - 1) / 2
    deviations = values - values.mean()
    product = float(numbers @ deviations)
    slope = product / float(numbers @ numbers)
    return slope, slope * product / float(deviations @ deviations)
