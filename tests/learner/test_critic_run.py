"""A whole run with a critic and groups of one: it learns values, stops, and goes on from its checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from roll_flash.monitor.metric_table import find_metric
from roll_flash.monitor.metrics import STEP_S, read_metrics

ROOT = Path(__file__).parents[2]


def train(runs: Path, steps: int, *more: str) -> list[dict[str, float]]:
    arguments = ["name=critic", f"runs={runs}", f"steps={steps}", "eval.before_and_after=false"]
    arguments += ["inference.engine=transformers", "envs.0.id=tests.learner.letter_share:LetterShare-v0"]
    arguments += ["scheduler.groups_per_step=16", "scheduler.group_size=1", "rollout.max_new_tokens=12"]
    arguments += ["learner.advantage=gae", "learner.learning_rate=1e-3", "learner.critic.learning_rate=1e-2"]
    command = [sys.executable, "-m", "roll_flash", "train", "configs/ci.yaml", *arguments, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return [row for row in read_metrics(runs / "critic") if STEP_S in row]


@pytest.mark.ray
def test_groups_of_one_learn_from_values_that_rise_to_what_happens(tmp_path: Path) -> None:
    train(tmp_path, 8)
    rows = train(tmp_path, 14, "--resume")
    assert [row["step"] for row in rows] == list(range(1, 15))
    explained = [row["value_explained_variance"] for row in rows]
    assert explained[0] == 0, "all values are 0 at first"
    assert fmean(explained[-3:]) > fmean(explained[1:4]), "they come closer; how close depends on what was sampled"
    assert sum(row["reward"] for row in rows[-3:]) / 3 > rows[0]["reward"] + 0.1
    assert {row["groups_without_signal"] for row in rows} == {0}
    assert all(row["computed_policy_tokens"] == row["policy_tokens"] for row in rows)
    assert all(find_metric(name) for name in rows[-1] if name.startswith(("value", "return")))
