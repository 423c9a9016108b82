"""docs/self-play.md, done as a reader would: its run trains both seats, and its figures are those of the learner."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roll_flash.dashboard.transcript import episode_page
from roll_flash.learner.losses.advantages import grpo
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metrics import STEP_S, read_metrics
from roll_flash.run.learner_logprobs import read_logprobs
from tests.docs.pages import blocks_of

PAGE = "docs/self-play.md"
ENVIRONMENT, CONFIG, COMMAND = (block.text for block in blocks_of(PAGE))
RUN_TIMEOUT_S = 600


@pytest.mark.ray
def test_its_run_trains_both_seats_and_the_books_balance(tmp_path: Path) -> None:
    (tmp_path / "nim.py").write_text(ENVIRONMENT)
    (tmp_path / "nim.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "roll_flash", *shlex.split(COMMAND)[1:], "learner.log_logprobs=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the books balance" in done.stdout
    folder = tmp_path / "runs" / "nim"
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


def test_its_figures_are_those_of_the_learner() -> None:
    text = (Path(__file__).parents[2] / PAGE).read_text().replace("−", "-").replace("\n", " ")
    number = r"(-?\d[\d.]*)"
    said = re.search(
        f"first player {number} for winning and {number} for losing, and the second {number} and {number}:", text
    )
    assert said is not None
    first, second = (grpo(rewards, False) for rewards in ([1, 1, 1, -1], [-1, -1, -1, 1]))
    assert np.allclose([float(each) for each in said.groups()], [first[0], first[3], second[3], second[0]])
