"""Task sources: every task once, the same order after a resume, and held-out tasks that are never trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_flash.config.tree import Config, EnvConfig, load_config
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import ConfigError, RunError
from roll_flash.evaluation.tasks import held_out_tasks
from roll_flash.scheduling.tasks import (
    CurriculumTasks,
    MixedTasks,
    RowTasks,
    SeedTasks,
    ShuffledTasks,
    TaskSource,
    level_name,
)
from roll_flash.system.start_checks import check_parts
from roll_flash.types import Task


@given(st.integers(0, 1000), st.integers(1, 200), st.integers(0, 10**9))
def test_every_seed_comes_once_before_any_comes_again(first: int, count: int, seed: int) -> None:
    tasks = SeedTasks("Env-v0", {}, (first, first + count), seed)
    drawn = [tasks.next().seed for _ in range(count)]
    assert sorted(drawn) == list(range(first, first + count))


@given(st.integers(0, 10**6), st.integers(0, 50))
def test_a_source_goes_on_where_its_cursor_stands(seed: int, cursor: int) -> None:
    first = SeedTasks("Env-v0", {"a": 1}, (0, 97), seed)
    drawn = [first.next() for _ in range(cursor + 5)]
    resumed = SeedTasks("Env-v0", {"a": 1}, (0, 97), seed)
    resumed.cursor = cursor
    assert [resumed.next() for _ in range(5)] == drawn[cursor:]


ENV = EnvConfig(id="Riddle-v0", kwargs={"hints": 1}, max_turns=3)


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"question": str(number)} for number in range(first, first + count)]


def all_kinds() -> list[TaskSource]:
    def seeds(name: str) -> SeedTasks:
        return SeedTasks(name, {}, (0, 10), held_out_from=50)

    def data(size: int) -> RowTasks:
        env = ENV.model_copy(update={"kwargs": {"hints": size}})
        return RowTasks(env, rows(size), rows(4, first=1000))

    return [
        seeds("A-v0"),
        data(7),
        CurriculumTasks([data(5), data(6)], seed=1),
        MixedTasks([seeds("A-v0"), CurriculumTasks([seeds("B-v0"), data(9)]), data(3)], [2, 1, 1]),
    ]


@pytest.mark.parametrize("kind", range(4))
@given(draws=st.integers(0, 40), seed=st.integers(0, 10**6))
def test_every_kind_of_source_goes_on_as_without_a_stop(kind: int, draws: int, seed: int) -> None:
    source, resumed = all_kinds()[kind], all_kinds()[kind]
    for each in (source, resumed):
        each.shuffle(seed)
    for draw in range(draws):
        source.report(source.next(), float(draw % 3 == 0))
    resumed.restore(json.loads(json.dumps(source.state())))
    for draw in range(20):
        task = source.next()
        assert resumed.next() == task
        for each in (source, resumed):
            each.report(task, float(draw % 2))


@pytest.mark.parametrize("kind", range(4))
def test_every_kind_of_source_knows_its_size_and_holds_tasks_out(kind: int) -> None:
    source = all_kinds()[kind]
    assert source.size == (10, 7, 11, 32)[kind]
    drawn = {source.next().task_id for _ in range(200)}
    held_out = [task.task_id for task in source.held_out(6)]
    assert len(held_out) == len(set(held_out)) or kind > 1  # the levels' rows have the same names
    assert len(held_out) == (6, 4, 6, 6)[kind]
    assert not drawn & set(held_out)
    source.shuffle(99)
    assert [task.task_id for task in source.held_out(6)] == held_out


def test_each_row_is_trained_on_once_before_any_comes_again() -> None:
    source = RowTasks(ENV, rows(50), rows(5, first=50))
    source.shuffle(3)
    drawn = [source.next() for _ in range(50)]
    assert sorted(int(task.kwargs["question"]) for task in drawn) == list(range(50))
    assert [task.kwargs["question"] for task in drawn] != [str(number) for number in range(50)]
    assert {(task.kwargs["hints"], task.max_turns) for task in drawn} == {(1, 3)}


@pytest.mark.parametrize(
    ("train", "held_out", "says"),
    [
        (rows(3), [{"question": "9"}, {"question": "1"}], "held-out row 1 is also training row 1"),
        ([{"day": object()}], [], "no checkpoint can hold the row"),
        ([], rows(3), "no row to train on"),
        (["question", "answer"], [], "a row is a mapping of arguments to values, not 'question'"),
    ],
)
def test_rows_that_cannot_be_used_are_one_line(train: list[Any], held_out: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RowTasks(ENV, train, held_out)


class Stored:
    """As a data set of the library `datasets`: a part of it is a mapping of columns."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return {"question": [str(n) for n in range(5)[index]]}
        if index >= 5:
            raise IndexError
        return {"question": str(index)}


