"""Rules about learning: rewards, success, lengths, entropy, gradients, off-policy corrections."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from roll_flash.diagnosis.findings import Evidence, Finding
from roll_flash.diagnosis.run_view import Episode, RunView, Steps
from roll_flash.monitor.metrics import REWARD, REWARD_MAX, REWARD_MIN, REWARD_STD_IN_GROUP, SUCCESS
from roll_flash.scheduling.async_ratio import MIN_SAMPLE_SIZE

STEPS_WITHOUT_SIGNAL = 5
"""One step without signal is chance where few groups are trained; five in a row have no gradient to go on with."""
TREND_STEPS = 5
"""Steps averaged at each end of a trend: fewer follow the noise of single batches, more need longer runs."""
MIN_STEPS = 3 * TREND_STEPS
"""Both ends of a trend and as many steps between them, so that it is no jump between neighbours."""
STANDARD_ERRORS = 3.0
"""Differences of means below this many standard errors are taken as noise."""
REWARD_GAIN = 0.2
"""Rise of the reward, as a share of the range of rewards, from which it should show in the success."""
MOST_OF_REWARD = 0.5
"""Share of the reward range that is earned: with less, parts of the way (a well-formed call) may come first."""
FLAT_SUCCESS = 0.02
SOLVED = 0.9
"""Success from which a run has nothing left to gain, so that low entropy and equal rewards are no problem."""
LENGTH_FACTOR = 3.0
"""Lengths change by up to a factor of two in sound runs that learn to be brief or to think longer."""
MIN_LENGTH = 4.0
"""Answers of fewer tokens cannot collapse."""
ENTROPY_SHARE = 0.1
"""Share of its highest value in the first steps to which entropy must have fallen; sharper policies are usual, ten
times is not."""
ENTROPY_SHARE_ALIKE = 0.5
"""The same where replicas answer alike by now: only the steps before have an entropy, since they had a signal."""
ALIKE = 0.75
"""Share of the tasks of the last steps in which all replicas give the same answer."""
LITTLE_SIGNAL = 0.5
"""Share of policy tokens in groups whose replicas earn different rewards."""
LARGE_KL = 0.2
"""Divergence per version, in nats per token: twenty times the trust region of usual updates (0.01)."""
LARGE_KL_STEPS = 3
SPIKE_FACTOR = 10.0
"""Gradient norms of sound runs vary by a factor of two or three."""
SPIKES = 2
"""One spike may be one odd batch, which clipping takes care of."""
SPIKE_STEPS = 20


def no_reward_variance(view: RunView) -> Finding | None:
    """All replicas of a task earn the same, step after step, and no teacher scores them: every advantage is zero."""
    steps = view.recent
    low, high = steps[REWARD_MIN], steps[REWARD_MAX]
    without = steps[REWARD_STD_IN_GROUP] == 0 if view.settings.compares_replicas else low == high
    number = _trailing(without.tolist())
    chosen = steps.last(number)
    if number < STEPS_WITHOUT_SIGNAL or np.isfinite(chosen["distill/reverse_kl"]).any():
        return None
    first, last = chosen.span
    smallest, largest = float(np.min(low[-number:])), float(np.max(high[-number:]))
    if smallest < largest:
        why = "all replicas of a task earn the same, though tasks differ"
        remedy = "Sample more freely (rollout.temperature), or more replicas (scheduler.group_size)"
    elif largest > 0:
        why = f"every episode earned {largest:g}"
        remedy = "If that is the most, the tasks are solved: give harder ones"
    else:
        why = f"every episode earned {largest:g}"
        remedy = (
            "Look at the transcripts in episodes/; then give easier tasks, rewards for parts of the way, "
            "demonstrations (warm_start), or room for longer answers (rollout.max_new_tokens)"
        )
    evidence = Evidence("standard deviation of rewards in a group", chosen.mean(REWARD_STD_IN_GROUP), first, last)
    return Finding(
        "no-reward-variance",
        "error",
        f"nothing is learnt since step {first}: {why}",
        (
            evidence,
            Evidence("smallest reward", smallest, first, last),
            Evidence("largest reward", largest, first, last),
        ),
        remedy,
    )


def reward_without_success(view: RunView) -> Finding | None:
    """The reward rises and most of it is earned, but no more tasks are solved."""
    ends = _ends(view)
    if ends is None:
        return None
    before, after = ends
    lowest, width = _rewards(before, after)
    success = (before.mean(SUCCESS), after.mean(SUCCESS))
    rise = after.mean(REWARD) - before.mean(REWARD)
    if not (width > 0 and _rose(before, after, REWARD) and rise >= REWARD_GAIN * width):
        return None
    if not (after.mean(REWARD) - lowest >= MOST_OF_REWARD * width and success[1] < SOLVED):
        return None
    if not success[1] - success[0] <= FLAT_SUCCESS:
        return None
    return Finding(
        "reward-without-success",
        "error",
        f"the reward rose from {before.mean(REWARD):.3g} to {after.mean(REWARD):.3g}, but success stayed at "
        f"{success[1]:.2f}: the reward is earned without solving the task",
        (*_both(before, after, REWARD), *_both(before, after, SUCCESS)),
        "Read the transcripts of the episodes with the highest rewards, and change the check that pays for them",
    )


def length_change(view: RunView) -> Finding | None:
    """Answers become a third as long, or three times as long, and the reward does not rise with it. Where
    replicas earn the same in the end, this is why."""
    ends = _ends(view)
    if ends is None:
        return None
    lengths = [steps.mean("policy_tokens") / max(1.0, steps.mean("episodes")) for steps in ends]
    if not (min(lengths) > 0 and max(lengths) >= MIN_LENGTH) or _rose(*ends, REWARD):
        return None
    factor = lengths[1] / lengths[0]
    if 1 / LENGTH_FACTOR < factor < LENGTH_FACTOR:
        return None
    collapsed, is_solved = factor < 1, _is_solved(*ends)
    if collapsed and is_solved:
        return None
    evidence = [
        Evidence("policy tokens per episode", length, *steps.span) for length, steps in zip(lengths, ends, strict=True)
    ]
    return Finding(
        "length-collapse" if collapsed else "length-explosion",
        "error" if _signal(ends[1]) < LITTLE_SIGNAL and not is_solved else "warning",
        f"episodes went from {lengths[0]:.0f} to {lengths[1]:.0f} policy tokens, and the reward did not rise",
        (*evidence, *_both(*ends, REWARD)),
        "Read recent transcripts; lower learner.learning_rate, or set learner.kl.coefficient. "
        + ("Check that an empty answer earns nothing" if collapsed else "Check that nothing pays for length alone"),
    )


def policy_moves_too_fast(view: RunView) -> Finding | None:
    """In several steps, one update changed the policy far more than a trust region allows."""
    moves = view.recent["kl_k3/age_1"] - np.nan_to_num(view.recent["mismatch_kl_k3"])
    places = np.flatnonzero(moves > LARGE_KL)
    if len(places) < LARGE_KL_STEPS:
        return None
    worst = places[int(np.argmax(moves[places]))]
    step = view.recent.number(int(worst))
    return Finding(
        "policy-moves-too-fast",
        "error",
        f"in {len(places)} of {len(view.recent)} steps one update moved the policy by more than {LARGE_KL:g} nats per "
        f"token (the most is {moves[worst]:.3g})",
        (Evidence("divergence of tokens one version old", float(moves[worst]), step, step),),
        "Lower learner.learning_rate by a factor of 10, go on from an earlier checkpoint, and compare grad_norm with "
        "learner.max_grad_norm",
    )


def gradient_spikes(view: RunView) -> Finding | None:
    """Several recent gradients are ten times as large as the usual one."""
    steps = view.recent.last(SPIKE_STEPS)
    norms = steps["grad_norm"]
    known = norms[np.isfinite(norms) & (norms > 0)]
    if len(known) < SPIKE_STEPS // 2:
        return None
    usual = float(np.median(known))
    spikes = np.flatnonzero(norms > SPIKE_FACTOR * usual)
    if len(spikes) < SPIKES:
        return None
    largest = spikes[int(np.argmax(norms[spikes]))]
    step = steps.number(int(largest))
    return Finding(
        "gradient-spikes",
        "warning",
        f"{len(spikes)} of the last {len(steps)} gradients are more than {SPIKE_FACTOR:g} times the usual norm of "
        f"{usual:.3g}",
        (Evidence("usual norm", usual, *steps.span), Evidence("norm", float(norms[largest]), step, step)),
        "Lower learner.max_grad_norm to about the usual norm, and look at the rewards of these steps",
    )


def low_sample_size(view: RunView) -> Finding | None:
    """The importance weights of old tokens differ so much that most of a batch counts for little."""
    steps = view.recent.last(TREND_STEPS)
    sizes = steps["effective_sample_size"]
    if np.isfinite(sizes).sum() < TREND_STEPS or not np.median(sizes) < MIN_SAMPLE_SIZE:
        return None
    size = float(np.median(sizes))
    return Finding(
        "low-effective-sample-size",
        "warning",
        f"the effective sample size is {size:.2f} of the batch: sampler and learner differ too much",
        (Evidence("effective sample size", size, *steps.span), Evidence("kl_k3", steps.mean("kl_k3"), *steps.span)),
        "Lower scheduler.async_ratio (or set it to auto) or learner.learning_rate; if another finding says that "
        "sampler and learner disagree, mend that first",
    )


def entropy_collapse(view: RunView) -> Finding | None:
    """The policy hardly varies any more, so that replicas earn the same, and the tasks are not solved."""
    ends = _ends(view)
    if ends is None:
        return None
    before, after = ends
    last = _last_known(view.recent, "entropy")
    highest = float(np.max(before["entropy"], where=np.isfinite(before["entropy"]), initial=0.0))
    share = last.mean("entropy") / highest if highest > 0 else math.nan
    signal = _signal(after)
    most = ENTROPY_SHARE_ALIKE if _alike(view.episodes, after.span[0]) >= ALIKE else ENTROPY_SHARE
    if not (share < most and signal < LITTLE_SIGNAL) or _is_solved(before, after):
        return None
    return Finding(
        "entropy-collapse",
        "error",
        f"entropy fell to {share:.1%} of what it was, and {signal:.0%} of the tokens have a signal",
        (*_both(before, last, "entropy"), Evidence("tokens with a signal", signal, *after.span)),
        "Go on from a checkpoint before it, with a lower learner.learning_rate, learner.entropy_bonus, a higher "
        "learner.loss.clip_high or learner.kl.coefficient",
    )


def _signal(steps: Steps) -> float:
    """Return the share of policy tokens in groups whose replicas earn different rewards; NaN without tokens."""
    tokens = steps.mean("policy_tokens")
    return steps.mean("computed_policy_tokens") / tokens if tokens > 0 else math.nan


def _alike(episodes: Sequence[Episode], since: int) -> float:
    """Return the share of tasks, of those with several replicas, in which all replicas give the same answer; NaN if
    there are none."""
    answers: dict[tuple[int, str], list[str]] = defaultdict(list)
    for each in episodes:
        if each.step >= since and each.texts is not None:
            answers[each.step, each.task_id].append(each.texts.answer)
    several = [len(set(given)) == 1 for given in answers.values() if len(given) > 1]
    return sum(several) / len(several) if several else math.nan


def _trailing(flags: Sequence[bool]) -> int:
    """Number of true values at the end."""
    return next((number for number, flag in enumerate(reversed(flags)) if not flag), len(flags))


def _ends(view: RunView) -> tuple[Steps, Steps] | None:
    """The first and the last TREND_STEPS steps; None while the run is shorter than MIN_STEPS."""
    before, after = view.start.head(TREND_STEPS), view.recent.last(TREND_STEPS)
    return (before, after) if after.span[1] - before.span[0] + 1 >= MIN_STEPS else None


def _last_known(steps: Steps, name: str) -> Steps:
    """The last TREND_STEPS steps, or else the last one that has the metric: steps without a signal have no entropy."""
    known = np.flatnonzero(np.isfinite(steps[name]))
    after = steps.last(TREND_STEPS)
    return steps.head(int(known[-1]) + 1).last(1) if known.size and known[-1] < len(steps) - len(after) else after


def _rewards(before: Steps, after: Steps) -> tuple[float, float]:
    """Return the smallest reward, and by how much the largest one is larger."""
    lowest = float(np.nanmin(np.concatenate([before[REWARD_MIN], after[REWARD_MIN], [math.inf]])))
    highest = float(np.nanmax(np.concatenate([before[REWARD_MAX], after[REWARD_MAX], [-math.inf]])))
    return lowest, highest - lowest


def _is_solved(before: Steps, after: Steps) -> bool:
    """True if nearly all tasks are solved, or, where no success is reported, nearly all of the reward is earned."""
    success = after.mean(SUCCESS)
    if math.isfinite(success):
        return success >= SOLVED
    lowest, width = _rewards(before, after)
    return width > 0 and after.mean(REWARD) - lowest >= SOLVED * width


def _rose(before: Steps, after: Steps, name: str) -> bool:
    """True if the mean of a metric rose by more than noise."""
    spread = math.sqrt((_variance(before, name) + _variance(after, name)) / TREND_STEPS)
    return after.mean(name) - before.mean(name) > STANDARD_ERRORS * spread


def _variance(steps: Steps, name: str) -> float:
    values = steps[name]
    known = values[np.isfinite(values)]
    return float(known.var(ddof=1)) if known.size > 1 else math.nan


def _both(before: Steps, after: Steps, name: str) -> tuple[Evidence, Evidence]:
    return (Evidence(name, before.mean(name), *before.span), Evidence(name, after.mean(name), *after.span))
