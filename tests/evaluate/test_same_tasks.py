"""An evaluation on tasks that were trained on never passes for held out, and no task counts twice."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from scripted_runner import ScriptedRunner

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import EnvConfig
from roll_flash.evaluation.comparison import compare_folders
from roll_flash.evaluation.evaluation import evaluate
from roll_flash.evaluation.result import EvalResult
from roll_flash.run.trained_tasks import TaskHashes, TrainedTasks, read_trained_tasks
from roll_flash.stream import finished_episode
from roll_flash.summary import check_counts, closing_text
from roll_flash.types import EpisodeFailure, EpisodeSpec, SamplingParams, Task, Trajectory

ROWS = [f"{number} * 7?" for number in range(6)]
EXAMPLE = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"})


class Rows(ScriptedRunner):
    """A data set read as `rows[seed % len(rows)]`, behind a worked example; every even row is answered."""

    def __init__(self, rows: list[str], **info: Any) -> None:
        super().__init__(lambda spec: int(rows[spec.task.seed % len(rows)].split()[0]) % 2 == 0)
        self._rows, self._info = rows, info

    def _outcome(self, spec: EpisodeSpec) -> Trajectory | EpisodeFailure:
        outcome = super()._outcome(spec)
        assert isinstance(outcome, Trajectory)
        question = {"role": "user", "content": self._rows[spec.task.seed % len(self._rows)]}
        info = {name: value(spec.task.seed) for name, value in self._info.items()}
        return replace(outcome, messages=(*EXAMPLE, question, {"role": "assistant", "content": "42"}), info=info)

    def played(self, seeds: range) -> list[Trajectory]:
        specs = [EpisodeSpec(f"e{s}", "g", 0, Task(f"t{s}", "Rows-v0", s), SamplingParams(), 1) for s in seeds]
        return [outcome for spec in specs if isinstance(outcome := self._outcome(spec), Trajectory)]


def evaluated(runner: Rows, trained: Collection[str], folder: Path | None = None, tasks: int = 12) -> EvalResult:
    evaluation = EvalConfig(tasks=tasks)
    with TemporaryDirectory() as scratch:
        return asyncio.run(
            evaluate(
                runner,
                env=EnvConfig(id="Rows-v0"),
                eval=evaluation,
                sampling=SamplingParams(),
                max_concurrent=4,
                folder=folder or Path(scratch),
                label="step_3",
                trained=trained,
            )
        )


def trained_on(runner: Rows, seeds: range, folder: Path) -> TaskHashes:
    tasks = TrainedTasks(folder)
    tasks.add(1, map(finished_episode, runner.played(seeds)))
    tasks.close()
    return read_trained_tasks(folder)


def test_a_hash_takes_eight_bytes_and_is_as_written() -> None:
    names = [f"{number:016x}" for number in (3, 0, 2**64 - 1)]
    hashes = TaskHashes(names[:2])
    hashes.add(names[2])
    hashes.add(names[2])
    assert list(hashes) == [names[1], names[0], names[2]]
    assert names[2] in hashes
    assert "0000000000000001" not in hashes
    assert {names[0], "0000000000000001"} & hashes == {names[0]}


def test_rows_that_were_trained_on_are_counted_and_never_called_held_out(tmp_path: Path) -> None:
    runner = Rows(ROWS)
    result = evaluated(runner, trained_on(runner, range(4), tmp_path), tmp_path / "eval")
    assert (result.trained_on, len(result.task_hashes)) == (4, 6)
    assert result.kind == "not held out (4 of 6 tasks were trained on)"
    says = "4 of 6 distinct tasks were trained on: these figures are not held out"
    assert says in result.table()
    assert says in (tmp_path / "eval" / "report.html").read_text()
    assert result.metrics()["eval/trained_on"] == 4
    assert result.to_dict()["kind"] == result.kind


def test_a_task_that_comes_back_under_another_seed_counts_once() -> None:
    once, twice = evaluated(Rows(ROWS), set(), tasks=6), evaluated(Rows(ROWS), set(), tasks=12)
    assert "12 tasks are 6 distinct ones" in twice.table()
    assert once.success is not None
    assert twice.success is not None
    assert (once.success.count, twice.success.count) == (6, 6)
    assert once.notes == ()


@pytest.mark.parametrize(
    ("runner", "seen"),
    [(Rows(ROWS[:1]), 0), (Rows(ROWS[:1], task=lambda seed: seed % 1_000_000_000), 4)],
    ids=["hidden", "named"],
)
def test_tasks_that_all_begin_alike_are_told_apart_by_their_name_or_else_by_seed(
    runner: Rows, seen: int, tmp_path: Path
) -> None:
    result = evaluated(runner, trained_on(runner, range(4), tmp_path))
    assert result.trained_on == seen
    assert result.success is not None
    assert result.kind.startswith("not held out" if seen else "held-out")


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["of different rows", "that begin alike"])
def test_a_name_of_many_tasks_makes_them_no_single_one(rows: list[str], tmp_path: Path) -> None:
    """Many environments have such a name in their info, as of a level. All tasks counted as one, in every interval,
    and as trained on."""
    runner = Rows(rows, task=lambda _: "products")
    result = evaluated(runner, trained_on(runner, range(3), tmp_path), tasks=6)
    assert result.success is not None
    assert (result.success.count, result.trained_on) == ((6, 3) if rows is ROWS else (6, 0))


def test_a_task_of_an_agent_is_known_by_its_name_alone(tmp_path: Path) -> None:
    """Its first message may be another in each episode, such as the time."""
    runner = Rows(ROWS, task=lambda _: "products", gateway=lambda _: {"calls": 1})
    assert len(evaluated(runner, trained_on(runner, range(1), tmp_path), tasks=6).task_hashes) == 1


def test_the_summary_of_a_run_says_that_it_was_evaluated_on_training_tasks(tmp_path: Path) -> None:
    runner = Rows(ROWS)
    before, after = evaluated(runner, set()), evaluated(runner, trained_on(runner, range(6), tmp_path))
    summary = {"name": "rows", "steps": 1, "total_steps": 1, "seconds": 1.0, "tokens": 1, "tokens_per_s": 1.0}
    summary |= {"before": before.to_dict(), "after": after.to_dict(), "books": check_counts({}), "notes": after.notes}
    summary |= {"run_folder": "runs/rows", "plot": None, "model_folder": None, "disk": {}, "findings": []}
    text = closing_text(summary)
    assert "held-out success" not in text
    assert "6 of 6 distinct tasks were trained on" in text


def test_a_comparison_takes_tasks_that_are_the_same_as_one(tmp_path: Path) -> None:
    """With each row four times an interval would be half as wide."""
    better = Rows(ROWS)
    better.script = lambda spec: spec.task.seed % len(ROWS) < 5
    for name, runner, tasks in (("a", Rows(ROWS), 24), ("b", better, 24), ("c", Rows(ROWS), 6), ("d", better, 6)):
        evaluated(runner, set(), tmp_path / name, tasks)
    often, once = (compare_folders(tmp_path / one, tmp_path / other) for one, other in ("ab", "cd"))
    assert often.difference == once.difference
    assert once.difference.count == len(ROWS)
    assert "24 tasks are 6 distinct ones" in often.table()