@pytest.mark.parametrize("held_out", [Stored(), (row for row in rows(5))])
def test_rows_may_be_of_a_library_or_come_one_by_one(held_out: Any) -> None:
    source = RowTasks(ENV, (row for row in rows(7, first=10)), held_out)
    assert source.size == 7
    assert [task.kwargs["question"] for task in source.held_out(2)] == ["0", "1"]


def test_a_curriculum_over_data_sets_learns_which_one_teaches_and_stays_small() -> None:
    levels = [RowTasks(ENV.model_copy(update={"kwargs": {"hard": hard}}), rows(1000)) for hard in (0, 1)]
    source = CurriculumTasks(levels, seed=2)
    for draw in range(600):
        task = source.next()
        source.report(task, float(draw % 2) if task.kwargs["hard"] else 1.0)
    assert source.probabilities()[1] > 0.8
    assert len(json.dumps(source.state())) < 1000


def test_rows_of_a_data_set_share_one_line_of_the_metrics() -> None:
    source = RowTasks(ENV, rows(100))
    assert {level_name(source.next()) for _ in range(100)} == {"Riddle-v0[hints=1]"}


class Endless(TaskSource):
    """Has no held-out tasks."""

    def __init__(self, env: EnvConfig, start: int = 0) -> None:
        self._env, self._drawn = env, start

    def next(self) -> Any:
        self._drawn += 1
        return ShuffledTasks.next(SeedTasks(self._env.id, {}, (self._drawn, self._drawn + 1)))

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]


def config(**more: Any) -> Config:
    env = {"id": "counting:Counting-v0", "task_source": {"entry_point": f"{__name__}:Endless"}}
    tree = {"model": {"path": "tiny"}, "inference": {"engine": "transformers"}, "envs": [{**env, **more}]}
    return load_config(tree, ["eval.before_and_after=false"])


def test_a_source_named_in_the_config_is_drawn_from() -> None:
    source = open_tasks(config(task_source={"entry_point": f"{__name__}:Endless", "kwargs": {"start": 4}}))
    assert [source.next().seed for _ in range(3)] == [5, 6, 7]
    assert source.size is None


