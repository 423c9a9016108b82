"""A run folder that was made elsewhere: what its files name is not run unless the user says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from recorded_run import play, spec_of, write_run

from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import ConfigError
from roll_flash.evaluator import EvalRequest, plan_evaluation
from roll_flash.run.origin import MARK
from roll_flash.run.run_dir import RunDir
from roll_flash.types import Task

REFUSED = "was not made here by you, and this runs what its files name"


@pytest.fixture(autouse=True)
def _home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def hostile_run(runs: Path, reached: Path) -> Path:
    """A run whose recorded episode has a shell command as the reward of its environment."""
    rewards = [{"function": "exact"}, {"function": "os:system", "kwargs": {"command": f"touch {reached}"}}]
    messages = [{"role": "user", "content": "Say x."}]
    task = Task("Dataset-v0:7", "Dataset-v0", 7, {"messages": messages, "answer": "x", "rewards": rewards})
    outcome, _, _ = play(spec_of(task, max_turns=2), ["x"])
    rows = runs.parent / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Say x.", "answer": "x"}))
    return write_run(
        runs,
        [outcome],
        envs=[{"id": "Dataset-v0", "data": str(rows), "reward": "exact"}],
        inference={"engine": "transformers"},
    )


def test_replay_runs_nothing_of_a_copied_folder_without_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = tmp_path / "reached"
    made_here = hostile_run(tmp_path / "runs", reached)
    reached.unlink()
    copied = tmp_path / "elsewhere" / "recorded"
    shutil.copytree(made_here, copied)
    assert main(["replay", str(copied), "g00000001-r0"]) == 2
    line = capsys.readouterr().err
    assert REFUSED in line
    assert line.endswith("add --trust\n")
    assert not reached.exists()
    assert main(["replay", str(copied), "g00000001-r0", "--trust"]) == 0
    assert reached.exists()
    assert main(["replay", str(made_here), "g00000001-r0"]) == 0


@pytest.mark.parametrize("change", ["config.yaml", MARK, "key"])
def test_a_mark_holds_for_one_config_and_one_user(change: str, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "runs", tmp_path / "reached")
    if change == "key":
        shutil.rmtree(tmp_path / "state")
    else:
        (run / change).write_text((run / change).read_text().replace("0", "1"))
    assert main(["replay", str(run), "g00000001-r0"]) == 2


def test_a_mark_that_is_no_plain_file_is_none(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "runs", tmp_path / "reached")
    (run / MARK).unlink()
    (run / MARK).mkdir()
    assert main(["replay", str(run), "g00000001-r0"]) == 2


def foreign_run(tmp_path: Path, **tree: object) -> Path:
    config = {"name": "made", "runs": str(tmp_path), "model": {"path": "tiny"}, "envs": [{"id": "Sum-v0"}], **tree}
    with RunDir.create(load_config(config), resume=False) as run, run.writing_checkpoint(1) as checkpoint:
        (checkpoint / "hf").mkdir()
        (checkpoint / "hf/config.json").write_text("{}")
    shutil.rmtree(tmp_path / "state")
    return run.folder


def test_steps_are_not_repeated_and_nothing_is_evaluated_by_the_config_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign_run(tmp_path)
    assert main(["verify", str(run), "--repeat"]) == 2
    assert REFUSED in capsys.readouterr().err
    with pytest.raises(ConfigError, match=REFUSED):
        plan_evaluation(EvalRequest(model=str(run)))
    assert plan_evaluation(EvalRequest(model=str(run), trust=True)).config.envs[0].id == "Sum-v0"


def test_episodes_of_another_are_no_fork_points_without_trust(tmp_path: Path) -> None:
    source = {"entry_point": "fork_points", "kwargs": {"run": str(foreign_run(tmp_path))}}
    envs = [{"id": "Sum-v0", "task_source": source}]
    config = load_config({"model": {"path": "tiny"}, "envs": envs})
    with pytest.raises(ConfigError, match=REFUSED):
        open_tasks(config)


def test_a_home_that_cannot_be_written_makes_no_mark_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = hostile_run(tmp_path / "runs", tmp_path / "reached")
    assert not (run / MARK).exists()
