"""Plans the training of finished episodes from their metadata, and makes training sequences of their arrays.

The driver checks, computes advantages, counts what is dropped, and decides which rank trains which trajectory; it has
no arrays. The ranks make sequences of the arrays that they fetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from roll_flash.errors import LearnerError
from roll_flash.learner.losses.advantages import discounted_returns
from roll_flash.learner.losses.token_advantages import AdvantageConfig, turn_advantages
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.stream.blocks import EXPERTS, TokenArrays
from roll_flash.stream.episodes import NO_LOGPROB, fault_of_reward
from roll_flash.types import FinishedEpisode, FinishedGroup, StoredTrajectory, Trajectory

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PlannedTrajectory:
    """What a rank needs to train on a trajectory. Not to be changed; not frozen, as frozen ones take long to pickle."""

    group_id: str
    data: Trajectory | StoredTrajectory | None
    advantages: tuple[float, ...]
    """One for all tokens, one for each turn of the first sample, or with roles one for each sample."""
    token_weight: float
    trained_tokens: int
    packed_tokens: int
    prompt_length: int
    episode_id: str = ""
    rewards: tuple[float, ...] = ()
    """With a critic: reward of each turn of the first sample; the last one has what stages added to the episode's."""
    teacher_terms: NDArray[np.float64] | None = None
    """What a teacher adds to the advantages of the policy tokens of all samples, not discounted; None without one."""
    teacher_discount: float = 0.0
    role_rewards: tuple[float, ...] = ()
    """Reward of the role of each sample; empty without roles."""

    def sequences(self, arrays: TokenArrays, *, by_turn: bool = False) -> list[TrainSequence]:
        """Return one sequence per sample. Branches get the advantage of the first sample's last policy token, or that
        of their role; with a critic, the reward of the whole episode, or of their role, at their end. `by_turn`: see
        `value_places`."""
        first, *branches = samples = arrays.samples()
        if self.role_rewards and len(self.advantages) > 1:
            pairs = zip(samples, self.advantages, strict=True)
            advantages = [np.full(len(each["token_ids"]), value, np.float32) for each, value in pairs]
        else:
            advantages = [self._spread(len(first["token_ids"]), arrays.turn_spans)]
            for each in branches:
                value = advantages[0][np.flatnonzero(first["policy_mask"])[-1]]
                advantages.append(np.full(len(each["token_ids"]), value, np.float32))
        if self.teacher_terms is not None:
            masks = [sample["policy_mask"] for sample in samples]
            terms = np.split(self.teacher_terms, np.cumsum([mask.sum() for mask in masks])[:-1])
            advantages = [self._with_teacher(*each) for each in zip(advantages, masks, terms, strict=True)]
        found = [self._sequence(*each) for each in zip(samples, advantages, strict=True)]
        found = [replace(each, name=(self.episode_id, sample)) for sample, each in enumerate(found)]
        if not self.rewards:
            return found
        ends = [[end for _, end in arrays.turn_spans], *([len(each["token_ids"])] for each in branches)]
        of_branches = self.role_rewards[1:] or [sum(self.rewards)] * len(branches)
        rewards = [self.rewards, *((reward,) for reward in of_branches)]
        return [
            replace(
                each,
                rewards=_placed(each.policy_mask, its_ends, its_rewards),
                value_places=_value_places(each.policy_mask, sample["policy_mask"], by_turn=by_turn),
            )
            for each, sample, its_ends, its_rewards in zip(found, samples, ends, rewards, strict=True)
        ]

    def _with_teacher(
        self, advantages: NDArray[np.float32], mask: NDArray[np.bool_], terms: NDArray[np.float64]
    ) -> NDArray[np.float32]:
        """Add the teacher's terms [policy tokens] of a sample to its advantages [T]."""
        values = advantages.astype(np.float64)
        values[mask] += discounted_returns(terms, self.teacher_discount) if self.teacher_discount else terms
        return values.astype(np.float32)

    def _spread(self, length: int, turn_spans: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
        if len(self.advantages) == 1:
            return np.full(length, self.advantages[0], np.float32)
        spread = np.zeros(length, np.float32)
        for (start, end), value in zip(turn_spans, self.advantages, strict=True):
            spread[start:end] = value
        return spread

    def _sequence(self, sample: Mapping[str, Any], advantages: NDArray[np.float32]) -> TrainSequence:
        mask = sample["policy_mask"] & (sample["logprobs"] > NO_LOGPROB)
        return _sequence(sample, mask, advantages, self.token_weight)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedGroup:
    """Plan for one group. `counts` are named counters of used and dropped items; they add up over groups.

    `policy_tokens` and `num_valid` count all valid trajectories. Policy tokens without a log-probability from the
    sampler are counted in `tokens_without_logprob` and not trained. A group whose replicas have equal rewards adds
    nothing to the gradient of a policy loss: its tokens count for the mean but are not computed. With
    `filter_overlong`, trajectories that were cut count for nothing but the advantages of the others.
    """

    group_id: str
    planned: list[PlannedTrajectory]
    policy_tokens: int
    num_valid: int
    counts: Counter[str]
    staleness: list[tuple[int, int]]
    """Pairs of (age in versions, number of policy tokens of that age)."""


def check_staleness(groups: Iterable[FinishedGroup], version: int, async_ratio: float) -> None:
    """Raises LearnerError if a policy token is older than `version - async_ratio` or newer than `version`."""
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories if trajectory.versions):
        oldest, newest = trajectory.versions[0][0], trajectory.versions[-1][0]
        if oldest < version - async_ratio:
            raise LearnerError(
                f"trajectory {trajectory.episode_id} holds a token of version {oldest}, older than "
                f"version {version} - async_ratio {async_ratio:g} allows; the scheduler must not hand it out"
            )
        if newest > version:
            raise LearnerError(
                f"trajectory {trajectory.episode_id} holds a token of version {newest}, but the learner "
                f"is at version {version}; it belongs to another run"
            )


