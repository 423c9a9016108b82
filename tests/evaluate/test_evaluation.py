"""An evaluation scores what the model did, masks what it did not, and continues where it stopped."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from scripted_runner import Script, ScriptedRunner

from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import EnvConfig, load_config
from roll_flash.errors import ConfigError
from roll_flash.evaluation.comparison import compare_folders
from roll_flash.evaluation.evaluation import evaluate, evaluate_environments, is_complete
from roll_flash.evaluation.journal import transcript_name
from roll_flash.evaluation.result import EvalResult, ToolStatistics, tool_statistics
from roll_flash.evaluation.tasks import build_episodes, held_out_tasks
from roll_flash.monitor import episodes
from roll_flash.types import EpisodeSpec, SamplingParams, Task, Trajectory

ENV = EnvConfig(id="Maze-v0", kwargs={"size": 3}, max_turns=5)


def run(
    runner: ScriptedRunner, folder: Path | None = None, *, tasks: int = 4, attempts: int = 2, **options: Any
) -> EvalResult:
    settings: dict[str, Any] = {"env": ENV, "sampling": SamplingParams(temperature=0.5), "label": "test", **options}
    plan = EvalConfig(tasks=tasks, attempts=attempts, seeds_from=1000)
    with TemporaryDirectory() as scratch:
        return asyncio.run(evaluate(runner, eval=plan, max_concurrent=3, folder=folder or Path(scratch), **settings))


def episodes_of(plan: EvalConfig, sampling: SamplingParams, label: str) -> list[EpisodeSpec]:
    return build_episodes(held_out_tasks(ENV, plan), ENV, plan, sampling, label)


def every_second_attempt(spec: EpisodeSpec) -> bool:
    return spec.replica == 1


def test_an_evaluation_is_its_users_alone(tmp_path: Path) -> None:
    run(ScriptedRunner(every_second_attempt), tmp_path / "evaluations" / "first")
    assert (tmp_path / "evaluations" / "first").stat().st_mode & 0o777 == 0o700


def test_tasks_are_held_out_seeds_and_ids_depend_on_seed_and_attempt_only() -> None:
    specs = episodes_of(EvalConfig(tasks=3, attempts=2, seeds_from=1000), SamplingParams(seed=7), "test")
    assert [spec.task.seed for spec in specs] == [1000, 1001, 1002, 1000, 1001, 1002]
    assert specs[4].task.task_id == "Maze-v0:1001"
    assert specs[4].episode_id == "test:1001:1"
    assert specs[4].max_turns == 5
    assert len({spec.sampling.seed for spec in specs}) == len({spec.episode_id for spec in specs}) == 6


def test_a_task_that_names_its_turns_has_them_in_an_evaluation_too() -> None:
    tasks = [Task("a", "Maze-v0", 0, max_turns=2), Task("b", "Maze-v0", 1)]
    specs = build_episodes(tasks, ENV, EvalConfig(tasks=2), SamplingParams(), "test")
    assert [spec.max_turns for spec in specs] == [2, 5]


def test_scores_of_a_success_that_was_derived_are_not_taken_for_those_of_an_environment(tmp_path: Path) -> None:
    """The line that recommends success_above led back to the same scores without a success."""
    above = ENV.model_copy(update={"success_above": 0.5})
    run(ScriptedRunner(lambda spec: None), tmp_path / "b", env=above)
    with pytest.raises(ConfigError, match=r"an evaluation with success_above 0\.5, not \(the default\)"):
        run(ScriptedRunner(every_second_attempt), tmp_path / "b")


def test_tasks_with_long_names_have_transcripts_of_their_own(tmp_path: Path) -> None:
    """An id of a row may be a whole text: the first transcript ended the evaluation."""
    tasks = [Task(f"my/{'x' * 1000}{number}", "A-v0", number) for number in range(2)]
    specs = build_episodes(tasks, EnvConfig(id="A-v0"), EvalConfig(tasks=2, attempts=2), SamplingParams(), "mine")
    files = {tmp_path / transcript_name({"episode_id": spec.episode_id, "seed": spec.task.seed}) for spec in specs}
    for file in files:
        file.touch()
    assert len(files) == len({spec.episode_id for spec in specs}) == 4


def test_evaluations_with_neighbouring_seeds_share_no_attempt() -> None:
    """Else two evaluations with 8 attempts and the seeds 0 and 1 were the same but for one attempt at each task."""
    settings = EvalConfig(tasks=20, attempts=8, seeds_from=1000)
    seeds = [
        {each.sampling.seed for each in episodes_of(settings, SamplingParams(seed=seed), "test")} for seed in (0, 1)
    ]
    assert [len(each) for each in seeds] == [160, 160]
    assert not seeds[0] & seeds[1]


def test_the_figures_are_those_of_the_script() -> None:
    result = run(ScriptedRunner(every_second_attempt))
    assert result.scored == 8
    assert result.success is not None
    assert result.success.value == 0.5
    assert result.reward is not None
    assert result.reward.value == 0.5
    assert {k: estimate.value for k, estimate in result.pass_at_k.items()} == {1: 0.5, 2: 1.0}
    assert (result.policy_tokens, result.turns) == (24, 8)
    assert result.metrics()["eval/success"] == 0.5


def test_infrastructure_failures_are_shown_and_never_scored_zero() -> None:
    def script(spec: EpisodeSpec) -> Any:
        return "sandbox_error" if spec.task.seed == 1000 else True

    result = run(ScriptedRunner(script))
    assert result.success is not None
    assert result.success.value == 1.0
    assert result.success.count == 3
    assert result.failures == {"sandbox_error": 2}
    assert "sandbox_error 2" in result.table()


def test_when_everything_fails_nothing_is_claimed() -> None:
    result = run(ScriptedRunner(lambda spec: "generate_error"))
    assert (result.scored, result.success, result.reward, result.pass_at_k) == (0, None, None, {})
    assert "nothing was scored" in result.table()
    assert "generate_error at Maze-v0:1000: broke" in result.table(), "the reason was in files only"
    assert result.scores == "nothing was scored (generate_error at Maze-v0:1000: broke)"
    assert result.metrics() == {"eval/failed": 8.0}


def test_an_environment_that_reports_no_success_still_has_its_reward() -> None:
    result = run(ScriptedRunner(lambda spec: None))
    assert result.success is None
    assert result.reward is not None
    assert "not reported by the environment" in result.table()


class EndsSome(ScriptedRunner):
    """The run ends the episodes of tasks from `seed` on, of which the environment says nothing."""

    async def run(self, episodes: Any, *, max_concurrent: int) -> Any:
        async for outcome in super().run(episodes, max_concurrent=max_concurrent):
            assert isinstance(outcome, Trajectory)
            yield replace(outcome, end="max_turns") if outcome.success is None else outcome


def test_an_episode_that_the_run_ends_is_no_success_where_the_environment_tells_success_at_its_end(
    tmp_path: Path,
) -> None:
    result = run(EndsSome(lambda spec: True if spec.task.seed == 1000 else None), folder=tmp_path / "a")
    assert result.success is not None
    assert (result.success.value, result.success.count) == (0.25, 4)
    assert {k: estimate.value for k, estimate in result.pass_at_k.items()} == {1: 0.25, 2: 0.25}
    assert "report no success" not in result.table()
    run(EndsSome(lambda spec: True if spec.task.seed == 1001 else None), folder=tmp_path / "b")
    assert compare_folders(tmp_path / "a", tmp_path / "b").measure == "success"
    assert run(EndsSome(lambda spec: None)).success is None, "it tells success of no episode"


def test_what_an_environment_says_of_tools_and_is_no_count_ends_no_evaluation() -> None:
    """Its info may have this key for something else, and all attempts were played when the figures are made."""
    uses: list[Any] = [
        {"calls": 2, "errors": 1, "timeouts": None, "seconds": 0.5},
        {"calls": 3, "errors": ["no file"], "timeouts": "two", "seconds": 10**400},
        {"calls": 10**400, "errors": {"a": 1}, "seconds": float("nan")},
        ["calls"],
    ]
    found = tool_statistics({"info": {"tools": {"sh": use}}} for use in uses)
    assert found == {"sh": ToolStatistics(calls=5, errors=1, timeouts=0, seconds=0.5, attempts=3)}


def test_attempts_without_a_success_are_said_where_others_have_one() -> None:
    result = run(ScriptedRunner(lambda spec: True if spec.task.seed == 1000 else None))
    assert result.success is not None
    assert (result.success.value, result.success.count) == (1.0, 1)
    assert "6 scored attempts report no success and are left out of it" in result.table()


def test_ctrl_c_loses_nothing_that_had_finished_and_the_next_call_does_the_rest(tmp_path: Path) -> None:
    first = ScriptedRunner(every_second_attempt, stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        run(first, tmp_path)
    assert first.closed
    second = ScriptedRunner(every_second_attempt)
    result = run(second, tmp_path)
    assert len(second.ran) == 5
    assert not {spec.episode_id for spec in first.ran} & {spec.episode_id for spec in second.ran}
    fresh = run(ScriptedRunner(every_second_attempt))
    assert (result.success, result.pass_at_k, result.reward) == (fresh.success, fresh.pass_at_k, fresh.reward)


def test_a_finished_evaluation_is_read_and_not_run_again(tmp_path: Path) -> None:
    run(ScriptedRunner(every_second_attempt), tmp_path)
    again = ScriptedRunner(every_second_attempt)
    assert run(again, tmp_path).scored == 8
    assert again.ran == []


def test_what_is_complete_can_be_scored_without_a_runner(tmp_path: Path) -> None:
    environments = [{"id": "Maze-v0"}, {"id": "Riddle-v0"}]
    config = load_config({"model": {"path": "tiny"}, "envs": environments, "eval": {"tasks": 3}})

    def label(env: EnvConfig) -> str:
        return env.id

    assert not is_complete(config, tmp_path, label=label)
    runner = ScriptedRunner(every_second_attempt)
    asyncio.run(evaluate_environments(runner, config, tmp_path, label=label, max_concurrent=2))
    assert is_complete(config, tmp_path, label=label)
    again = asyncio.run(evaluate_environments(None, config, tmp_path, label=label, max_concurrent=2))
    assert (again.scored, again.others["env_1"].scored) == (3, 3)


def test_a_label_with_spaces_gives_ids_without() -> None:
    (spec,) = episodes_of(EvalConfig(tasks=1, seeds_from=1000), SamplingParams(), "Maze-v0 with a/b")
    assert spec.episode_id == "Maze-v0-with-a-b:1000:0"


def test_failures_are_tried_again_on_resume_and_the_last_outcome_counts(tmp_path: Path) -> None:
    def broken(spec: EpisodeSpec) -> Any:
        return "worker_died" if spec.replica == 0 else True

    assert run(ScriptedRunner(broken), tmp_path).failures == {"worker_died": 4}
    repaired = ScriptedRunner(lambda spec: True)
    result = run(repaired, tmp_path)
    assert len(repaired.ran) == 4
    assert (result.failures, result.scored) == ({}, 8)


def test_more_tasks_and_attempts_can_be_added_later(tmp_path: Path) -> None:
    run(ScriptedRunner(every_second_attempt), tmp_path, tasks=2, attempts=1)
    more = ScriptedRunner(every_second_attempt)
    assert run(more, tmp_path, tasks=3, attempts=2).scored == 6
    assert len(more.ran) == 4


def test_a_half_written_record_is_run_again(tmp_path: Path) -> None:
    run(ScriptedRunner(every_second_attempt), tmp_path)
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    again = ScriptedRunner(every_second_attempt)
    assert run(again, tmp_path).scored == 8
    assert len(again.ran) == 1


def test_an_episode_whose_line_is_too_long_to_be_read_is_scored_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """60 branches of 200,000 tokens have 263 MiB: the folder could not be read again."""
    monkeypatch.setattr(episodes, "MAX_RECORD_BYTES", 10)
    assert run(ScriptedRunner(every_second_attempt), tmp_path).scored == 8
    assert "is not in the log" in caplog.text
    assert (tmp_path / "episodes.jsonl").read_bytes() == b""
    monkeypatch.undo()
    again = ScriptedRunner(every_second_attempt)
    assert run(again, tmp_path).scored == len(again.ran) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(temperature=0.0)},
        {"about": {"model": "another"}},
        {"env": EnvConfig(id="Maze-v0", kwargs={"size": 4}, max_turns=5)},
        {"env": ENV.model_copy(update={"success_above": 0.5})},
    ],
)
def test_a_folder_of_another_evaluation_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    run(ScriptedRunner(every_second_attempt), tmp_path)
    with pytest.raises(ConfigError, match="choose another folder"):
        run(ScriptedRunner(every_second_attempt), tmp_path, **options)


def test_a_folder_in_which_no_attempt_has_ended_may_hold_any_evaluation(tmp_path: Path) -> None:
    """After a start that failed for a misspelt model, the corrected command was refused."""
    with pytest.raises(KeyboardInterrupt):
        run(ScriptedRunner(every_second_attempt, stop_after=0), tmp_path, about={"model": "tinny"})
    assert run(ScriptedRunner(every_second_attempt), tmp_path, about={"model": "tiny"}).scored == 8
    assert json.loads((tmp_path / "plan.json").read_text())["about"] == {"model": "tiny"}
    with pytest.raises(ConfigError, match=r"holds an evaluation with about\.model tiny, not tinny"):
        run(ScriptedRunner(every_second_attempt), tmp_path, about={"model": "tinny"})


RECORD = {"episode_id": "a:1:0", "kind": "trajectory", "task_id": "a:1", "reward": 1.0}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("episodes.jsonl", "garbage\n"),
        ("episodes.jsonl", "{}\n"),
        *[("plan.json", text) for text in ("{", "[]", "5", '"x"', "[" * 100_000)],
        *[
            ("episodes.jsonl", json.dumps({**RECORD, name: value}) + "\n")
            for name, value in [
                *[("episode_id", ["a"]), ("reward", "x"), ("success", "yes"), ("success", 2), ("turns", 5)],
                *[("info", [1]), ("env_kwargs", "x"), ("prompt_tokens", "many")],
            ]
        ],
    ],
)
def test_a_damaged_folder_is_one_clear_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        run(ScriptedRunner(every_second_attempt), tmp_path)


@pytest.mark.parametrize(
    "name", ["plan.json", "episodes.jsonl", "results.json.new", "report.html.new", "transcripts/seed_1000_attempt_0.md"]
)
def test_nothing_is_written_through_a_link_in_a_folder_of_somebody_else(tmp_path: Path, name: str) -> None:
    folder, ours = tmp_path / "copied", tmp_path / "ours"
    ours.write_text("{}")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(ours)
    with pytest.raises(ConfigError, match="is a link"):
        run(ScriptedRunner(every_second_attempt), folder)
    assert ours.read_text() == "{}"


def test_results_and_transcripts_can_be_read_by_scripts_and_people(tmp_path: Path) -> None:
    def script(spec: EpisodeSpec) -> Any:
        return "env_timeout" if spec.episode_id == "test:1000:0" else True

    run(ScriptedRunner(script), tmp_path, about={"model": "tiny"})
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["about"] == {"model": "tiny"}
    assert results["pass_at_k"]["2"]["count"] == 3
    assert len(list((tmp_path / "transcripts").iterdir())) == 8
    text = (tmp_path / "transcripts" / "seed_1001_attempt_0.md").read_text()
    assert "6 * 7?" in text
    assert "success yes" in text
    assert "env_timeout" in (tmp_path / "transcripts" / "seed_1000_attempt_0.md").read_text()


def test_episodes_that_the_runner_never_reported_are_counted() -> None:
    class Forgetful(ScriptedRunner):
        async def run(self, episodes: Any, *, max_concurrent: int) -> Any:
            async for outcome in super().run(episodes, max_concurrent=max_concurrent):
                if len(self.ran) <= 5:
                    yield outcome

    assert run(Forgetful(every_second_attempt)).failures == {"not_run": 3}


def test_the_table_lines_up() -> None:
    script: Script = every_second_attempt
    lines = run(ScriptedRunner(script)).table().splitlines()
    assert lines[0] == "test"
    assert lines[1] == "  tasks x attempts  4 x 2, 8 scored"
    assert lines[4].startswith("  pass@1            0.500 [")
