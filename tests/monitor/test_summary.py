"""The closing words of a run: true figures, books that are checked, and commands that can be pasted."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from roll_flash.config.tree import load_config
from roll_flash.evaluation.result import EvalResult, score
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.run.run_dir import RunDir
from roll_flash.summary import check_counts, closing_text, command_name, disk_use, next_commands, summarize
from tests.command_line import parse

BOOKS = {
    **{"produced": 100, "trained": 80, "waiting": 4, "dropped_stale": 15, "dropped_too_few_trajectories": 1},
    **{"failed_env_timeout": 2, "failed_sandbox_error": 1},
}


def held_out(successes: int, tasks: int = 10) -> EvalResult:
    episode = {"kind": "trajectory", "reward": 1.0, "end": "terminated", "policy_tokens": 3, "turns": [1]}
    records = [{**episode, "task_id": str(number), "success": number < successes} for number in range(tasks)]
    return score(records, label="test", tasks=tasks, attempts=1, seconds=1.0)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    tree = {"name": "maze", "runs": str(tmp_path), "steps": 2, "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
    with RunDir.create(load_config(tree), resume=False) as run:
        run.model.mkdir()
        (run.model / "config.json").write_text("{}")
        log = MetricsLog(run.folder, tensorboard=False)
        log.log(0, {"eval/success": 0.1})
        log.log(1, {"reward": 0.5, "step_s": 100.0, "tokens_per_s": 50.0})
        log.log(2, {"reward": float("nan"), "step_s": 20.0, "tokens_per_s": 100.0})
        log.close()
        return run.folder


def summary_of(run_folder: Path, **changes: Any) -> dict[str, Any]:
    return summarize(run_folder, **{"before": held_out(1), "after": held_out(9), "books": BOOKS, **changes})


def test_the_figures_come_from_what_was_logged(run_folder: Path) -> None:
    summary = summary_of(run_folder)
    assert (summary["steps"], summary["total_steps"], summary["seconds"]) == (2, 2, 120.0)
    assert summary["tokens"] == 7000
    assert summary["tokens_per_s"] == pytest.approx(7000 / 120)
    assert Path(summary["plot"]).is_file()
    assert summary["model_folder"] == str(run_folder / "model")


def test_the_text_tells_success_before_and_after_with_intervals_and_what_became_of_every_episode(
    run_folder: Path,
) -> None:
    text = closing_text(summary_of(run_folder))
    assert "0.10 [0.02, 0.40] -> 0.90 [0.60, 0.98]" in text
    assert "2 of 2 in 2 min 00 s" in text
    assert "100 = 80 trained + 16 (stale 15, too_few_trajectories 1) dropped + 4 left over; the books balance" in text
    assert "3 (env_timeout 2, sandbox_error 1)" in text
    assert "1 metrics were NaN or infinite" in text
    assert str(run_folder) in text


def test_books_that_do_not_balance_are_shouted_about(run_folder: Path) -> None:
    assert not check_counts({**BOOKS, "produced": 101})["balance"]
    assert "DO NOT BALANCE" in closing_text(summary_of(run_folder, books={**BOOKS, "produced": 101}))


def test_what_was_not_measured_is_not_claimed(run_folder: Path) -> None:
    assert "not measured" in closing_text(summary_of(run_folder, before=None, after=None))
    assert "not measured -> 0.90" in closing_text(summary_of(run_folder, before=None))


def test_without_reported_success_the_reward_is_the_score(run_folder: Path) -> None:
    episode = {"kind": "trajectory", "reward": 0.25, "end": "terminated", "policy_tokens": 3, "turns": [1]}
    records = [{**episode, "task_id": str(number), "success": None} for number in range(4)]
    result = score(records, label="test", tasks=4, attempts=1, seconds=1.0)
    assert result.scores.startswith("reward 0.25")
    text = closing_text(summary_of(run_folder, before=None, after=result))
    assert "held-out reward" in text
    assert "not measured -> 0.25 [" in text
    assert "None" not in text
    assert "held-out success" in closing_text(summary_of(run_folder))


def test_the_three_commands_are_accepted_by_the_command_line_as_printed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = next_commands(summary_of(run_folder))
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        assert words[: len(shlex.split(command_name()))] == shlex.split(command_name())
        parse(words[len(shlex.split(command_name())) :])


def test_commands_name_the_program_by_its_file_when_it_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    program = shlex.split(command_name())[0]
    assert Path(program).exists()


def test_a_file_that_is_replaced_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    found = [tmp_path / ".status.json.new", tmp_path / "status.json"]
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(found))
    assert disk_use(tmp_path) == {"status.json": 2}


def test_the_size_on_disk_is_told_and_a_file_in_two_places_counts_once(run_folder: Path) -> None:
    weights = run_folder / "checkpoints" / "model.safetensors"
    weights.parent.mkdir(exist_ok=True)
    weights.write_bytes(bytes(3_000_000))
    os.link(weights, run_folder / "model" / "model.safetensors")
    sizes = disk_use(run_folder)
    assert sizes["checkpoints"] == 3_000_000
    assert sizes["model"] == len("{}")
    assert f"{sum(sizes.values()) / 1e6:.1f} MB (checkpoints 3.0 MB, " in closing_text(summary_of(run_folder))
