"""Turns groups of trajectories into training sequences: checks them, computes advantages, counts dropped ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll_flash.errors import LearnerError
from roll_flash.learner.losses.token_advantages import AdvantageConfig, token_advantages
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.types import MAX_REWARD, Branch, Group, Trajectory

NO_LOGPROB = -9999.0
"""Sentinel that vLLM returns for a log-probability that is NaN or minus infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """Training data of one group. `counts` are named counters of used and dropped items; they add up over groups.

    `policy_tokens` and `trajectories` count all valid ones. Policy tokens without a log-probability from the sampler
    are counted in `tokens_without_logprob` and not trained. A group whose replicas have equal rewards adds nothing to
    the gradient of a policy loss: its tokens count for the mean but are not computed.
    """

    group_id: str
    sequences: list[TrainSequence]
    policy_tokens: int
    trajectories: int
    counts: Counter[str]
    staleness: list[tuple[int, int]]
    """Pairs of (age in versions, number of policy tokens of that age)."""


def check_staleness(groups: Iterable[Group], version: int, async_ratio: float) -> None:
    """Raises LearnerError if a policy token is older than `version - async_ratio` or newer than `version`."""
    for group in groups:
        for trajectory in group.trajectories:
            for sample in trajectory.samples:
                _check_versions(trajectory.episode_id, sample.versions[sample.policy_mask], version, async_ratio)


def _check_versions(episode_id: str, versions: NDArray[np.int32], version: int, async_ratio: float) -> None:
    if versions.size == 0:
        return
    if versions.min() < version - async_ratio:
        raise LearnerError(
            f"trajectory {episode_id} holds a token of version {versions.min()}, older than "
            f"version {version} - async_ratio {async_ratio:g} allows; the scheduler must not hand it out"
        )
    if versions.max() > version:
        raise LearnerError(
            f"trajectory {episode_id} holds a token of version {versions.max()}, but the learner "
            f"is at version {version}; it belongs to another run"
        )


def prepare_groups(groups: Sequence[Group], version: int, rules: AdvantageConfig) -> list[PreparedGroup]:
    """Return the sequences of each group's valid trajectories, with advantages.

    `groups` must be the whole step if `rules.needs_whole_batch`.
    """
    sorted_out = [_sort_out(group) for group in groups]
    advantages = token_advantages([valid for valid, _ in sorted_out], rules)
    return [
        _prepare(group.group_id, valid, counts, values, version, rules)
        for group, (valid, counts), values in zip(groups, sorted_out, advantages, strict=True)
    ]


def prepare_group(group: Group, version: int, rules: AdvantageConfig) -> PreparedGroup:
    """Like `prepare_groups`, for one group."""
    return prepare_groups([group], version, rules)[0]


def _sort_out(group: Group) -> tuple[list[Trajectory], Counter[str]]:
    counts: Counter[str] = Counter(groups=1, trajectories=len(group.trajectories))
    valid: list[Trajectory] = []
    for trajectory in group.trajectories:
        fault = invalid_reason(trajectory)
        if fault is None:
            valid.append(trajectory)
        else:
            counts[f"dropped_{fault}"] += 1
    return valid, counts


def _prepare(
    group_id: str,
    valid: list[Trajectory],
    counts: Counter[str],
    advantages: list[NDArray[np.float32]],
    version: int,
    rules: AdvantageConfig,
) -> PreparedGroup:
    staleness: Counter[int] = Counter()
    for sample in (sample for trajectory in valid for sample in trajectory.samples):
        ages, numbers = np.unique(version - sample.versions[sample.policy_mask], return_counts=True)
        staleness.update(dict(zip(ages.tolist(), numbers.tolist(), strict=True)))
    silent = not any(a[t.policy_mask].any() for t, a in zip(valid, advantages, strict=True))
    if valid and silent:
        counts["groups_without_signal"] += 1
    computed = not silent or rules.keep_without_signal
    sequences = [
        sequence
        for trajectory, values in zip(valid, advantages, strict=True)
        if computed
        for sequence in _sequences(trajectory, values, rules.normalization)
    ]
    policy_tokens = sum(trained_tokens(t) for t in valid)
    without_logprob = sum(t.policy_tokens for t in valid) - policy_tokens
    if without_logprob:
        counts["tokens_without_logprob"] += without_logprob
    return PreparedGroup(group_id, sequences, policy_tokens, len(valid), counts, sorted(staleness.items()))


