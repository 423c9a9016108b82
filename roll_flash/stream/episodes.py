"""Metadata of finished episodes: all that scheduling, stages and the learner's plan need to know of a trajectory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from roll_flash.monitor.episodes import hash_of_task
from roll_flash.types import ENDS_OF_THE_RUN, MAX_REWARD, Branch, FinishedEpisode, FinishedGroup, Group, Trajectory

NO_LOGPROB = -9999.0
"""Sentinel that vLLM returns for a log-probability that is NaN or minus infinity."""
MAX_REWARDS, MAX_REWARD_NAME = 32, 60
"""Most reward functions, and characters of their names, that the metadata of an episode has."""


def finished_episode(trajectory: Trajectory) -> FinishedEpisode:
    """Return the metadata of a trajectory, which its `data` is."""
    samples = trajectory.samples
    versions = np.concatenate([sample.versions[sample.policy_mask] for sample in samples])
    found, counts = np.unique(versions, return_counts=True)
    return FinishedEpisode(
        episode_id=trajectory.episode_id,
        group_id=trajectory.group_id,
        task=trajectory.task,
        reward=trajectory.reward,
        success=trajectory.success,
        started_s=trajectory.started_s,
        finished_s=trajectory.finished_s,
        prompt_length=trajectory.prompt_length,
        versions=tuple(zip(found.tolist(), counts.tolist(), strict=True)),
        policy_tokens=len(versions),
        tokens=sum(len(sample.token_ids) for sample in samples),
        packed_tokens=packed_tokens([sample.token_ids for sample in samples]),
        trained_tokens=sum(int(trained_mask(sample).sum()) for sample in samples),
        samples=len(samples),
        turns=sum(len(sample.turns) for sample in samples),
        own_turns=_own_turns(trajectory),
        fault=_fault(trajectory),
        cut=_was_cut(trajectory),
        ended_by_run=trajectory.end in ENDS_OF_THE_RUN,
        task_hash=hash_of_task(trajectory.task.env_id, trajectory.messages, len(trajectory.turns), trajectory.info),
        rewards=_rewards(trajectory.info.get("rewards")),
        roles=_roles(samples),
        data=trajectory,
    )


def finished_group(group: Group | FinishedGroup) -> FinishedGroup:
    """Return a group as the controller knows it."""
    if isinstance(group, FinishedGroup):
        return group
    trajectories = tuple(finished_episode(trajectory) for trajectory in group.trajectories)
    return FinishedGroup(group.group_id, group.task, trajectories, group.failures)


def trained_mask(sample: Trajectory | Branch) -> NDArray[np.bool_]:
    """Return the mask [T] of policy tokens that have a log-probability from the sampler. Without it there is no
    importance ratio: the sentinel value would give the largest weight of all."""
    mask: NDArray[np.bool_] = sample.policy_mask & (sample.logprobs > NO_LOGPROB)
    return mask


def packed_tokens(token_ids: Sequence[NDArray[np.int32]]) -> int:
    """Return the number of nodes of a prefix tree of these sequences."""
    # As big-endian bytes, sequences sort like lists of numbers: neighbours share the longest prefixes.
    in_order = sorted(token_ids, key=lambda ids: ids.astype(">u4").tobytes()) if len(token_ids) > 1 else token_ids
    total, before = 0, np.empty(0, np.int32)
    for ids in in_order:
        shorter = min(len(before), len(ids))
        different = np.flatnonzero(before[:shorter] != ids[:shorter])
        total += len(ids) - (int(different[0]) if different.size else shorter)
        before = ids
    return total


def _rewards(found: object) -> tuple[tuple[str, float], ...]:
    """Return the values of reward functions; of what an environment calls so, only finite numbers, and not many."""
    if not isinstance(found, Mapping):
        return ()
    numbers = ((str(name)[:MAX_REWARD_NAME], value) for name, value in islice(found.items(), MAX_REWARDS))
    # Compared, not converted: a whole number may be beyond the range of float.
    return tuple(
        (name, float(value))
        for name, value in numbers
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    )


def _roles(samples: Sequence[Trajectory | Branch]) -> tuple[tuple[str, float, int], ...]:
    if not samples[0].role:
        return ()
    paid: dict[str, float] = {}
    for sample in samples:
        paid[sample.role] = paid.get(sample.role, 0.0) + sum(turn.reward for turn in sample.turns)
    return tuple((sample.role, paid[sample.role], len(sample.turns)) for sample in samples)


def _fault(trajectory: Trajectory) -> str | None:
    for sample in trajectory.samples:
        if not sample.policy_mask.any():
            return "no_policy_tokens"
        if sample.policy_mask[0]:
            return "no_prompt"
        if not np.isfinite(sample.logprobs[sample.policy_mask]).all():
            return "logprobs_not_finite"
        if not trained_mask(sample).any():
            return "no_logprobs"
    rewards = (turn.reward for sample in trajectory.samples for turn in sample.turns)
    return next(filter(None, map(fault_of_reward, rewards)), None)


def _was_cut(trajectory: Trajectory) -> bool:
    own = trajectory.samples if trajectory.role else [trajectory]  # each role has a last turn
    return trajectory.end == "context_limit" or any(
        sample.turns[-1].finish_reason == "length" for sample in own if sample.turns
    )


def fault_of_reward(reward: float) -> str | None:
    """Return the reason why a trajectory with this reward cannot be trained on, or None."""
    if not isfinite(reward):
        return "reward_not_finite"
    return "reward_too_large" if abs(reward) > MAX_REWARD else None


def _own_turns(trajectory: Trajectory) -> tuple[tuple[int, float, int], ...]:
    """Turns begin in the task's shared prompt, which is state 0, or with the observation of the turn before."""
    states = [0, *(_hash(turn.observation) for turn in trajectory.turns[:-1])]
    lengths = [int(trajectory.policy_mask[turn.start : turn.end].sum()) for turn in trajectory.turns]
    return tuple(
        (length, turn.reward, state)
        for length, turn, state in zip(lengths, trajectory.turns, states, strict=False)  # one state without turns
    )


def _hash(observation: str) -> int:
    return int.from_bytes(blake2b(observation.encode("utf-8", "replace"), digest_size=8).digest())
