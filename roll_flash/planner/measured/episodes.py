"""Measured episodes as the load of a simulation: whole episodes, with replicas of a task as alike as in the run."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from roll_flash.planner.measured.group_effects import GroupEffects
from roll_flash.planner.measured.recording import RecordedEpisode, StoppedEpisode
from roll_flash.planner.simulation.load import EpisodePlan

SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """Draws episodes so that replicas of a task are alike as in the run."""

    episodes: tuple[EpisodePlan, ...]
    """Sorted by duration."""
    effects: GroupEffects
    signal_rate: float = 1.0
    """Share of the groups whose replicas get different rewards."""
    failure_rate: float = 0.0
    """Share of the attempts that fail."""
    shares: tuple[float, ...] = ()
    """For each of `episodes`, the share of all that it and the shorter ones stand for; empty: all count alike."""
    seed: int = 0

    def plan(self, seed: int, replica: int, attempt: int) -> EpisodePlan:
        """Return the plan of one episode; the same arguments give the same plan."""
        of_task = random.Random(self.seed * 7_368_787 + seed)
        own = random.Random((self.seed * 1_000_003 + seed) * 1_009 + replica * 31 + attempt)
        rank, has_signal = self.effects.rank(of_task, own), of_task.random() < self.signal_rate
        place = bisect(self.shares, rank) if self.shares else int(rank * len(self.episodes))
        place = min(len(self.episodes) - 1, place)
        reward = float(replica % 2) if has_signal else 0.0
        return replace(self.episodes[place], reward=reward, fails=own.random() < self.failure_rate)

    def with_seed(self, seed: int) -> MeasuredLoad:
        return replace(self, seed=seed)


def measured_load(
    episodes: Sequence[RecordedEpisode],
    failures: int,
    token_s: float,
    *,
    stopped: Sequence[StoppedEpisode] = (),
    lease_s: float = 0.0,
    leased_at_reset: bool,
) -> MeasuredLoad:
    """Return the load of recorded episodes. `token_s`: usual time of one token, to compare their durations. `stopped`:
    others, which are played on as `completed` says, or longer episodes stand for them. `lease_s`: mean wait for a
    sandbox, which is taken out of the reset or of the first step: the simulation adds its own."""
    played_on, stopped_s = completed(stopped, episodes)
    episodes = [*episodes, *played_on]
    startup_share = _share_without(lease_s, [episode.startup_s for episode in episodes]) if leased_at_reset else 1.0
    step_share = 1.0
    if lease_s and not leased_at_reset:
        step_share = _share_without(lease_s, [episode.turns[0].step_s for episode in episodes])
    weights = with_stopped([episode.finished_s - episode.started_s for episode in episodes], stopped_s)
    found = [
        (_plan(episode, startup_share, step_share), episode, weight)
        for episode, weight in zip(episodes, weights, strict=True)
    ]
    found.sort(key=lambda each: duration_s(each[0], token_s))
    shares = tuple(accumulate(weight for *_, weight in found))
    rewards, logarithms = defaultdict[str, set[float]](set), defaultdict[str, list[float]](list)
    for plan, episode, _ in found:
        rewards[episode.group_id].add(episode.reward)
        logarithms[episode.group_id].append(math.log(max(SHORTEST_S, duration_s(plan, token_s))))
    with_signal = [len(rewards[group]) > 1 for group, members in logarithms.items() if len(members) > 1]
    return MeasuredLoad(
        episodes=tuple(plan for plan, *_ in found),
        shares=shares,
        effects=GroupEffects.measured(list(logarithms.values())),
        signal_rate=fmean(with_signal) if with_signal else 1.0,
        failure_rate=failures / (failures + len(episodes)),
    )


def completed(
    stopped: Sequence[StoppedEpisode], episodes: Sequence[RecordedEpisode]
) -> tuple[list[RecordedEpisode], list[float]]:
    """Return stopped episodes as if they had been played to their end, and how long the others had lasted.

    Those are stopped that are slow, so that the finished ones alone say too little about long durations. A stopped
    episode that has finished turns is taken for one of the finished episodes with more turns, but with environment
    steps so much slower that it is where it was when it was stopped, on average in the middle of a turn.
    """
    longer_than, growth = dict[int, list[RecordedEpisode]](), dict[int, float]()
    for turns in {episode.turns for episode in stopped} - {0}:
        longer = [each for each in episodes if len(each.turns) > turns]
        if longer:
            usual_s = fmean(_elapsed_s(each, turns + 0.5) for each in longer)
            longer_than[turns] = longer
            growth[turns] = fmean(_elapsed_s(each, len(each.turns)) for each in longer) / max(1e-9, usual_s)
    found, unknown_s = [], []
    for place, episode in enumerate(stopped):
        if episode.turns not in longer_than:
            unknown_s.append(episode.lasted_s)
            continue
        longer = longer_than[episode.turns]
        like = longer[place % len(longer)]
        rest_s = episode.lasted_s * growth[episode.turns] - sum(turn.generate_s for turn in like.turns) - like.startup_s
        factor = max(1.0, rest_s / max(1e-9, sum(turn.step_s for turn in like.turns)))
        slowed = tuple(replace(turn, step_s=factor * turn.step_s) for turn in like.turns)
        own = replace(like, group_id=episode.group_id, turns=slowed)
        found.append(replace(own, finished_s=own.started_s + _elapsed_s(own, len(slowed))))
    return found, unknown_s


def _elapsed_s(episode: RecordedEpisode, turns: float) -> float:
    """Return the time from an episode's start to the end of so many of its turns."""
    times = [turn.generate_s + turn.step_s for turn in episode.turns]
    whole = min(int(turns), len(times))
    return episode.startup_s + sum(times[:whole]) + (turns - whole) * (times[whole] if whole < len(times) else 0.0)