def prepare_groups(groups: Sequence[FinishedGroup], version: int, rules: AdvantageConfig) -> list[PreparedGroup]:
    """Return the plan of each group's valid trajectories, with advantages.

    `groups` must be the whole step if `rules.needs_whole_batch`.
    """
    sorted_out = [_sort_out(group) for group in groups]
    advantages = turn_advantages([valid for valid, _ in sorted_out], rules)
    return [
        _prepare(group.group_id, valid, counts, values, version, rules)
        for group, (valid, counts), values in zip(groups, sorted_out, advantages, strict=True)
    ]


def _sort_out(group: FinishedGroup) -> tuple[list[FinishedEpisode], Counter[str]]:
    counts: Counter[str] = Counter(groups=1, trajectories=len(group.trajectories), groups_without_signal=0)
    valid: list[FinishedEpisode] = []
    for trajectory in group.trajectories:
        fault = invalid_reason(trajectory)
        if fault is None:
            valid.append(trajectory)
        else:
            counts[f"dropped_{fault}"] += 1
    return valid, counts


def invalid_reason(trajectory: FinishedEpisode) -> str | None:
    """Return the reason why a trajectory cannot be trained on, or None."""
    return trajectory.fault or fault_of_reward(trajectory.reward)


def _prepare(
    group_id: str,
    valid: list[FinishedEpisode],
    counts: Counter[str],
    advantages: list[tuple[float, ...]],
    version: int,
    rules: AdvantageConfig,
) -> PreparedGroup:
    if rules.filter_overlong:
        kept = [place for place, trajectory in enumerate(valid) if not trajectory.cut]
        counts["overlong_filtered"] += len(valid) - len(kept)
        valid, advantages = [valid[place] for place in kept], [advantages[place] for place in kept]
    staleness: Counter[int] = Counter()
    for trajectory in valid:
        for sampled, tokens in trajectory.versions:
            staleness[version - sampled] += tokens
    distill = rules.distill
    if distill is not None:
        advantages = [tuple(distill.reward_weight * value for value in values) for values in advantages]
    pairs = zip(valid, advantages, strict=True)
    has_advantage = any(_has_advantage(one, values) for one, values in pairs)
    silent = distill is None and not rules.has_critic and not has_advantage
    if valid and silent:
        counts["groups_without_signal"] += 1
    computed = not silent or rules.keep_without_signal
    planned = [
        PlannedTrajectory(
            group_id=group_id,
            data=_arrays_only(trajectory.data),
            advantages=values,
            token_weight=_token_weight(trajectory, rules),
            trained_tokens=trajectory.trained_tokens,
            packed_tokens=trajectory.packed_tokens,
            prompt_length=trajectory.prompt_length,
            episode_id=trajectory.episode_id,
            rewards=_turn_rewards(trajectory) if rules.has_critic else (),
            teacher_terms=None if distill is None else _teacher_terms(trajectory, distill.weight),
            teacher_discount=0.0 if distill is None else distill.discount,
            role_rewards=tuple(trajectory.role_rewards[role] for role, *_ in trajectory.roles),
        )
        for trajectory, values in zip(valid, advantages, strict=True)
        if computed
    ]
    policy_tokens = sum(trajectory.trained_tokens for trajectory in valid)
    without_logprob = sum(trajectory.policy_tokens for trajectory in valid) - policy_tokens
    if without_logprob:
        counts["tokens_without_logprob"] += without_logprob
    return PreparedGroup(group_id, planned, policy_tokens, len(valid), counts, sorted(staleness.items()))


