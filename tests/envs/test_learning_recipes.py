"""The recipes that begin with demonstrations, shortened: the tiny model, four tasks, two steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "configs/recipes"


@pytest.mark.adapters
@pytest.mark.ray
@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        ("twc", ["TextWorldExpress-v0", "params={numLocations: 1, numItemsToPutAway: 1}"]),
        pytest.param("miniwob", ["MiniWoB-v0", "task=[click-button, enter-text]"], marks=pytest.mark.docker),
        ("reasoning", ["ReasoningGym-v0", "dataset=word_sorting"]),
    ],
)
def test_a_recipe_imitates_solutions_and_then_learns_from_reward(recipe: str, task: list[str], tmp_path: Path) -> None:
    demonstrations = tmp_path / "made" / "solved.jsonl"
    short = ["model.path=tiny", "model.max_length=16384", "inference.engine=transformers", "steps=2", "eval.tasks=2"]
    short += ["scheduler.groups_per_step=2", "scheduler.group_size=2", f"runs={tmp_path}"]
    warm = [f"warm_start.demonstrations={demonstrations}", "warm_start.steps=1", "warm_start.batch_size=2"]
    for command in (
        ["envs", "demonstrate", *task, "--seeds", "4", "-o", str(demonstrations)],
        ["train", str(RECIPES / f"{recipe}.yaml"), *short, *warm],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "roll_flash", *command], capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / recipe / "metrics.jsonl").read_text().splitlines()]
    assert [row["warm_start/demonstrations"] for row in rows if "warm_start/demonstrations" in row] == [4.0]
    assert sum("step_s" in row for row in rows) == 2