def with_stopped(durations_s: Sequence[float], stopped_s: Sequence[float]) -> list[float]:
    """Return the share of all episodes that each duration stands for, when others were stopped after `stopped_s`.

    This is the estimate of Kaplan and Meier (1958): a stopped episode is spread over the longer durations. What was
    stopped after the longest one is counted as the longest.
    """
    if not durations_s:
        return []
    ends = sorted(
        [(duration, 0, place) for place, duration in enumerate(durations_s)] + [(s, 1, -1) for s in stopped_s]
    )
    shares, left = [0.0] * len(durations_s), 1.0
    for before, (_, is_stopped, place) in enumerate(ends):
        if not is_stopped:
            shares[place] = left / (len(ends) - before)
            left -= shares[place]
    shares[max(range(len(durations_s)), key=durations_s.__getitem__)] += left
    return shares


def _share_without(lease_s: float, seconds: Sequence[float]) -> float:
    """Return the share of these times that is left without the wait for a sandbox."""
    mean_s = fmean(seconds)
    return max(0.0, 1 - lease_s / mean_s) if mean_s else 1.0


def duration_s(plan: EpisodePlan, token_s: float) -> float:
    """Return the time of an episode without other load."""
    return plan.startup_s + sum(step_s + token_s * tokens for tokens, step_s in plan.turns)


def _plan(episode: RecordedEpisode, startup_share: float, step_share: float) -> EpisodePlan:
    first, *rest = episode.turns
    first_s = step_share * first.step_s
    if step_share < 1 and rest:  # the wait differs, so the other steps of the episode say more about this one
        first_s = fmean(turn.step_s for turn in rest)
    return EpisodePlan(
        turns=((first.tokens, first_s), *((turn.tokens, turn.step_s) for turn in rest)),
        reward=0.0,
        fails=False,
        prompts=tuple(turn.prompt for turn in episode.turns),
        startup_s=startup_share * episode.startup_s,
        packed_tokens=episode.packed_tokens,
    )