def test_a_run_without_held_out_tasks_cannot_evaluate() -> None:
    chosen = config()
    assert check_parts(chosen).sandboxes == ()
    with pytest.raises(ConfigError, match="no held-out tasks; give it some, or train without evaluation"):
        held_out_tasks(chosen.envs[0], chosen.eval)
    evaluated = chosen.model_copy(update={"eval": chosen.eval.model_copy(update={"every": 1})})
    with pytest.raises(ConfigError, match="no held-out tasks"):
        check_parts(evaluated)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"entry_point": "nowhere.py:rows"}, "envs: task_source: nowhere.py: no such file"),
        ({"entry_point": "Rows"}, "must be module:NAME"),
        ({"entry_point": f"{__name__}:rows", "kwargs": {"count": 3}}, "raised TypeError"),
        ({"entry_point": f"{__name__}:level_name"}, "raised AttributeError"),
        ({"entry_point": f"{__name__}:EnvConfig", "kwargs": {}}, "task_source: .*raised"),
        ({"entry_point": f"{__name__}:Path", "kwargs": {}}, "raised TypeError"),
        ({"entry_point": "builtins:repr"}, "gave a str, not a roll_flash.TaskSource"),
    ],
)
def test_a_source_that_cannot_be_made_is_one_line(source: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_tasks(config(task_source=source))


class Faulty(Endless):
    """Makes the mistake of its name."""

    def __init__(self, env: EnvConfig, mistake: str) -> None:
        super().__init__(env)
        self._mistake = mistake

    def next(self) -> Any:
        task = super().next()
        match self._mistake:
            case "raises":
                raise KeyError("row")
            case "no task":
                return task.to_dict()
            case "kwargs":
                return replace(task, kwargs={"day": object()})
            case "key":
                return replace(task, kwargs={"pays": {1: 0.5}})
            case "id":
                return replace(task, task_id=7)
            case "seed":
                return replace(task, seed=0.5)
        return task

    def held_out(self, count: int) -> list[Task]:
        return [Task("one for all", self._env.id, number) for number in range(count)]

    def state(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def report(self, task: Task, score: float) -> None:
        raise ZeroDivisionError("no scores")

    def restore(self, state: Mapping[str, Any]) -> None:
        raise RuntimeError("not mine")


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("raises", "Faulty: next raised KeyError: 'row'"),
        ("no task", "Faulty: gave a dict, not a roll_flash.Task"),
        ("kwargs", "Faulty: no checkpoint can hold the kwargs of task counting:Counting-v0:1: Object of type object"),
        ("key", "no checkpoint can hold the kwargs of task counting:Counting-v0:1: The key 1 is no text"),
        ("id", "Faulty: a task's task_id is 7, no str"),
        ("seed", "Faulty: a task's seed is 0.5, no Integral"),
    ],
)
def test_a_source_that_goes_wrong_ends_the_run_with_one_line_that_names_it(mistake: str, says: str) -> None:
    source = open_tasks(config(task_source={"entry_point": f"{__name__}:Faulty", "kwargs": {"mistake": mistake}}))
    with pytest.raises(RunError, match=says):
        source.next()


def test_a_source_whose_state_or_scores_go_wrong_is_named() -> None:
    source = open_tasks(config(task_source={"entry_point": f"{__name__}:Faulty", "kwargs": {"mistake": ""}}))
    with pytest.raises(RunError, match="Faulty: report raised ZeroDivisionError: no scores"):
        source.report(source.next(), 1.0)
    with pytest.raises(RunError, match="Faulty: no checkpoint can hold its state: Object of type set"):
        source.state()
    with pytest.raises(ValueError, match="Faulty: restore raised RuntimeError: not mine"):
        source.restore({})


def test_held_out_tasks_of_one_name_are_refused() -> None:
    """Each would take the place of the other in the results, and one of them would count twice."""
    chosen = config(task_source={"entry_point": f"{__name__}:Faulty", "kwargs": {"mistake": ""}})
    assert len(held_out_tasks(chosen.envs[0], chosen.eval.model_copy(update={"tasks": 1}))) == 1
    with pytest.raises(RunError, match="Faulty: 2 held-out tasks have the task_id 'one for all'"):
        held_out_tasks(chosen.envs[0], chosen.eval.model_copy(update={"tasks": 2}))


class FromNumpy(Endless):
    def next(self) -> Task:
        return replace(super().next(), seed=np.int64(5), max_turns=None)


def test_tasks_that_name_no_turns_have_those_of_their_entry_and_a_seed_of_numpy_is_a_plain_one() -> None:
    """In a mixture they had those of the first entry; `random` and gymnasium refuse a seed of NumPy."""
    own = {"id": "counting:Counting-v0", "max_turns": 3, "task_source": {"entry_point": f"{__name__}:FromNumpy"}}
    tree = {"model": {"path": "tiny"}, "envs": [{"id": "A-v0", "max_turns": 9}, own]}
    source = open_tasks(load_config(tree))
    assert [(task.env_id, task.max_turns) for task in (source.next(), source.next())] == [
        ("A-v0", 9),
        ("counting:Counting-v0", 3),
    ]
    task = open_tasks(load_config({**tree, "envs": [own]})).next()
    assert (type(task.seed), task.seed) == (int, 5)


def test_seeds_beside_a_source_are_refused_and_the_saved_config_runs_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_seeds have no effect"):
        config(train_seeds=[3, 9])
    file = tmp_path / "config.yaml"
    file.write_text(config().to_yaml())
    assert load_config(file) == config()
