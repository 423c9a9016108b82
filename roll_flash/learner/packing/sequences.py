"""Turns groups of trajectories into sequences to train on: checks, advantages, and what is left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll_flash.errors import LearnerError
from roll_flash.learner.losses.token_advantages import CreditRules, token_advantages
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.types import MOST_REWARD, Branch, Group, Trajectory

NO_LOGPROB = -9999.0
"""What vLLM says for a log-probability that is nan or minus infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a group gives. `counts`: named numbers of things trained and left out; they add up over groups.

    `policy_tokens` and `trajectories` count all valid ones; policy tokens for which the sampler gave no log-probability
    are counted apart (`tokens_without_logprob`) and not trained. Those of groups whose replicas earned the same add
    nothing to the gradient of a policy loss, so they are counted into its mean and not computed.
    """

    group_id: str
    sequences: list[TrainSequence]
    policy_tokens: int
    trajectories: int
    counts: Counter[str]
    staleness: list[tuple[int, int]]
    """(age in versions, policy tokens of that age)."""


def check_staleness(groups: Iterable[Group], version: int, async_ratio: float) -> None:
    """Raises LearnerError when a policy token is older than `version - async_ratio`, or from the future."""
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


def prepare_groups(groups: Sequence[Group], version: int, rules: CreditRules) -> list[Prepared]:
    """Sequences of each group's valid trajectories with their advantages.

    Where the rules compare trajectories over a whole step, `groups` must be all of it.
    """
    sorted_out = [_sort_out(group) for group in groups]
    advantages = token_advantages([valid for valid, _ in sorted_out], rules)
    return [
        _prepare(group.group_id, valid, counts, values, version, rules)
        for group, (valid, counts), values in zip(groups, sorted_out, advantages, strict=True)
    ]


def prepare_group(group: Group, version: int, rules: CreditRules) -> Prepared:
    """`prepare_groups` for one."""
    return prepare_groups([group], version, rules)[0]


def _sort_out(group: Group) -> tuple[list[Trajectory], Counter[str]]:
    counts: Counter[str] = Counter(groups=1, trajectories=len(group.trajectories))
    valid: list[Trajectory] = []
    for trajectory in group.trajectories:
        fault = find_fault(trajectory)
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
    rules: CreditRules,
) -> Prepared:
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
    return Prepared(group_id, sequences, policy_tokens, len(valid), counts, sorted(staleness.items()))


def prepare_demonstrations(trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
    """Sequences to imitate on their policy tokens. Log-probabilities and rewards are not read.

    Raises LearnerError for a demonstration without policy tokens.
    """
    for trajectory in trajectories:
        if not trajectory.policy_mask.any() or trajectory.policy_mask[0]:
            raise LearnerError(
                f"demonstration {trajectory.episode_id} has no policy tokens after a prompt: nothing to imitate"
            )
    return [_sequence(t, t.policy_mask, np.ones(len(t.token_ids), np.float32), 1.0) for t in trajectories]


def text_sequence(token_ids: Sequence[int]) -> TrainSequence:
    """A text of which every token but the first is predicted. Raises LearnerError if that is none."""
    tokens = np.asarray(token_ids, np.int32)
    if tokens.ndim != 1 or tokens.size < 2:
        raise LearnerError(f"log-probabilities need at least two token ids, not {tokens.size}")
    zeros = np.zeros(tokens.size, np.float32)
    return TrainSequence(tokens, np.arange(tokens.size) > 0, zeros, np.zeros(tokens.size, np.int32), zeros)


def find_fault(trajectory: Trajectory) -> str | None:
    """Why a trajectory cannot be trained on, or None."""
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
    return "reward_too_large" if rewards.max() > MOST_REWARD else None


def trained_tokens(trajectory: Trajectory) -> int:
    """Policy tokens of all its samples that have a log-probability."""
    return sum(int(_trained_mask(sample).sum()) for sample in trajectory.samples)


def _trained_mask(sample: Trajectory | Branch) -> NDArray[np.bool_]:
    """[T]: policy tokens of which the sampler said how likely they were. Without that there is no ratio to correct by:
    taken at its word, the sentinel would have the largest weight of all."""
    mask: NDArray[np.bool_] = sample.policy_mask & (sample.logprobs > NO_LOGPROB)
    return mask


def _sequences(trajectory: Trajectory, advantages: NDArray[np.float32], normalization: str) -> list[TrainSequence]:
    """A row for each sample. Those of branches have the advantage of the episode's last turn, and an episode weighs as
    one however many samples it has."""
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
    """`count` parts of about as many policy tokens each, groups whole (replicas share a prompt that is computed once).

    In an order drawn from `seed` and the group ids, each group goes to the part with the fewest tokens so far: the
    order in which groups came in does not show. Parts may be empty where there are fewer groups than parts.
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
