"""Self-play: what the samples of several roles are trained with, against float64 written down by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_flash.config.sections.learner import LearnerConfig, OverlongConfig
from roll_flash.errors import LearnerError
from roll_flash.learner.losses.advantages import EPSILON
from roll_flash.learner.losses.shaping import shape_rewards
from roll_flash.learner.losses.token_advantages import AdvantageConfig
from roll_flash.learner.packing.sequences import prepare_groups
from roll_flash.monitor.episodes import episode_record, trajectory_of
from roll_flash.monitor.json_lines import encode, with_checksum
from roll_flash.monitor.step_record import StepRecord
from roll_flash.stream import finished_episode, finished_group
from roll_flash.stream.blocks import TokenArrays
from roll_flash.types import Branch, FinishedGroup, Group, Trajectory
from tests.learner.in_process import assert_same_weights
from tests.learner.samples import make_group
from tests.learner.test_steps import trained

ROLES = ("attacker", "defender")


def paid(sample: Any, role: str, reward: float) -> dict[str, Any]:
    """The fields of a sample of a role, whose last turn has its reward."""
    return {"role": role, "turns": (*sample.turns[:-1], replace(sample.turns[-1], reward=reward))}


def duel(seed: int, rewards: Sequence[tuple[float, ...]], prompt: int = 10) -> Group:
    """A group of games; `rewards` has those of both roles, or only of the first if the other never spoke."""
    group, others = (make_group(number, prompt=prompt, replicas=len(rewards)) for number in (seed, seed + 100))
    games = []
    for own, other, earned in zip(group.trajectories, others.trajectories, rewards, strict=True):
        branch = Branch(other.token_ids, other.policy_mask, other.logprobs, other.versions, (), (), prompt)
        branches = [replace(branch, **paid(other, ROLES[1], earned[1]))] if len(earned) > 1 else []
        game = replace(own, **paid(own, ROLES[0], earned[0]), reward=earned[0], branches=tuple(branches))
        games.append(game)
    return replace(group, trajectories=tuple(games))


def values_of(groups: Sequence[Group | FinishedGroup], **learner: Any) -> list[list[float]]:
    """The advantage of each sample of each trajectory, group after group, as ranks make them."""
    prepared = prepare_groups(
        [finished_group(group) for group in groups], 0, AdvantageConfig.of(LearnerConfig(**learner))
    )
    found = []
    for planned in (planned for group in prepared for planned in group.planned):
        assert isinstance(planned.data, Trajectory)
        sequences = planned.sequences(TokenArrays.of(planned.data))
        assert all(np.ptp(sequence.advantages[sequence.policy_mask]) == 0 for sequence in sequences)
        found.append([float(sequence.advantages[sequence.policy_mask][0]) for sequence in sequences])
    return found


WON_TWICE = [(1.0, -1.0), (1.0, -3.0), (-1.0, 1.0), (1.0, 1.0)]
"""Attackers earn 0.5 on average, with a deviation of sqrt(3)/2; defenders -0.5, with sqrt(2.75)."""


def test_a_role_is_compared_with_the_same_role_only() -> None:
    expected = [
        [(attack - 0.5) / (np.sqrt(0.75) + EPSILON), (defend + 0.5) / (np.sqrt(2.75) + EPSILON)]
        for attack, defend in WON_TWICE
    ]
    np.testing.assert_allclose(values_of([duel(0, WON_TWICE)]), expected, rtol=1e-6)
    expected = [[(attack - 0.5) * 4 / 3, (defend + 0.5) * 4 / 3] for attack, defend in WON_TWICE]
    np.testing.assert_allclose(values_of([duel(0, WON_TWICE)], advantage="rloo"), expected, rtol=1e-6)


def test_with_the_baseline_of_the_group_all_roles_are_compared() -> None:
    """They earn 0 on average: the mover's advantage stays."""
    values = values_of([duel(0, WON_TWICE)], role_baseline="group", normalize_advantage="none")
    np.testing.assert_allclose(values, WON_TWICE, atol=1e-6)


def test_reinforce_plus_plus_compares_a_role_over_all_groups_of_the_step() -> None:
    groups = [duel(0, WON_TWICE), duel(1, [(3.0, 0.0), (0.0, 0.0)])]
    attack, defend = (
        np.array([*(pair[role] for pair in WON_TWICE), *later]) for role, later in ((0, (3, 0)), (1, (0, 0)))
    )
    expected = np.stack([(each - each.mean()) / (each.std() + EPSILON) for each in (attack, defend)], axis=1)
    np.testing.assert_allclose(values_of(groups, advantage="reinforce++"), expected, rtol=1e-5)


def test_the_deviation_of_the_step_is_that_of_all_roles_together() -> None:
    centred = np.array(WON_TWICE) - [0.5, -0.5]
    values = values_of([duel(0, WON_TWICE)], normalize_advantage="batch")
    np.testing.assert_allclose(values, centred / (centred.std() + EPSILON), rtol=1e-5)


