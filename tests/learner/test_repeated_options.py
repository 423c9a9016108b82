"""Steps that are repeated from what a run writes of them, its journal and episodes, have the same weights bit by bit,
also where advantages depend on more than rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from roll_flash.engines.learner import StepResult
from roll_flash.learner.ranks.fsdp import FsdpLearner
from roll_flash.monitor.episodes import episode_record, trajectory_of
from roll_flash.monitor.json_lines import encode
from roll_flash.rollout.recovery import RecordedStep, encode_teacher
from roll_flash.stream.episodes import finished_episode
from roll_flash.system.resume import _repeat
from roll_flash.types import FinishedEpisode, FinishedGroup, Group
from tests.learner.in_process import assert_equal_weights, in_process, weights_of
from tests.learner.samples import make_group
from tests.learner.test_critic import rewarded
from tests.learner.test_teacher_advantages import distill, scored

STEPS = [[rewarded(make_group(seed, prompt=16, turn=(1, 9)), seed) for seed in step] for step in ((0, 1), (2, 3))]
OPTIONS: dict[str, dict[str, Any]] = {
    "teacher": {"distill": distill(weight=0.5, reward_weight=1.0, discount=0.5), "minibatches": 2},
    "critic": {"advantage": "gae", "critic": {"level": "turn", "gae_lambda": 0.9}, "loss": {"second_moment": 0.05}},
    "turns": {"advantage": "gigpo", "overlong": {"max_tokens": 12, "buffer_tokens": 8}},
    "divergence": {
        "kl": {"coefficient": 0.1, "in_reward": True},
        "adaptive_entropy": {"target": 3.0},
        "proximal_decay": 0.6,
    },
}


def staged(group: Group) -> FinishedGroup:
    """The group as the learner gets it, after stages have changed the rewards."""
    row = scored(group)
    return replace(row, trajectories=tuple(replace(each, reward=each.reward + 0.1) for each in row.trajectories))


def read_again(group: Group) -> dict[str, FinishedEpisode]:
    """The episodes of a group as their log has them."""
    lines = {each.episode_id: encode(episode_record(each)).encode() for each in group.trajectories}
    return {name: finished_episode(trajectory_of(line, group.task)) for name, line in lines.items()}


def recorded(version: int, groups: list[FinishedGroup], metrics: Mapping[str, float]) -> RecordedStep:
    batches = [
        [(group.group_id, group.task, [(each.episode_id, each.reward) for each in group.trajectories])]
        for group in groups
    ]
    written = json.loads(json.dumps(encode_teacher([groups])))
    teacher = {name: np.frombuffer(msgspec.convert(text, bytes), "<f4") for name, text in written.items()}
    return RecordedStep(version, batches, dict(metrics), teacher)


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_repeated_steps_have_the_same_weights(tiny_model: Path, settings: dict[str, Any]) -> None:
    async def train(learner: FsdpLearner) -> tuple[Any, list[StepResult]]:
        results = []
        for groups in STEPS:
            for group in groups:
                await learner.accumulate([staged(group)])
            results.append(await learner.finish_step())
        return await weights_of(learner), results

    expected, results = in_process(tiny_model, train, **settings)
    said: list[str] = []

    async def again(learner: FsdpLearner) -> Any:
        for groups, result in zip(STEPS, results, strict=True):
            episodes = {name: each for group in groups for name, each in read_again(group).items()}
            step = recorded(result.version, [staged(group) for group in groups], result.metrics)
            await _repeat(learner, step, episodes, said.append)
        return await weights_of(learner)

    assert_equal_weights(in_process(tiny_model, again, **settings), expected)
    assert not said
