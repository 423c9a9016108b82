"""Trajectories as rows of the stream, and back.

The arrays are columns of their own; of an episode with branches they hold all its samples, one after another.
Everything else of a trajectory (task, turns, messages, info) is JSON in the uint8 column `record`. What JSON cannot say
comes back as its nearest: tuples in `info` and `kwargs` as lists, numpy numbers and arrays as plain ones, other objects
as their text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.stream.rows import Array, Row
from roll_flash.types import Branch, Group, Task, Trajectory, Turn

TOKEN_COLUMNS = ("token_ids", "policy_mask", "logprobs", "versions")
REWARD, ENV_REWARD = "reward", "env_reward"
"""What is trained, and what the environment gave: two columns where stages make the one of the other."""
TRAJECTORY_COLUMNS = (*TOKEN_COLUMNS, REWARD, "record")
"""All that a trajectory is made of: what a consumer names to get whole trajectories."""


def group_rows(
    group: Group, *, partition: int = 0, without: Collection[str] = (), reward_column: str = REWARD
) -> list[Row]:
    """A group's trajectories as rows of one complete group.

    `without` leaves out columns that a stage will write, such as `reward`; `reward_column` is where the trajectory's
    own goes. A row costs the tokens that packing adds for
    it: what replicas share is counted once (`packed_costs`).
    """
    samples = [sample.token_ids for trajectory in group.trajectories for sample in trajectory.samples]
    sample_costs = iter(packed_costs(samples))
    costs = [sum(next(sample_costs) for _ in trajectory.samples) for trajectory in group.trajectories]
    return [
        trajectory_row(
            trajectory,
            cost,
            partition=partition,
            group_size=len(group.trajectories),
            without=without,
            reward_column=reward_column,
        )
        for trajectory, cost in zip(group.trajectories, costs, strict=True)
    ]


def trajectory_row(
    trajectory: Trajectory,
    tokens: int | None = None,
    *,
    partition: int = 0,
    group_size: int | None = None,
    without: Collection[str] = (),
    reward_column: str = REWARD,
) -> Row:
    """One trajectory, for those that go into the stream as soon as they end. `tokens` defaults to its length."""
    columns: dict[str, Array] = {name: _all_samples(trajectory, name) for name in TOKEN_COLUMNS}
    columns[reward_column] = np.array(trajectory.reward, np.float64)
    columns["record"] = np.frombuffer(json.dumps(_record(trajectory), default=_plain).encode(), np.uint8)
    return Row(
        {name: array for name, array in columns.items() if name not in without},
        tokens=len(columns["token_ids"]) if tokens is None else tokens,
        group=trajectory.group_id,
        group_size=group_size,
        partition=partition,
    )


def row_trajectory(columns: Mapping[str, Array]) -> Trajectory:
    """The trajectory of a row that has all TRAJECTORY_COLUMNS."""
    record: dict[str, Any] = json.loads(columns["record"].tobytes())
    record["task"] = Task(**record["task"])
    record["turns"] = tuple(Turn(*turn) for turn in record["turns"])
    record["messages"] = tuple(record["messages"])
    record["reward"] = float(columns[REWARD])
    own, end = record.pop("tokens"), 0
    spans = [slice(end, end := end + length) for length in [own, *(b["tokens"] for b in record["branches"])]]
    arrays: list[dict[str, Any]] = [{name: columns[name][span] for name in TOKEN_COLUMNS} for span in spans]
    record["branches"] = tuple(
        _branch(branch, tokens) for branch, tokens in zip(record["branches"], arrays[1:], strict=True)
    )
    return Trajectory(**record, **arrays[0])


def _branch(record: Mapping[str, Any], arrays: Mapping[str, Array]) -> Branch:
    turns = tuple(Turn(*turn) for turn in record["turns"])
    return Branch(turns=turns, messages=tuple(record["messages"]), prompt_length=record["prompt_length"], **arrays)


def _all_samples(trajectory: Trajectory, name: str) -> Array:
    if not trajectory.branches:
        own: Array = getattr(trajectory, name)
        return own
    return np.concatenate([getattr(sample, name) for sample in trajectory.samples])


def packed_costs(token_ids: Sequence[NDArray[np.int32]]) -> list[int]:
    """Tokens that each sequence adds to a prefix tree of all; the sum is the tree's size (`learner/packing.py`)."""
    # As big-endian bytes, sequences sort like lists of numbers: neighbours share the longest prefixes.
    keys = [ids.astype(">u4").tobytes() for ids in token_ids]
    costs = [0] * len(token_ids)
    before = np.empty(0, np.int32)
    for index in sorted(range(len(token_ids)), key=keys.__getitem__):
        ids = token_ids[index]
        shorter = min(len(before), len(ids))
        different = np.flatnonzero(before[:shorter] != ids[:shorter])
        costs[index] = len(ids) - (int(different[0]) if different.size else shorter)
        before = ids
    return costs


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "task": trajectory.task.to_dict(),
        "turns": [list(asdict(turn).values()) for turn in trajectory.turns],
        "messages": list(trajectory.messages),
        "success": trajectory.success,
        "end": trajectory.end,
        "prompt_length": trajectory.prompt_length,
        "started_s": trajectory.started_s,
        "finished_s": trajectory.finished_s,
        "info": dict(trajectory.info),
        "tokens": len(trajectory.token_ids),
        "branches": [_branch_record(branch) for branch in trajectory.branches],
    }


def _branch_record(branch: Branch) -> dict[str, Any]:
    return {
        "tokens": len(branch.token_ids),
        "turns": [list(asdict(turn).values()) for turn in branch.turns],
        "messages": list(branch.messages),
        "prompt_length": branch.prompt_length,
    }


def _plain(value: object) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)