def test_a_role_that_never_spoke_in_a_game_is_compared_in_the_others() -> None:
    values = values_of([duel(0, [(1.0,), (0.0, 2.0), (0.0, 4.0), (-1.0, 0.0)])], normalize_advantage="none")
    assert values == [[1.0], [0.0, 0.0], [0.0, 2.0], [-1.0, -2.0]]


def test_groups_without_roles_are_trained_as_before_beside_those_with_some() -> None:
    plain = make_group(3, rewards=[0.0, 1.0, 1.0, 0.0])
    assert values_of([duel(0, WON_TWICE), plain])[4:] == values_of([plain]) == values_of([plain], role_baseline="group")


def test_there_is_a_signal_if_one_role_has_one() -> None:
    assert finished_group(duel(0, [(1.0, 0.0), (1.0, 2.0)])).has_signal
    assert not finished_group(duel(0, [(1.0, -1.0), (1.0, -1.0)])).has_signal
    assert values_of([duel(0, [(1.0, -1.0), (1.0, -1.0)])]) == []
    assert values_of([duel(0, [(1.0, 0.0), (1.0, 2.0)])], normalize_advantage="none") == [[0.0, -1.0], [0.0, 1.0]]


def test_a_penalty_on_an_episode_counts_for_each_of_its_roles() -> None:
    group = finished_group(duel(0, [(1.0, -1.0)] * 2))
    longest = max(trajectory.policy_tokens for trajectory in group.trajectories)
    overlong = OverlongConfig(max_tokens=longest, buffer_tokens=longest)
    shaped, found = shape_rewards(group, LearnerConfig(overlong=overlong), {})
    for trajectory, reward in zip(shaped.trajectories, found, strict=True):
        assert reward.penalty > 0
        assert trajectory.role_rewards == pytest.approx({ROLES[0]: 1 - reward.penalty, ROLES[1]: -1 - reward.penalty})


def test_an_episode_is_read_from_the_log_with_its_roles() -> None:
    """So a resumed run trains it with the same advantages."""
    (game, *_) = duel(0, WON_TWICE).trajectories
    line = with_checksum(encode(episode_record(game)).encode())
    again = trajectory_of(line, game.task)
    assert [sample.role for sample in again.samples] == [*ROLES]
    assert finished_episode(again).roles == finished_episode(game).roles == ((ROLES[0], 1.0, 2), (ROLES[1], -1.0, 2))
    without = {key: value for key, value in json.loads(line).items() if key not in ("role", "crc32")}
    assert trajectory_of(with_checksum(json.dumps(without).encode()), game.task).role == "", "a log of an older version"


def test_metrics_name_the_roles() -> None:
    record = StepRecord(0, 0.0)
    with record.learner_works("accumulate", [finished_group(duel(0, [(1.0,), (0.0, 2.0)]))]):
        pass
    found = {name: value for name, value in record.metrics(0.0).items() if name.startswith("roles/")}
    assert found == {
        "roles/attacker/reward": 0.5,
        "roles/attacker/turns_mean": 2.0,
        "roles/defender/reward": 2.0,
        "roles/defender/turns_mean": 2.0,
    }


def test_gigpo_refuses_roles_in_one_line() -> None:
    with pytest.raises(LearnerError, match="gigpo compares the turns of one role"):
        values_of([duel(0, WON_TWICE)], advantage="gigpo")
    with pytest.raises(ValueError, match="role_baseline is not read by gigpo"):
        LearnerConfig(advantage="gigpo", role_baseline="group")


def test_a_critic_gets_the_reward_of_each_role_at_its_end() -> None:
    (prepared,) = prepare_groups(
        [finished_group(duel(0, WON_TWICE))], 0, AdvantageConfig.of(LearnerConfig(advantage="gae"))
    )
    for planned, earned in zip(prepared.planned, WON_TWICE, strict=True):
        assert isinstance(planned.data, Trajectory)
        sequences = planned.sequences(TokenArrays.of(planned.data))
        assert [sequence.rewards.sum() for sequence in sequences if sequence.rewards is not None] == [*earned]
        for sequence in sequences:
            assert sequence.rewards is not None
            assert np.flatnonzero(sequence.rewards).tolist() == [np.flatnonzero(sequence.policy_mask)[-1]]


def test_a_step_trains_both_seats(tiny_model: Path) -> None:
    """It is the step of each seat's samples as a group of their own; without the second seat it is another."""
    game = duel(0, WON_TWICE)
    first, second = game, replace(make_group(100, prompt=10), group_id="defenders")
    members = [replace(each, role="", branches=()) for each in first.trajectories]
    others = [replace(each, reward=pair[1]) for each, pair in zip(second.trajectories, WON_TWICE, strict=True)]
    seats = [replace(first, trajectories=tuple(members)), replace(second, trajectories=tuple(others))]
    together, apart, alone = (trained(tiny_model, [groups])[0] for groups in ([game], seats, seats[:1]))
    assert_same_weights(together, apart)
    with pytest.raises(AssertionError):
        assert_same_weights(together, alone)