def _token_weight(trajectory: FinishedEpisode, rules: AdvantageConfig) -> float:
    match rules.normalization:
        case "tokens":
            return 1.0
        case "sequences":
            return 1.0 / trajectory.trained_tokens
        case "constant":
            assert rules.loss_length is not None, "the config checks it"
            return 1.0 / rules.loss_length


def _turn_rewards(trajectory: FinishedEpisode) -> tuple[float, ...]:
    """Return the reward of each turn of the first sample. They add up to the reward of the episode, which stages may
    have changed: the last turn gets the difference."""
    rewards = [reward for _, reward, _ in trajectory.own_turns[:-1]]
    return (*rewards, trajectory.reward - sum(rewards))


def _placed(mask: NDArray[np.bool_], ends: Sequence[int], rewards: Sequence[float]) -> NDArray[np.float64]:
    """Return rewards [T], each at the last trained token up to the end of its turn. One that came before the first
    trained token, in turns from a recording, is nothing that the policy earned: it is left out."""
    placed, trained, reached = np.zeros(len(mask)), np.flatnonzero(mask), 0
    for end, reward in zip(ends, rewards, strict=True):
        reached = max(reached, end)  # a turn whose tokens are in another sample has the span 0:0
        before = int(np.searchsorted(trained, reached))
        if before:
            placed[trained[before - 1]] += reward
    return placed


def _value_places(mask: NDArray[np.bool_], sampled: NDArray[np.bool_], *, by_turn: bool) -> NDArray[np.int64]:
    """Return for each trained token (`mask`) the place of the one before which its value is read: its own place, or
    `by_turn` that of the first trained token of its turn, which is a run of `sampled` tokens."""
    places = np.arange(len(mask))
    if by_turn:
        trained = np.flatnonzero(mask)
        turns = np.cumsum(np.diff(sampled.astype(np.int8), prepend=0) == 1)[trained]
        _, first, which = np.unique(turns, return_index=True, return_inverse=True)
        places[trained] = trained[first][which]
    return places


def _teacher_terms(trajectory: FinishedEpisode, weight: float) -> NDArray[np.float64]:
    """Return weight * (log pi_teacher - log mu) of each policy token. Raises LearnerError if one is missing."""
    found = np.empty(0) if trajectory.teacher_log_ratios is None else trajectory.teacher_log_ratios
    if len(found) != trajectory.policy_tokens:
        raise LearnerError(
            f"trajectory {trajectory.episode_id} has log-probabilities of a teacher for {len(found)} of its "
            f"{trajectory.policy_tokens} policy tokens; was it trained before distill was set?"
        )
    return weight * found.astype(np.float64)


def _arrays_only(data: Trajectory | StoredTrajectory | None) -> Trajectory | StoredTrajectory | None:
    """Without the references that a rank does not need: each costs the driver time to send."""
    return StoredTrajectory(data.index, data.tokens) if isinstance(data, StoredTrajectory) else data


