"""Metrics of a step that the driver computes from the metadata of its episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from roll_flash.monitor.step_record import StepRecord
from roll_flash.stream import finished_group
from roll_flash.types import EpisodeEnd, EpisodeSpec, Group, SamplingParams, Task
from tests.rollout.scheduler_world import whole_trajectory


def metrics(*infos: dict[str, Any], ends: Sequence[tuple[bool | None, EpisodeEnd]] = ()) -> dict[str, float]:
    task = Task("mine/0", "Dataset-v0", 0, {})
    specs = [EpisodeSpec(f"e{n}", "g", n, task, SamplingParams(), 1) for n in range(len(infos))]
    played = [replace(whole_trajectory(spec, [3]), info=info) for spec, info in zip(specs, infos, strict=True)]
    for place, (success, end) in enumerate(ends):
        played[place] = replace(played[place], success=success, end=end)
    record = StepRecord(3, 0.0)
    with record.learner_works("accumulate", [finished_group(Group("g", task, tuple(played)))]):
        pass
    return record.metrics(0.0)


def test_each_reward_has_a_metric_of_its_own() -> None:
    found = metrics({"rewards": {"exact": 1.0, "is_brief": True}}, {"rewards": {"exact": 0.0, "is_brief": True}}, {})
    assert (found["rewards/exact"], found["rewards/is_brief"]) == (0.5, 1.0)


@pytest.mark.parametrize("odd", [5, [1.0], {"exact": "1.0"}, {"exact": float("nan")}, {"exact": None}])
def test_what_is_no_number_is_no_metric(odd: Any) -> None:
    assert not [name for name in metrics({"rewards": odd}) if name.startswith("rewards/")]


def test_metrics_do_not_grow_with_what_an_environment_reports() -> None:
    found = metrics({"rewards": {f"{n}" * 1000: 1.0 for n in range(1000)}})
    assert sum(name.startswith("rewards/") for name in found) <= 32
    assert max(map(len, found)) < 100


def test_an_episode_that_the_run_ended_is_no_success_where_others_tell_theirs() -> None:
    told: list[tuple[bool | None, EpisodeEnd]] = [(True, "terminated"), (None, "max_turns"), (None, "terminated")]
    assert metrics({}, {}, {}, ends=told)["success"] == 0.5
    assert "success" not in metrics({}, {}, ends=told[1:])
