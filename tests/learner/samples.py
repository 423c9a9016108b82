"""Groups of made-up trajectories: shared prompts, several turns, unequal lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.rows import TrainSequence
from roll_flash.learner.packing.sequences import PreparedGroup, prepare_groups
from roll_flash.stream import finished_group
from roll_flash.stream.blocks import TokenArrays
from roll_flash.types import Group, Task, Trajectory, Turn

TASK = Task(task_id="task", env_id="Made-v0", seed=0)


def make_trajectory(
    token_ids: Sequence[int],
    policy_mask: Sequence[bool],
    *,
    reward: float,
    version: int = 0,
    logprobs: Sequence[float] | None = None,
    name: str = "episode",
) -> Trajectory:
    mask = np.asarray(policy_mask, np.bool_)
    values = np.zeros(len(mask), np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    return Trajectory(
        episode_id=name,
        group_id="group",
        task=TASK,
        token_ids=np.asarray(token_ids, np.int32),
        policy_mask=mask,
        logprobs=np.where(mask, values, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=_turns(mask),
        messages=(),
        reward=reward,
        success=None,
        end="terminated",
        prompt_length=int(np.argmax(mask)) if mask.any() else len(mask),
        started_s=0.0,
        finished_s=1.0,
    )


def make_group(
    seed: int = 0,
    *,
    replicas: int = 4,
    prompt: int = 12,
    turn: tuple[int, int] = (3, 8),
    vocabulary: int = 128,
    version: int = 0,
    rewards: Sequence[float] | None = None,
) -> Group:
    """Two-turn episodes on one random prompt; replicas differ from their first sampled token on, by chance later."""
    random = np.random.default_rng(seed)
    start = random.integers(2, vocabulary, prompt).tolist()
    trajectories = []
    for replica in range(replicas):
        first, observed, second = (int(n) for n in random.integers(*turn, 3))
        suffix = random.integers(2, vocabulary, first + observed + second).tolist()
        mask = [False] * prompt + [True] * first + [False] * observed + [True] * second
        trajectories.append(
            make_trajectory(
                start + suffix,
                mask,
                reward=float(random.random()) if rewards is None else rewards[replica],
                version=version,
                logprobs=-random.random(len(mask)) * 6,
                name=f"{seed}-{replica}",
            )
        )
    return Group(group_id=f"group-{seed}", task=TASK, trajectories=tuple(trajectories))


def replace_trajectory(group: Group, index: int, trajectory: Trajectory) -> Group:
    members = list(group.trajectories)
    members[index] = trajectory
    return dataclasses.replace(group, trajectories=tuple(members))


def prepare_group(group: Group, version: int, rules: AdvantageConfig) -> PreparedGroup:
    """What the driver plans for a group."""
    return prepare_groups([finished_group(group)], version, rules)[0]


def sequences_of(prepared: PreparedGroup) -> list[TrainSequence]:
    """What ranks make of it."""
    found = []
    for planned in prepared.planned:
        assert isinstance(planned.data, Trajectory)
        found += planned.sequences(TokenArrays.of(planned.data))
    return found


def _turns(mask: np.ndarray) -> tuple[Turn, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return tuple(Turn(int(start), int(end), "", "", 0.0, "stop", 0.0, 0.0) for start, end in edges.reshape(-1, 2))
