"""The bias of training against submission: zero where nothing is lost, and seen where the long ones are."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import trajectory

from roll_flash.rollout.open_group import OpenGroup
from roll_flash.rollout.selection_bias import Distribution, SelectionBias
from roll_flash.types import EpisodeSpec, SamplingParams, Task


def group(env_id: str, *lengths: int) -> OpenGroup:
    task = Task("t", env_id, 0)
    episodes = [EpisodeSpec(f"e{i}", "g", i, task, SamplingParams(), 1) for i in range(len(lengths))]
    trajectories = [trajectory(e, [0] * length) for e, length in zip(episodes, lengths, strict=True)]
    return OpenGroup(0, "g", task, trajectories=trajectories)


def test_nothing_lost_is_no_bias() -> None:
    bias = SelectionBias()
    for length in range(1, 20):
        bias.trained(group("A-v0", length, 2 * length))
    metrics = bias.metrics()
    assert metrics["length_ratio"] == metrics["latency_ratio"] == 1
    assert metrics["length_distance"] == metrics["task_distance"] == metrics["unfinished"] == 0


def test_dropped_long_groups_show_in_length_and_task() -> None:
    bias = SelectionBias()
    for _ in range(10):
        bias.trained(group("Short-v0", 10, 10))
        bias.dropped(group("Long-v0", 100, 100))
    bias.cancelled()
    metrics = bias.metrics()
    assert metrics["length_ratio"] == pytest.approx(10 / 55)
    assert metrics["length_distance"] == pytest.approx(0.5)
    assert metrics["task_distance"] == pytest.approx(0.5)
    assert metrics["unfinished"] == pytest.approx(1 / 41)


@given(st.integers(0, 10**6))
def test_the_distance_of_two_distributions_is_that_of_their_shares(seed: int) -> None:
    generator = random.Random(seed)
    one, other = Distribution(), Distribution()
    for _ in range(200):
        one.add(generator.lognormvariate(0, 1))
        other.add(generator.lognormvariate(1, 1))
    assert 0 < one.distance(other) <= 1
    assert one.distance(other) == pytest.approx(other.distance(one))
    assert one.distance(one) == 0


def test_an_empty_distribution_says_so() -> None:
    assert math.isnan(Distribution().mean)
    assert SelectionBias().metrics()["length_ratio"] == 1
