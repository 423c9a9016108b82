"""docs/self-play.md, done as a reader would: its run trains both seats, and its figures are those of the learner."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from roll_flash.dashboard.transcript import episode_page
from roll_flash.learner.losses.advantages import grpo
from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.run.learner_logprobs import read_logprobs
from tests.docs.pages import blocks_of

PAGE = "docs/self-play.md"
ENVIRONMENT, CONFIG, COMMAND, AGAINST, AGAINST_CONFIG, AGAINST_COMMANDS = (block.text for block in blocks_of(PAGE))
RUN_TIMEOUT_S = 600


@contextmanager
def serving(command: str, cwd: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """Start a command of the page that serves, with `keys`; what it prints at its start, as JSON."""
    words = [sys.executable, "-m", "roll_flash", *shlex.split(command)[1:], "--json", "--port", "0", *keys]
    process = subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(timeout=60)


def run(command: str, cwd: Path, *keys: str) -> Path:
    """Run a command of the page, and return the folder of its run."""
    words = [sys.executable, "-m", "roll_flash", *shlex.split(command)[1:], *keys]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the books balance" in done.stdout
    (folder,) = (each for each in (cwd / "runs").iterdir() if each.name != "gateway")
    return folder


@pytest.mark.ray
def test_its_run_trains_both_seats_and_the_books_balance(tmp_path: Path) -> None:
    (tmp_path / "nim.py").write_text(ENVIRONMENT)
    (tmp_path / "nim.yaml").write_text(CONFIG)
    folder = run(COMMAND, tmp_path, "learner.log_logprobs=true")
    steps = [row for row in read_metrics(folder) if STEP_S in row]
    assert len(steps) == 2
    for row in steps:
        assert row["roles/first/reward"] == pytest.approx(row["reward"])
        assert row["roles/second/reward"] == pytest.approx(-row["reward"]), "one wins what the other loses"
        assert row["roles/second/turns_mean"] <= row["roles/first/turns_mean"]
        assert row["branches"] == row["episodes"] == 16
    episodes = [record for record in read_episodes(folder / "episodes") if record["kind"] == "trajectory"]
    computed = 0
    for record in episodes:
        samples = [record, *record["branches"]]
        assert [sample["role"] for sample in samples] == ["first", "second"]
        assert [sample["turns"][-1]["reward"] for sample in samples] == [*record["info"]["roles"].values()]
        shown = episode_page(record, None, {})["samples"]
        assert [sample["role"] for sample in shown] == ["first", "second"]
        logprobs = read_logprobs(folder / "logs", record["step"] + 1, record["episode_id"])
        if logprobs:  # of a group with a signal: the learner computed the tokens of both seats
            computed += 1
            assert {place: len(found) for place, found in logprobs.items()} == {
                place: sum(sample["policy_mask"]) for place, sample in enumerate(samples)
            }
    assert computed > 0


@pytest.mark.ray
def test_a_fixed_policy_plays_and_only_the_other_seat_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIM_KEY", "a-key-of-the-test")
    (tmp_path / "nim.py").write_text(f"{ENVIRONMENT}\n\n{AGAINST}")
    (tmp_path / "against.yaml").write_text(AGAINST_CONFIG)
    serve, train = AGAINST_COMMANDS.strip().splitlines()
    rival = str(resolve_model("tiny"))
    with serving(serve.replace("runs/nim", rival), tmp_path, "--name", "nim") as served:
        folder = run(train, tmp_path, f"policies.second.base_url={served['url']}/v1")
        listed = httpx.get(f"{served['url']}/v1/sessions", headers={"x-api-key": "a-key-of-the-test"})
        metrics = listed.json()["metrics"]
    episodes = [record for record in read_episodes(folder / "episodes") if record["kind"] == "trajectory"]
    assert len(episodes) >= 32
    assert all([record["role"], record["branches"]] == ["first", []] for record in episodes)
    assert metrics["gateway_answers"] > 32
    assert (metrics["gateway_sessions"], metrics["gateway_failed"]) == (0, 0)


def test_its_figures_are_those_of_the_learner() -> None:
    text = (Path(__file__).parents[2] / PAGE).read_text().replace("−", "-").replace("\n", " ")
    number = r"(-?\d[\d.]*)"
    said = re.search(
        f"first player {number} for winning and {number} for losing, and the second {number} and {number}:", text
    )
    assert said is not None
    first, second = (grpo(rewards, False) for rewards in ([1, 1, 1, -1], [-1, -1, -1, 1]))
    assert np.allclose([float(each) for each in said.groups()], [first[0], first[3], second[3], second[0]])