def prepare_demonstrations(trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
    """Return sequences for supervised training on their policy tokens; log-probabilities and rewards are ignored.

    Raises LearnerError for a demonstration without policy tokens.
    """
    for trajectory in trajectories:
        if not trajectory.policy_mask.any() or trajectory.policy_mask[0]:
            raise LearnerError(
                f"demonstration {trajectory.episode_id} has no policy tokens after a prompt: nothing to imitate"
            )
    return [_sequence(t, t.policy_mask, np.ones(len(t.token_ids), np.float32), 1.0) for t in trajectories]


def text_sequence(token_ids: Sequence[int]) -> TrainSequence:
    """Return a sequence that predicts every token but the first. Raises LearnerError for fewer than two tokens."""
    tokens = np.asarray(token_ids, np.int32)
    if tokens.ndim != 1 or tokens.size < 2:
        raise LearnerError(f"log-probabilities need at least two token ids, not {tokens.size}")
    zeros = np.zeros(tokens.size, np.float32)
    return TrainSequence(tokens, np.arange(tokens.size) > 0, zeros, np.zeros(tokens.size, np.int32), zeros)


def invalid_reason(trajectory: Trajectory) -> str | None:
    """Return the reason why a trajectory cannot be trained on, or None."""
    for sample in trajectory.samples:
        if not sample.policy_mask.any():
            return "no_policy_tokens"
        if sample.policy_mask[0]:
            return "no_prompt"
        if not np.isfinite(sample.logprobs[sample.policy_mask]).all():
            return "logprobs_not_finite"
        if not _trained_mask(sample).any():
            return "no_logprobs"
    rewards = np.abs([trajectory.reward, *(turn.reward for turn in trajectory.turns)])
    if not np.isfinite(rewards).all():
        return "reward_not_finite"
    return "reward_too_large" if rewards.max() > MAX_REWARD else None


def trained_tokens(trajectory: Trajectory) -> int:
    """Return the number of policy tokens with a log-probability, over all samples of the trajectory."""
    return sum(int(_trained_mask(sample).sum()) for sample in trajectory.samples)


def _trained_mask(sample: Trajectory | Branch) -> NDArray[np.bool_]:
    """Return the mask [T] of policy tokens that have a log-probability from the sampler. Without it there is no
    importance ratio: the sentinel value would give the largest weight of all."""
    mask: NDArray[np.bool_] = sample.policy_mask & (sample.logprobs > NO_LOGPROB)
    return mask


def _sequences(trajectory: Trajectory, advantages: NDArray[np.float32], normalization: str) -> list[TrainSequence]:
    """Return one sequence per sample. Branches get the advantage of the episode's last turn; with `sequences`
    normalization, all samples of an episode together weigh 1."""
    weight = 1.0 / trained_tokens(trajectory) if normalization == "sequences" else 1.0
    rows = [_sequence(trajectory, _trained_mask(trajectory), advantages, weight)]
    if trajectory.branches:
        value = advantages[np.flatnonzero(trajectory.policy_mask)[-1]]
        rows += [
            _sequence(branch, _trained_mask(branch), np.full(len(branch.token_ids), value, np.float32), weight)
            for branch in trajectory.branches
        ]
    return rows


def _sequence(
    sample: Trajectory | Branch, mask: NDArray[np.bool_], advantages: NDArray[np.float32], token_weight: float
) -> TrainSequence:
    return TrainSequence(
        token_ids=sample.token_ids,
        policy_mask=mask,
        behavior_logprobs=sample.logprobs.astype(np.float32),
        versions=sample.versions,
        advantages=advantages,
        token_weight=token_weight,
    )


def split_minibatches(
    groups: Mapping[str, Sequence[TrainSequence]], count: int, seed: Sequence[int]
) -> list[list[TrainSequence]]:
    """Split groups into `count` parts of similar policy-token counts; groups stay whole to compute their prompt once.

    In an order drawn from `seed` and the group ids, each group goes to the part with the fewest tokens so far: the
    arrival order of groups has no effect. Parts may be empty if there are fewer groups than parts.
    """
    names = sorted(groups)
    np.random.default_rng(list(seed)).shuffle(names)
    parts: list[list[TrainSequence]] = [[] for _ in range(count)]
    tokens = [0] * count
    for name in names:
        part = tokens.index(min(tokens))
        parts[part].extend(groups[name])
        tokens[part] += sum(int(sequence.policy_mask.sum()) for sequence in groups[name])
    return parts
