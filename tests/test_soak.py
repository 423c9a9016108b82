"""A whole run in which environments misbehave, workers and a server are killed: the promises of the scheduler hold."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from leaks import Session
from test_training_runs import start, step_rows, wait_for_step

from roll_flash.monitor.episodes import read_episodes

STEPS = 30
ALPHA = 2
ENVS = [
    {"id": "tests.misbehaving:Misbehaving-v0", "max_turns": 3},
    {"id": "tests.letter_count:LetterCount-v0", "max_turns": 2, "weight": 0.5},
]


def processes(marker: str, name: str) -> list[int]:
    """Process ids of this session's processes whose command line holds `name`, their guards apart."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if marker.encode() in environment and name.encode() in command and b"supervise" not in command:
            found.append(int(folder.name))
    return found


def kill_one(marker: str, name: str) -> None:
    """`kill -9` the oldest; waits for one where it is being replaced just now."""
    deadline = time.monotonic() + 60
    while not (found := processes(marker, name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found, f"no process of this run is named {name}"
    os.kill(min(found), signal.SIGKILL)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = tmp_path_factory.mktemp("runs")
    environment: dict[str, str] = {}
    session = Session.begin(environment)
    process = start(
        *("train", "configs/ci.yaml", "name=soak", f"runs={runs}", f"steps={STEPS}", f"scheduler.async_ratio={ALPHA}"),
        *("inference.engine=transformers", "inference.servers=2", "eval.before_and_after=false"),
        *(f"envs={json.dumps(ENVS)}", "rollout.workers=2"),
        *("rollout.step_timeout_s=3", "scheduler.extra_replicas=1", "rollout.max_concurrent=24"),
        **environment,
    )
    folder = runs / "soak"
    try:
        for step in range(2, STEPS - 1, 3):
            wait_for_step(folder, step, process)
            kill_one(session.marker, "WorkerActor")
            kill_one(session.marker, "transformers.server")
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    return {"folder": folder, "code": process.returncode, "output": output, "leaks": session.leaks()}


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.docker
class TestASoakedRun:
    def test_it_ends_well_and_leaves_nothing(self, soaked: dict[str, Any]) -> None:
        assert soaked["code"] == 0, soaked["output"]
        assert soaked["leaks"] == []
        assert [row["step"] for row in step_rows(soaked["folder"])] == list(range(1, STEPS + 1))

    def test_every_fault_was_met_and_counted(self, soaked: dict[str, Any]) -> None:
        causes = Counter(
            episode["cause"] for episode in read_episodes(soaked["folder"] / "episodes") if episode["kind"] == "failure"
        )
        assert {"env_error", "env_timeout", "bad_reward", "worker_died"} <= set(causes), causes
        books = step_rows(soaked["folder"])[-1]
        assert books["books/failed_env_error"] <= causes["env_error"]

    def test_no_token_was_trained_above_alpha(self, soaked: dict[str, Any]) -> None:
        rows = step_rows(soaked["folder"])
        assert max(row["staleness_max"] for row in rows) <= ALPHA
        assert max(row["staleness_max"] for row in rows) > 0, "nothing was asynchronous"

    def test_what_was_produced_was_trained_or_dropped_or_waits(self, soaked: dict[str, Any]) -> None:
        for row in step_rows(soaked["folder"]):
            dropped = sum(value for name, value in row.items() if name.startswith("books/dropped_"))
            assert row["books/produced"] == row["books/trained"] + dropped + row["books/waiting"]

    def test_every_attempt_of_an_episode_ended_once_and_groups_are_not_mixed(self, soaked: dict[str, Any]) -> None:
        episodes = read_episodes(soaked["folder"] / "episodes")
        ended = Counter(episode["episode_id"] for episode in episodes if episode["kind"] == "trajectory")
        assert set(ended.values()) == {1}
        tasks: dict[str, set[str]] = {}
        for episode in episodes:
            tasks.setdefault(episode["group_id"], set()).add(episode["task_id"])
        assert {len(of_group) for of_group in tasks.values()} == {1}