def _has_advantage(trajectory: FinishedEpisode, advantages: tuple[float, ...]) -> bool:
    """True if a policy token has an advantage that is not 0 as float32."""
    if len(advantages) == 1 or trajectory.roles:
        return any(map(np.float32, advantages))
    turns = zip(trajectory.own_turns, advantages, strict=True)
    return any(tokens and np.float32(value) for (tokens, _, _), value in turns)


def prepare_demonstrations(trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
    """Return sequences for supervised training on their policy tokens; log-probabilities and rewards are ignored.

    Raises LearnerError for a demonstration without policy tokens.
    """
    for trajectory in trajectories:
        if not trajectory.policy_mask.any() or trajectory.policy_mask[0]:
            raise LearnerError(
                f"demonstration {trajectory.episode_id} has no policy tokens after a prompt: nothing to imitate"
            )
    arrays = [TokenArrays.of(trajectory).samples()[0] for trajectory in trajectories]
    return [_sequence(each, each["policy_mask"], np.ones(len(each["token_ids"]), np.float32), 1.0) for each in arrays]


def text_sequence(token_ids: Sequence[int]) -> TrainSequence:
    """Return a sequence that predicts every token but the first. Raises LearnerError for fewer than two tokens."""
    tokens = np.asarray(token_ids, np.int32)
    if tokens.ndim != 1 or tokens.size < 2:
        raise LearnerError(f"log-probabilities need at least two token ids, not {tokens.size}")
    zeros = np.zeros(tokens.size, np.float32)
    return TrainSequence(tokens, np.arange(tokens.size) > 0, zeros, np.zeros(tokens.size, np.int32), zeros)


def _sequence(
    sample: Mapping[str, Any], mask: NDArray[np.bool_], advantages: NDArray[np.float32], token_weight: float
) -> TrainSequence:
    return TrainSequence(
        token_ids=sample["token_ids"],
        policy_mask=mask,
        behavior_logprobs=sample["logprobs"].astype(np.float32),
        versions=sample["versions"],
        advantages=advantages,
        token_weight=token_weight,
        routed_experts=sample.get(EXPERTS),
    )


def split_minibatches(groups: Mapping[str, int], count: int, seed: Sequence[int]) -> list[list[str]]:
    """Split groups, given with their policy tokens, into `count` parts of similar numbers of tokens.

    In an order drawn from `seed` and the group ids, each group goes to the part with the fewest tokens so far: the
    arrival order of groups has no effect. Parts may be empty if there are fewer groups than parts.
    """
    names = sorted(groups)
    np.random.default_rng(list(seed)).shuffle(names)
    parts: list[list[str]] = [[] for _ in range(count)]
    tokens = [0] * count
    for name in names:
        part = tokens.index(min(tokens))
        parts[part].append(name)
        tokens[part] += groups[name]
    return parts


def row_parts(planned: Iterable[PlannedTrajectory], row_tokens: int) -> list[tuple[int, list[PlannedTrajectory]]]:
    """Return parts of groups that fit into a row, as far as the controller knows, each with its packed size.

    The common prompt of a part is counted once. A trajectory that is longer than `row_tokens` is a part of its own.
    """
    parts: list[tuple[int, list[PlannedTrajectory]]] = []
    for each in planned:
        if parts and parts[-1][1][-1].group_id == each.group_id:
            tokens, members = parts[-1]
            more = tokens + each.packed_tokens - min(each.prompt_length, members[-1].prompt_length)
            if more <= row_tokens:
                members.append(each)
                parts[-1] = (more, members)
                continue
        parts.append((each.packed_tokens, [each]))
    return parts


def share_out(parts: Iterable[tuple[int, Sequence[T]]], ranks: int) -> list[list[T]]:
    """Distribute parts, given with their size, over ranks: largest first, each to the rank with the least so far."""
    shares: list[list[T]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for size, members in sorted(parts, key=lambda part: -part[0]):
        rank = sizes.index(min(sizes))
        shares[rank].extend(members)
        sizes[rank] += size
    return shares
