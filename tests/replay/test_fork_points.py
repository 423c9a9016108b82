"""The task source `fork_points`: which states it has, and that a run's config, checkpoint and checks know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded_run import play, spec_of, write_run

from roll_flash.config.tree import Config, RolloutConfig, load_config
from roll_flash.envs.hosting.environments import check_environments
from roll_flash.envs.task_sources import first_tasks, open_tasks
from roll_flash.errors import ConfigError, RunError
from roll_flash.monitor.episode_files import steps
from roll_flash.replay.fork_points import find_fork_points
from roll_flash.rollout.episodes.prefix import Prefix
from roll_flash.scheduling.tasks import TaskSource
from roll_flash.types import EpisodeFailure, Task, Trajectory

ECHO = "tests.replay.replay_envs:Echo-v0"
MIXED = {"g00000001-r0": ["one", "two", "three"], "g00000001-r1": ["1", "2", "3"]}
EVEN = {"g00000002-r0": ["a", "b", "c"], "g00000002-r1": ["d", "e", "f"]}


@pytest.fixture(autouse=True)
def _nothing_is_kept_from_another_test() -> None:
    find_fork_points.cache_clear()


def run_of(runs: Path, texts: dict[str, list[str]], env_id: str = ECHO, **kwargs: Any) -> Path:
    outcomes = [
        play(spec_of(Task(f"{env_id}:{name[8]}", env_id, int(name[8]), kwargs), name), said)[0]
        for name, said in texts.items()
    ]
    failed = spec_of(Task("failed", env_id, 1), "g00000001-r2")
    failure = EpisodeFailure(failed.episode_id, failed.group_id, failed.task, "env_error", "boom", 1, 0)
    return write_run(runs, [*outcomes, failure], envs=[{"id": env_id}])


def config_of(run: Path, **env: Any) -> Config:
    source = {"entry_point": "fork_points", "kwargs": {"run": str(run)}}
    return load_config({"model": {"path": "tiny"}, "envs": [{"id": ECHO, "task_source": source, **env}]})


def drawn(source: TaskSource, count: int) -> list[Task]:
    return [source.next() for _ in range(count)]


def test_each_turn_but_the_first_of_a_group_with_different_rewards_is_a_state_and_no_other(tmp_path: Path) -> None:
    source = open_tasks(config_of(run_of(tmp_path, MIXED | EVEN)))
    assert source.size == 4
    tasks = drawn(source, 4)
    assert {task.task_id for task in tasks} == {f"{ECHO}:1@{name}:{turn}" for name in MIXED for turn in (1, 2)}
    for task in tasks:
        name, _, turn = task.task_id.rpartition("@")[2].rpartition(":")
        assert [each.action for each in Prefix.of(task).turns] == MIXED[name][: int(turn)]
        assert (task.env_id, task.seed, task.max_turns) == (ECHO, 1, 8)
    assert [task.task_id for task in drawn(source, 4)] == [task.task_id for task in tasks], "then again"


def test_its_tasks_are_played_from_that_state(tmp_path: Path) -> None:
    [task] = [task for task in drawn(open_tasks(config_of(run_of(tmp_path, MIXED))), 4) if "r0:2" in task.task_id]
    outcome, client, _ = play(spec_of(task, "g00000009-r0"), ["end"])
    assert isinstance(outcome, Trajectory)
    assert len(client.prompts) == 1
    assert outcome.reward == len("one" + "two" + "end")


def test_turns_that_came_from_a_recording_and_turns_beyond_the_limit_are_no_states(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", MIXED)
    tasks = {task.task_id[-4:]: task for task in drawn(open_tasks(config_of(first)), 4)}
    texts = {"g00000003-r0": ["x", "y"], "g00000003-r1": ["xx", "yy"]}
    outcomes = [play(spec_of(tasks["r0:1"], name), said)[0] for name, said in texts.items()]
    second = write_run(tmp_path / "second", outcomes, envs=[{"id": ECHO}])
    again = drawn(open_tasks(config_of(second)), 2)
    assert {task.task_id.rpartition("@")[2] for task in again} == {f"{name}:2" for name in texts}
    assert open_tasks(config_of(first, max_turns=2)).size == 2
    with pytest.raises(ConfigError, match="no fork points"):
        open_tasks(config_of(first, max_turns=1))


def test_a_checkpoint_holds_its_place_and_another_log_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, MIXED)
    source = open_tasks(config_of(run))
    drawn(source, 3)
    state = source.state()
    expected = source.next().task_id
    again = open_tasks(config_of(run))
    again.restore(state)
    assert again.next().task_id == expected
    with pytest.raises(ValueError, match="had 7 fork points and has 4 now"):
        again.restore({**state, "fork_points": 7})
    log = run / "episodes" / "step_000000.jsonl"
    monkeypatch.setattr(steps, "SMALL_BYTES", 0)
    steps.compress_step(log)
    assert again.next().task_id == source.next().task_id, "the other run may still be running"
    steps.decompress_step(log)
    log.write_bytes(b"\n" + log.read_bytes())
    with pytest.raises(RunError, match="changed while its fork points are in use"):
        again.next()


def test_the_evaluation_is_that_of_the_environment_from_its_beginning(tmp_path: Path) -> None:
    held_out = open_tasks(config_of(run_of(tmp_path, MIXED))).held_out(2)
    assert [(task.task_id, task.prefix) for task in held_out] == [(f"{ECHO}:{10**9 + n}", "") for n in range(2)]


def test_it_is_mixed_with_the_environment_itself(tmp_path: Path) -> None:
    run = run_of(tmp_path, MIXED)
    source = {"entry_point": "fork_points", "kwargs": {"run": str(run)}}
    envs = [{"id": ECHO, "weight": 3}, {"id": ECHO, "task_source": source}]
    tasks = drawn(open_tasks(load_config({"model": {"path": "tiny"}, "envs": envs})), 8)
    assert [bool(task.prefix) for task in tasks].count(True) == 2


def test_an_environment_whose_turns_cannot_be_repeated_is_refused_at_the_start(tmp_path: Path) -> None:
    chance = "tests.replay.replay_envs:ChanceEcho-v0"
    config = config_of(run_of(tmp_path, MIXED, chance), id=chance)
    with pytest.raises(ConfigError, match="ChanceEcho-v0: it is registered as nondeterministic"):
        check_environments(first_tasks(config), RolloutConfig())


def test_wrong_arguments_and_runs_without_states_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task_source: nowhere: no run of this name"):
        open_tasks(config_of(Path("nowhere")))
    with pytest.raises(ConfigError, match=r"no fork points: no group of .*:Echo-v0 with different rewards"):
        open_tasks(config_of(run_of(tmp_path, EVEN)))
    source = {"entry_point": "fork_points", "kwargs": {"rnu": "x"}}
    with pytest.raises(ConfigError, match="unexpected keyword argument 'rnu'"):
        open_tasks(load_config({"model": {"path": "tiny"}, "envs": [{"id": ECHO, "task_source": source}]}))


def test_a_damaged_line_and_an_episode_that_is_there_twice_count_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, MIXED)
    log = run / "episodes" / "step_000000.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    damaged = [b"{half\n", lines[0].replace(b'"trajectory"', b'"traj\xff"'), b'{"turns":' + b"[" * 100_000 + b"\n"]
    log.write_bytes(b"".join([lines[0], *damaged, *lines]))
    source = open_tasks(config_of(run))
    assert source.size == 4
    assert "3 damaged lines are left out" in caplog.text
    drawn(source, 4)
