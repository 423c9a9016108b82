"""The bias of training against submission: zero where nothing is lost, and seen where the long ones are."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import trajectory

from roll_flash.scheduling.group_queues import OpenGroup
from roll_flash.scheduling.selection_bias import Distribution, SelectionBias
from roll_flash.types import EpisodeSpec, SamplingParams, Task


def group(env_id: str, *lengths: int, unfinished_s: tuple[float, ...] = (), **kwargs: int) -> OpenGroup:
    task = Task("t", env_id, 0, kwargs)
    episodes = [EpisodeSpec(f"e{i}", "g", i, task, SamplingParams(), 1) for i in range(len(lengths))]
    trajectories = [trajectory(e, [0] * length) for e, length in zip(episodes, lengths, strict=True)]
    return OpenGroup(0, "g", task, trajectories=trajectories, unfinished_s=list(unfinished_s))


def test_nothing_lost_is_no_bias() -> None:
    bias = SelectionBias()
    for length in range(1, 20):
        bias.trained(group("A-v0", length, 2 * length))
    metrics = bias.metrics()
    for name in ("length_ratio", "latency_ratio"):
        assert metrics[f"{name}_low"] == metrics[f"{name}_high"] == 1
    assert metrics["length_distance_high"] == metrics["task_distance"] == metrics["unfinished"] == 0


def test_dropped_long_groups_show_in_length_and_task() -> None:
    bias = SelectionBias()
    for _ in range(10):
        bias.trained(group("Short-v0", 10, 10))
        bias.dropped(group("Long-v0", 100, 100))
    metrics = bias.metrics()
    assert metrics["length_ratio_low"] == metrics["length_ratio_high"] == pytest.approx(10 / 55)
    assert metrics["length_distance_low"] == pytest.approx(0.5)
    assert metrics["task_distance"] == pytest.approx(0.5)


def test_an_episode_that_was_stopped_lasted_at_least_so_long_and_at_most_its_deadline() -> None:
    bias = SelectionBias(longest_s=20.0)
    bias.trained(group("A-v0", 1, 1))  # 1 s each
    bias.dropped(group("A-v0", unfinished_s=(4.0, 4.0)))
    metrics = bias.metrics()
    assert metrics["unfinished"] == 0.5
    assert metrics["latency_ratio_high"] == pytest.approx(1 / (10 / 4))
    assert metrics["latency_ratio_low"] == pytest.approx(1 / (42 / 4))


def test_a_level_of_which_nothing_is_trained_is_named() -> None:
    bias = SelectionBias()
    for _ in range(3):
        bias.trained(group("Maze-v0", 5, 5, size=3))
        bias.dropped(group("Maze-v0", 5, unfinished_s=(9.0,), size=9))
    metrics = bias.metrics()
    assert metrics["Maze-v0[size=3]/trained_share"] == 1
    assert metrics["Maze-v0[size=9]/trained_share"] == 0
    assert metrics["Maze-v0[size=9]/unfinished"] == 0.5
    assert "Maze-v0[size=9]/latency_ratio_high" not in metrics, "of nothing there is no ratio"
    assert metrics["task_distance"] == pytest.approx(0.5)


def test_a_source_that_makes_every_task_a_level_does_not_flood_the_metrics() -> None:
    bias = SelectionBias()
    for index in range(1000):
        bias.trained(group("Any-v0", 1, 1, index=index))
    assert len(bias.metrics()) < 200
    assert bias.metrics()["other/trained_share"] == 1


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
    assert "length_ratio_high" not in SelectionBias().metrics()
