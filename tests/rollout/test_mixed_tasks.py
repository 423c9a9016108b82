"""Several sources as one: exact proportions, a curriculum that finds what there is to learn, and saved state."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.config.tree import load_config
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import ConfigError
from roll_flash.scheduling.tasks import CurriculumTasks, MixedTasks, SeedTasks
from roll_flash.types import Task


def source(name: str, **kwargs: int) -> SeedTasks:
    return SeedTasks(name, kwargs, (0, 1000), seed=1)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_every_environment_gets_its_share_at_any_time(weights: list[float], draws: int) -> None:
    tasks = MixedTasks([source(f"Env{i}-v0") for i in range(len(weights))], weights)
    drawn = Counter(tasks.next().env_id for _ in range(draws))
    for index, weight in enumerate(weights):
        assert abs(drawn[f"Env{index}-v0"] - draws * weight / sum(weights)) < len(weights)


def curriculum(seed: int = 3) -> CurriculumTasks:
    return CurriculumTasks([source("Maze-v0", size=size) for size in (2, 4, 8)], seed=seed)


def test_a_curriculum_draws_what_the_model_solves_half_the_time() -> None:
    tasks, skill, generator = curriculum(), {2: 1.0, 4: 0.5, 8: 0.0}, random.Random(0)
    for _ in range(300):
        task = tasks.next()
        tasks.report(task, float(generator.random() < skill[task.kwargs["size"]]))
    easy, middle, hard = tasks.probabilities()
    assert middle > 0.7
    assert min(easy, hard) > 0.03, "no level is lost for good"
    assert sum((easy, middle, hard)) == pytest.approx(1)


def test_a_curriculum_moves_on_when_the_model_does() -> None:
    tasks = curriculum()
    for _ in range(400):
        task = tasks.next()
        tasks.report(task, float(task.kwargs["size"] == 2))
    for draw in range(800):
        task = tasks.next()
        tasks.report(task, 1.0 if task.kwargs["size"] < 8 else float(draw % 2))
    assert tasks.probabilities()[2] > 0.6


@given(st.integers(0, 60), st.integers(0, 10**6))
def test_a_resumed_run_draws_what_it_would_have_drawn(draws: int, seed: int) -> None:
    def make() -> MixedTasks:
        return MixedTasks([curriculum(seed), source("Other-v0")], [2, 1])

    tasks = make()
    for draw in range(draws):
        tasks.report(tasks.next(), float(draw % 3 == 0))
    resumed = make()
    resumed.restore(json.loads(json.dumps(tasks.state())))
    for draw in range(20):
        expected = tasks.next()
        assert resumed.next() == expected
        tasks.report(expected, float(draw % 2))
        resumed.report(expected, float(draw % 2))


def test_each_source_of_a_mixture_learns_from_its_own_tasks_only() -> None:
    """Also where two have a level in common, and in a mixture of mixtures."""
    levels = [[source("Maze-v0", size=2), source("Maze-v0", size=size)] for size in (4, 8)]
    curricula = [CurriculumTasks(each, seed=1) for each in levels]
    inner = MixedTasks([source("Other-v0"), curricula[1]], [1, 1])
    tasks = MixedTasks([curricula[0], inner], [1, 1])
    for _ in range(200):
        task = tasks.next()
        tasks.report(task, float(task.source.startswith("0")))
    first, second = (curriculum.success_rates() for curriculum in curricula)
    assert min(first) > 0.7
    assert max(second) < 0.3


def test_a_config_draws_the_tasks_that_it_always_drew() -> None:
    """Runs can be repeated: the order belongs to config and seed."""
    tasks = open_tasks(load_config(config(seed=7)))
    assert [(task.env_id, task.seed, dict(task.kwargs)) for task in (tasks.next() for _ in range(6))] == [
        ("A-v0", 339563, {"size": 3, "hard": True}),
        ("A-v0", 333472, {"size": 3, "hard": True}),
        ("B-v0", 339563, {}),
        ("A-v0", 339563, {"size": 4}),
        ("A-v0", 327381, {"size": 3, "hard": True}),
        ("A-v0", 333472, {"size": 4}),
    ]


def test_the_state_of_another_mixture_is_refused() -> None:
    state = MixedTasks([source("A-v0")], [1]).state()
    with pytest.raises(ValueError, match="1 task sources, this run has 2"):
        MixedTasks([source("A-v0"), source("B-v0")], [1, 1]).restore(state)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        MixedTasks([source("A-v0"), source("B-v0")], weights)


A = {"id": "A-v0", "kwargs": {"size": 3}, "levels": [{"size": 4}, {"hard": True}], "weight": 3}
B = {"id": "B-v0", "max_turns": 2}


def config(**more: object) -> dict[str, object]:
    return {"model": {"path": "tiny"}, "envs": [A, B], **more}


def test_a_config_mixes_environments_by_weight_and_draws_their_levels() -> None:
    tasks = open_tasks(load_config(config()))
    drawn = [tasks.next() for _ in range(400)]
    assert sum(task.env_id == "A-v0" for task in drawn) == 300
    levels = Counter(json.dumps(dict(task.kwargs)) for task in drawn if task.env_id == "A-v0")
    assert set(levels) == {'{"size": 4}', '{"size": 3, "hard": true}'}
    assert {task.max_turns for task in drawn if task.env_id == "B-v0"} == {2}
    assert set(tasks.metrics()) >= {"env_0/level_0_success", "env_0/level_1_share"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"envs": [{"id": "A-v0", "levels": [{"size": 4}, {"size": 4}]}]}, "levels: two of them are the same"),
        ({"envs": [{"id": "A-v0", "weight": 0}]}, "envs.0.weight"),
        ({"envs": [B, A, B]}, "named twice"),
        ({"envs": []}, "at least one environment"),
        ({"envs": [A, {"id": "A-v0", "success_above": 0.5}]}, "success_above is one for all entries with the id A-v0"),
        ({"envs": [A, {"id": "B-v0", "train_seeds": [0, 2_000_000_000]}]}, "overlap train_seeds of B-v0"),
        ({"envs": [A, {"id": "B-v0", "wieght": 2}]}, "did you mean 'envs.1.weight'"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(config(**change))


class Short(SeedTasks):
    def next(self) -> Task:
        if self.cursor >= 3:
            raise StopIteration
        return super().next()


def test_a_source_that_has_ended_stays_so_after_a_resume() -> None:
    def mixture() -> MixedTasks:
        return MixedTasks([source("A-v0"), Short("B-v0", {}, (0, 10), seed=1)], [1.0, 1.0])

    whole = mixture()
    expected = [whole.next().task_id for _ in range(20)]
    for cut in range(20):
        first, second = mixture(), mixture()
        for _ in range(cut):
            first.next()
        second.restore(json.loads(json.dumps(first.state())))
        assert [second.next().task_id for _ in range(20 - cut)] == expected[cut:]
