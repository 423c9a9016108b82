"""The run folder: who may use it, what survives a crash, and which checkpoints count."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from roll_flash.config.tree import Config, load_config
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import CheckpointError, ConfigError, RunError
from roll_flash.monitor.episodes import EpisodesWriter, find_trajectories, read_episodes
from roll_flash.monitor.progress import Progress
from roll_flash.monitor.status import read_status
from roll_flash.run import run_dir, scale_request
from roll_flash.run.checkpoints.disk_use import check_disk, checkpoint_bytes
from roll_flash.run.run_dir import (
    Checkpoint,
    RunDir,
    check_run_folder,
    export_checkpoint,
    find_checkpoint,
    find_exported,
    find_run,
    in_use,
    list_checkpoints,
    remove_checkpoints,
)
from roll_flash.system import system
from roll_flash.system.resume import check_tasks, resume
from roll_flash.types import EpisodeFailure, Task, Trajectory, Turn

TASK = Task("Maze-v0:7", "Maze-v0", 7, {"size": 3})


def config(runs: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {"name": "first", "runs": str(runs), "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
    return load_config({**tree, **changes})


def trajectory(episode_id: str = "e1", reward: float = 0.5) -> Trajectory:
    return Trajectory(
        episode_id=episode_id,
        group_id="g1",
        task=TASK,
        token_ids=np.array([5, 6, 7, 8, 9], np.int32),
        policy_mask=np.array([0, 0, 1, 1, 0], np.bool_),
        logprobs=np.array([0, 0, -0.3, -1.25, 0], np.float32),
        versions=np.array([-1, -1, 3, 4, -1], np.int32),
        turns=(Turn(2, 4, "go left", "a wall", 0.5, "stop", 0.2, 0.1),),
        messages=({"role": "user", "content": "where?"}, {"role": "assistant", "content": "go left"}),
        reward=reward,
        success=True,
        end="terminated",
        prompt_length=2,
        started_s=100.0,
        finished_s=101.5,
        info={"walls": np.int64(2)},
    )


def failure(episode_id: str = "e2") -> EpisodeFailure:
    return EpisodeFailure(episode_id, "g1", TASK, "sandbox_error", "the sandbox died", turn=1, attempt=0)


def test_a_run_is_its_users_alone(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path / "runs"), resume=False).close()
    folder = tmp_path / "runs" / "first"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)  # as its user wants it
    RunDir.create(config(tmp_path / "runs"), resume=True).close()
    assert folder.stat().st_mode & 0o777 == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_folder_of_somebody_else_is_not_used(tmp_path: Path, resume: bool) -> None:
    folder = tmp_path / "runs" / "first"
    if resume:
        RunDir.create(config(tmp_path / "runs"), resume=False).close()
    folder.mkdir(parents=True, exist_ok=True)
    os.chown(folder, 12345, 12345)
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=r"first: belongs to the user with id 12345.*chown, or choose another"):
        RunDir.create(config(tmp_path / "runs"), resume=resume)
    assert sorted(folder.iterdir()) == before


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path / "runs"), resume=False).close()
    lock, other = tmp_path / "runs" / "first" / ".lock", tmp_path / "mine"
    other.write_text("keep me")
    lock.unlink()
    lock.symlink_to(other)
    with pytest.raises(ConfigError, match=r"\.lock: is a link.*remove it"):
        RunDir.create(config(tmp_path / "runs"), resume=True)
    assert other.read_text() == "keep me"


def test_a_new_run_gets_its_folders_and_a_config_that_can_be_run_again(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=7)
    with RunDir.create(settings, resume=False) as run:
        assert {path.name for path in run.folder.iterdir() if path.is_dir()} == {
            *("episodes", "journal", "checkpoints", "logs", "eval", "plots")
        }
        assert load_config(run.folder / "config.yaml") == settings


def test_a_name_that_exists_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run, EpisodesWriter(run.episodes) as episodes:
        episodes.write(0, trajectory())
    with pytest.raises(ConfigError, match=r"--resume .*name=OTHER"):
        RunDir.create(config(tmp_path), resume=False)


def test_the_name_of_a_run_that_failed_while_it_started_is_free(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path, steps=3), resume=False).close()
    with RunDir.create(config(tmp_path, steps=5), resume=False) as run:
        assert load_config(run.folder / "config.yaml").steps == 5


def test_resume_of_a_run_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDir.create(config(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"path": "smollm2-135m"}}, "model.path"),
        ({"envs": [{"id": "Other-v0"}]}, "envs.0.id"),
        ({"envs": [{"id": "Maze-v0", "kwargs": {"size": 9}}]}, "envs.0.kwargs"),
        ({"envs": [{"id": "Maze-v0", "task_source": {"entry_point": "mine.py:rows"}}]}, "envs.0.task_source"),
        ({"envs": [{"id": "Maze-v0", "weight": 3.0}]}, "envs.0.weight"),
        ({"seed": 1}, "seed"),
        ({"learner": {"advantage": "rloo"}}, "learner.advantage"),
        ({"learner": {"loss": {"name": "ppo"}}}, "learner.loss.name"),
        ({"learner": {"lora": {"alpha": 8.0}}}, "learner.lora.alpha"),
        ({"learner": {"lora": {"rank": 4}}}, "learner.lora.rank"),
    ],
)
def test_resume_with_another_model_environment_or_algorithm_is_refused(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    RunDir.create(config(tmp_path), resume=False).close()
    with pytest.raises(ConfigError, match=f"^{key}: the run in .* was started with"):
        RunDir.create(config(tmp_path, **changes), resume=True)


@pytest.mark.parametrize(
    ("envs", "line"),
    [
        ([{}, {"kwargs": {"size": 9}}], "envs.1.kwargs: the run in .* was started with {'size': 4}, not {'size': 9}"),
        ([{}, {"train_seeds": [5, 9]}], r"envs.1.train_seeds: .* with \[0, 1000000\], not \[5, 9\]"),
        ([{}], "the number of envs: the run in .* was started with 2, not 1, and .*; resume it with that value"),
    ],
)
def test_resume_names_the_environment_and_the_key_that_changed(tmp_path: Path, envs: list[Any], line: str) -> None:
    begun = [{"id": "Maze-v0"}, {"id": "Other-v0", "kwargs": {"size": 4}}]
    RunDir.create(config(tmp_path, envs=begun), resume=False).close()
    changed = [{**before, **now} for before, now in zip(begun, envs, strict=False)]
    with pytest.raises(ConfigError, match=f"^{line}"):
        RunDir.create(config(tmp_path, envs=changed), resume=True)


def test_resume_may_change_the_turns_of_any_environment(tmp_path: Path) -> None:
    begun = [{"id": "Maze-v0"}, {"id": "Other-v0"}]
    RunDir.create(config(tmp_path, envs=begun), resume=False).close()
    changed = config(tmp_path, envs=[begun[0], {**begun[1], "max_turns": 3}])
    assert check_run_folder(changed, resume=True) == ["envs.1.max_turns: 8 -> 3"]


STATE = {"mark": "x", "version": 2, "next_group": 4, "groups": [], "requeued": [], "tasks": {}, "async_ratio": None}


def test_the_status_of_a_run_that_goes_on_begins_at_its_step(tmp_path: Path) -> None:
    """It said step 0 until the next step had ended, and for ever if there was none left."""
    with RunDir.create(config(tmp_path), resume=False) as run, run.writing_checkpoint(5) as folder:
        (folder / "trainer.json").write_text(json.dumps(STATE))
    said, settings = io.StringIO(), config(tmp_path, steps=5)
    with (
        RunDir.create(settings, resume=True) as run,
        Progress(5, stream=said, run_folder=run.folder) as progress,
    ):
        checked = Mock(model_folder=tmp_path, sandboxes=[], fit=None)
        system.Start.of(settings, run, checked, resume=True).announce(progress)
    assert read_status(run.folder).step == 5
    assert "nothing is left to train: the run has 5 steps, and steps=5" in said.getvalue()


def test_resume_with_other_rows_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """It was refused when servers and learner ran, with the advice to move the journal away."""
    rows = [f'{{"prompt": "{number} + 1?", "answer": {number + 1}}}' for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    env = {"id": "Dataset-v0", "data": str(tmp_path / "rows.jsonl"), "reward": "number"}
    settings = config(tmp_path, envs=[env])
    check_tasks(settings)
    with RunDir.create(settings, resume=False) as run, run.writing_checkpoint(2) as folder:
        (folder / "trainer.json").write_text(json.dumps({**STATE, "tasks": open_tasks(settings).state()}))
    check_tasks(settings)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[1:]))
    with pytest.raises(ConfigError, match=r"step_2: the training rows of .* has changed; put back what it was"):
        check_tasks(settings)


def test_resume_with_another_kind_of_critic_is_refused(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path, learner={"advantage": "gae"}), resume=False).close()
    changed = config(tmp_path, learner={"advantage": "gae", "critic": {"kind": "model"}})
    with pytest.raises(ConfigError, match=r"^learner\.critic\.kind: the run in .* was started with 'head'"):
        RunDir.create(changed, resume=True)


def test_resume_may_change_the_number_of_steps_and_keeps_the_old_config(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path, steps=5), resume=False).close()
    with RunDir.create(config(tmp_path, steps=9), resume=True) as run:
        assert load_config(run.folder / "config.yaml").steps == 9
        assert load_config(run.folder / "config.yaml.bak").steps == 5


def test_resume_names_each_changed_key_with_its_old_and_new_value(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path, steps=5), resume=False).close()
    changed = config(tmp_path, steps=9, learner={"learning_rate": 3e-5, "betas": [0.8, 0.9]})
    lines = ["learner.betas: [0.9, 0.95] -> [0.8, 0.9]", "learner.learning_rate: 1e-05 -> 3e-05", "steps: 5 -> 9"]
    assert check_run_folder(changed, resume=True) == lines
    with RunDir.create(changed, resume=True) as run:
        assert run.config_changes == lines
        said = io.StringIO()
        start = system.Start.of(changed, run, Mock(model_folder=tmp_path, sandboxes=[], fit=None), resume=True)
        start.announce(Progress(1, stream=said))
        assert all(f"changed by this resume: {line}" in said.getvalue() for line in lines)
    with RunDir.create(changed, resume=True) as run:
        assert run.config_changes == []


def model_folder(folder: Path, parameters: int) -> Path:
    """A model folder whose file has the header of one tensor, and none of its bytes."""
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}})
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    return folder


def test_the_disk_that_checkpoints_take_is_said_before_the_run(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", 1 << 20)
    settings = config(tmp_path, steps=20, checkpoint={"keep": 2, "keep_every": 10})
    assert checkpoint_bytes(settings, model) == 16 << 20
    assert checkpoint_bytes(config(tmp_path, learner={"lora": {"rank": 4}}), model) == 4 << 20
    assert check_disk(settings, model).startswith(
        "checkpoints take about 0.02 GiB each; up to 4 kept, and one more while it is written: 0.08 GiB; "
    )


def test_a_disk_without_room_for_two_checkpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "model", 1 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Mock(free=31 << 30))
    with pytest.raises(RunError, match=r"about 16.00 GiB each.* 32.00 GiB are needed .* only 31.00 GiB are free"):
        check_disk(config(tmp_path), model)
    assert "31.00 GiB are free" in check_disk(config(tmp_path), model, existing=1)


def test_two_processes_cannot_share_a_run_folder(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path), resume=False).close()
    code = (
        "import sys\nfrom pathlib import Path\nfrom roll_flash.config.tree import load_config\n"
        "from roll_flash.run.run_dir import RunDir\n"
        "run = RunDir.create(load_config(Path(sys.argv[1])), resume=True)\nprint('held', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "first" / "config.yaml")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
            RunDir.create(config(tmp_path), resume=True)
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    RunDir.create(config(tmp_path), resume=True).close()


def test_a_full_disk_is_noticed_before_anything_starts_and_leaves_the_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Mock(free=5 << 20))
    with pytest.raises(RunError, match="1,024 MiB are needed on this disk but only 5 MiB are free"):
        RunDir.create(config(tmp_path), resume=False)
    monkeypatch.undo()
    RunDir.create(config(tmp_path), resume=False).close()


def test_episodes_are_a_table_with_every_token_and_turn(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run, EpisodesWriter(run.episodes) as writer:
        writer.write(12, trajectory())
        writer.write(12, failure())
        writer.write(13, trajectory("e3"))
    lines = (run.episodes / "step_000012.jsonl").read_text().splitlines()
    good, failed = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert set(good) == set(failed)
    assert good["kind"] == "trajectory"
    assert good["token_ids"] == [5, 6, 7, 8, 9]
    assert good["policy_mask"] == [0, 0, 1, 1, 0]
    assert good["versions"] == [-1, -1, 3, 4, -1]
    assert good["turns"][0]["observation"] == "a wall"
    assert failed["kind"] == "failure"
    assert failed["cause"] == "sandbox_error"
    assert [record["step"] for record in read_episodes(run.episodes)] == [12, 12, 13]


def test_logprobs_come_back_bit_by_bit(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    episode = trajectory()
    object.__setattr__(episode, "logprobs", values)
    with RunDir.create(config(tmp_path), resume=False) as run, EpisodesWriter(run.episodes) as writer:
        writer.write(1, episode)
    (record,) = read_episodes(run.episodes)
    assert np.array_equal(np.array(record["logprobs"], np.float32), values)


def test_a_half_written_episode_is_no_obstacle_to_reading_or_going_on(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run, EpisodesWriter(run.episodes) as writer:
        writer.write(1, trajectory("e1"))
        path = run.episodes / "step_000001.jsonl"
    with path.open("a") as file:
        file.write('{"episode_id": "e2", "tok')
    assert [record["episode_id"] for record in read_episodes(path)] == ["e1"]
    with RunDir.create(config(tmp_path), resume=True) as run, EpisodesWriter(run.episodes) as writer:
        writer.write(1, trajectory("e3"))
    assert [record["episode_id"] for record in read_episodes(path)] == ["e1", "e3"]


@pytest.mark.parametrize("last_written", [None, "an episode", "a dropped group"])
def test_a_resumed_run_uses_no_group_id_that_was_written_down_after_the_checkpoint(
    tmp_path: Path, last_written: str | None
) -> None:
    state = {
        "mark": "0",
        "version": 1,
        "tasks": {"cursor": 5},
        "next_group": 5,
        "groups": [],
        "requeued": [],
        "async_ratio": None,
    }
    with RunDir.create(config(tmp_path), resume=False) as run:
        with EpisodesWriter(run.episodes) as writer:
            writer.write(1, failure())
            if last_written == "an episode":
                writer.write(1, replace(failure(), group_id="g00000007"))
            if last_written == "a dropped group":
                writer.write_dropped(1, {"group_id": "g00000007"})
        with run.writing_checkpoint(1) as folder:
            (folder / "trainer.json").write_text(json.dumps(state))
        checkpoint, learner = Checkpoint(1, run.checkpoint_folder(1)), AsyncMock()
        resumed = asyncio.run(resume(config(tmp_path), run, checkpoint, learner, lambda _: None))
    learner.load.assert_awaited_once_with(checkpoint.state)
    assert resumed.recovery.next_group == (5 if last_written is None else 8)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"a": 1}\nnot json\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"step_000001.jsonl, line 2"):
        read_episodes(path)


def write_checkpoint(run: RunDir, step: int, text: str = "weights", error: OSError | None = None) -> None:
    with run.writing_checkpoint(step) as folder:
        (folder / "state").mkdir()
        if error is not None:
            raise error
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text(json.dumps({"text": text}))
        (folder / "trainer.json").write_text("{}")


def test_the_latest_checkpoint_is_the_highest_step_that_is_complete(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        assert run.latest_checkpoint() is None
        for step in (9, 10, 2):
            write_checkpoint(run, step)
        (run.checkpoint_folder(99) / "state").mkdir(parents=True)
        latest = run.latest_checkpoint()
        assert latest is not None
        assert latest.step == 10
        assert latest.trainer.read_text() == "{}"


def test_a_checkpoint_that_fails_half_way_leaves_the_one_before(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 4, "old")
        with pytest.raises(CheckpointError, match="No space left"):
            write_checkpoint(run, 4, "new", error=OSError(28, "No space left on device"))
        assert [path.name for path in run.checkpoints_folder.iterdir()] == ["step_4"]
        latest = run.latest_checkpoint()
        assert latest is not None
        assert json.loads((latest.hf / "config.json").read_text()) == {"text": "old"}


def test_kill_9_while_a_checkpoint_is_written_costs_only_that_checkpoint(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 4)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom roll_flash.config.tree import load_config\n"
        "from roll_flash.run.run_dir import RunDir\n"
        "run = RunDir.create(load_config(Path(sys.argv[1])), resume=True)\n"
        "with run.writing_checkpoint(5) as folder:\n"
        "    (folder / 'hf').mkdir()\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run.folder / "config.yaml")], check=False, timeout=60)
    assert (run.checkpoints_folder / "step_5.partial").exists()
    with RunDir.create(config(tmp_path), resume=True) as run:
        assert [checkpoint.step for checkpoint in list_checkpoints(run.folder)] == [4]
        assert [path.name for path in run.checkpoints_folder.iterdir()] == ["step_4"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def resumed(runs: Path) -> RunDir:
    return RunDir.create(config(runs), resume=True)


@pytest.mark.parametrize("damage", ["has other bytes", "has 1 of ", "is missing", "checksums.json cannot be read"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        for step in (3, 4, 5):
            write_checkpoint(run, step)
    model = run.checkpoint_folder(5) / "hf" / "config.json"
    if damage == "has other bytes":
        flip_a_bit(model)
    elif damage == "is missing":
        model.unlink()
    elif damage == "has 1 of ":
        os.truncate(model, 1)
    else:
        (run.checkpoint_folder(5) / "checksums.json").write_text("{")
    (run.checkpoints_folder / "step_5.bak").mkdir()  # of an earlier damage
    with resumed(tmp_path) as run:
        latest = run.latest_checkpoint()
        assert latest is not None
        assert latest.step == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"step_5: damaged ({'' if 'json' in damage else 'hf/config.json '}{damage}" in line
    assert "now step_5.bak2, the run uses step 4" in line
    with resumed(tmp_path):
        assert capsys.readouterr().err == ""


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 3)
    flip_a_bit(run.checkpoint_folder(3) / "trainer.json")
    with pytest.raises(CheckpointError, match=r"step_3: damaged \(trainer.json has other bytes.*name=OTHER"):
        resumed(tmp_path)
    assert list_checkpoints(run.folder), "it is left as it is"
    run.checkpoints_folder.rename(tmp_path / "aside")  # as the line says
    with resumed(tmp_path) as run:
        assert run.latest_checkpoint() is None


def test_a_checkpoint_of_an_older_version_is_used_and_said_to_be_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 3)
    (run.checkpoint_folder(3) / "checksums.json").unlink()
    with resumed(tmp_path) as run:
        assert run.latest_checkpoint() is not None
    assert "step_3: has no checksums (of an older version), so it is not checked" in capsys.readouterr().err


def test_a_checkpoint_that_the_disk_gives_back_changed_does_not_replace_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 3)
        monkeypatch.setattr("roll_flash.run.run_dir.sync_tree", lambda folder: flip_a_bit(folder / "hf/config.json"))
        with pytest.raises(CheckpointError, match=r"step_4: read back from the disk, hf/config.json has other bytes"):
            write_checkpoint(run, 4)
        assert [path.name for path in run.checkpoints_folder.iterdir()] == ["step_3"]


def test_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    with RunDir.create(config(tmp_path), resume=False) as run:
        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(Path, "rename", recorded_rename)
        write_checkpoint(run, 3)
    files = ["COMPLETE", "checksums.json", "config.json", "hf", "state", "step_3.partial", "trainer.json"]
    assert sorted(done[: len(files)]) == files
    assert done[len(files) :] == ["rename", "checkpoints"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 4, "old")
        write_checkpoint(run, 4, "new")
        assert json.loads((run.checkpoint_folder(4) / "hf" / "config.json").read_text()) == {"text": "new"}


def test_kill_9_between_the_renames_of_a_replacement_loses_no_checkpoint(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 4, "old")
        run.checkpoint_folder(4).rename(run.checkpoints_folder / "step_4.old")
    with RunDir.create(config(tmp_path), resume=True) as run:
        assert [checkpoint.step for checkpoint in list_checkpoints(run.folder)] == [4]


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        for step in (1, 2, 3, 10):
            write_checkpoint(run, step)
        run.prune_checkpoints(keep=2)
        assert [checkpoint.step for checkpoint in list_checkpoints(run.folder)] == [3, 10]


def test_pruning_also_keeps_every_so_many_steps(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        for step in (1, 10, 15, 20, 21):
            write_checkpoint(run, step)
        run.prune_checkpoints(keep=1, keep_every=10)
        assert [checkpoint.step for checkpoint in list_checkpoints(run.folder)] == [10, 20, 21]


def test_a_checkpoint_that_serves_is_kept_until_the_next_time(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        for step in (1, 2):
            write_checkpoint(run, step)
        with in_use(run.checkpoint_folder(1) / "hf"), in_use(tmp_path / "a model of the user"):
            run.prune_checkpoints(keep=1)
            assert [checkpoint.step for checkpoint in list_checkpoints(run.folder)] == [1, 2]
    with in_use(run.checkpoint_folder(1) / "hf"), pytest.raises(ConfigError, match="step_1: an evaluation or a server"):
        remove_checkpoints(run.folder, [1])
    remove_checkpoints(run.folder, [1])
    assert [checkpoint.step for checkpoint in list_checkpoints(run.folder)] == [2]


def test_rewinding_sets_later_steps_aside_and_keeps_them(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run, EpisodesWriter(run.episodes) as writer:
        for step in (3, 4, 5):
            writer.write(step, trajectory())
        (run.eval / "step_5").mkdir()
        (run.eval / "before").mkdir()
        run.set_aside_after(4)
        run.set_aside_after(4)  # nothing is left to rename
        assert sorted(path.name for path in run.episodes.iterdir()) == [
            *("step_000003.jsonl", "step_000004.jsonl", "step_000005.jsonl.bak")
        ]
        assert sorted(path.name for path in run.eval.iterdir()) == ["before", "step_5.bak"]


def test_a_run_without_a_checkpoint_begins_again_under_its_name_and_says_so(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run, EpisodesWriter(run.episodes) as writer:
        writer.write(0, trajectory())
    with RunDir.create(config(tmp_path), resume=True) as run:
        checked = Mock(model_folder=tmp_path, sandboxes=[], fit=None)
        start = system.Start.of(config(tmp_path), run, checked, resume=True)
        assert start.resumes
        assert start.checkpoint is None
        said = io.StringIO()
        start.announce(Progress(1, stream=said))
        assert "the run begins again from its start" in said.getvalue()
        run.begin_again()
        assert [path.suffix for path in run.episodes.iterdir()] == [".bak"]


def test_a_run_is_found_by_name_or_folder_and_its_checkpoint_by_step(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 3)
        write_checkpoint(run, 8)
    runs = str(tmp_path)
    assert find_run("first", runs) == find_run(str(run.folder), runs) == run.folder
    assert find_checkpoint("first", runs).step == 8
    assert find_checkpoint("first@3", runs).step == 3
    with pytest.raises(ConfigError, match="has: 3, 8"):
        find_checkpoint("first@5", runs)
    with pytest.raises(ConfigError, match=r"did you mean first\?"):
        find_run("fist", runs)


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path), resume=False).close()
    with pytest.raises(ConfigError, match="no complete checkpoint yet"):
        find_checkpoint("first", str(tmp_path))


def test_export_copies_the_model_and_never_writes_into_a_folder_with_something_in_it(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 3)
    target = tmp_path / "exported"
    checkpoint, folder = export_checkpoint(str(run.folder), str(target))
    assert checkpoint.step == 3
    assert json.loads((folder / "config.json").read_text()) == {"text": "weights"}
    with pytest.raises(ConfigError, match="not empty"):
        export_checkpoint(str(run.folder), str(target))


def test_a_model_with_links_is_not_exported(tmp_path: Path) -> None:
    """In a run of somebody else, one could lead to a key of ours, which would be uploaded with the model."""
    with RunDir.create(config(tmp_path), resume=False) as run:
        write_checkpoint(run, 3)
    (tmp_path / "key").write_text("secret")
    (run.folder / "checkpoints/step_3/hf/notes.txt").symlink_to(tmp_path / "key")
    with pytest.raises(CheckpointError, match=r"notes\.txt: a link, which may lead to any file"):
        export_checkpoint(str(run.folder), str(tmp_path / "exported"))
    with pytest.raises(CheckpointError, match=r"notes\.txt: a link, which may lead to any file"):
        find_exported(str(run.folder))


@pytest.mark.parametrize("only_cpus", [True, False])
def test_the_timeline_says_on_how_many_cores_a_run_computes_unless_a_gpu_does(
    only_cpus: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "is_cpu_installation", lambda: only_cpus)
    with RunDir.create(config(tmp_path), resume=False) as run:
        run.log_timeline({"step": 1})
    (line,) = map(json.loads, (run.logs / run_dir.TIMELINE).read_text().splitlines())
    assert line == {"step": 1, "cpu_cores": len(os.sched_getaffinity(0)) if only_cpus else 0}


@pytest.mark.parametrize("content", ["{", "[]", '{"id": "1", "gpus": 2}'])
def test_a_file_that_is_no_request_to_scale_is_removed_and_the_run_goes_on(content: str, tmp_path: Path) -> None:
    (tmp_path / scale_request.REQUEST).write_text(content)
    assert scale_request.take_request(tmp_path) is None
    assert not (tmp_path / scale_request.REQUEST).exists()


def test_a_damaged_id_in_the_log_of_episodes_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "step_000000.jsonl").write_bytes(b'{"crc32":"00000000","kind":"trajectory","episode_id":"g0\xff-r0"}\n')
    assert find_trajectories(tmp_path, {"g0-r0": TASK}) == {}
