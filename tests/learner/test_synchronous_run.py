"""A whole run at `async_ratio: 0` against the plain synchronous loop, on the trajectories that the run sampled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from roll_flash.models.prepare import resolve_model
from roll_flash.monitor.episodes import read_episodes
from roll_flash.types import Group, Trajectory
from tests.learner.in_process import assert_equal_weights
from tests.learner.samples import TASK, make_trajectory
from tests.learner.synchronous_loop import synchronous_loop

ROOT = Path(__file__).parents[2]
STEPS = 2


def train(runs: Path) -> Path:
    """The folder of a finished run; each sequence is a row of its own, so that rows come in a known order."""
    arguments = [
        "name=synchronous",
        f"runs={runs}",
        f"steps={STEPS}",
        "scheduler.async_ratio=0",
        "eval.before_and_after=false",
    ]
    arguments += ["inference.engine=transformers", "envs.0.id=tests.learner.letter_share:LetterShare-v0"]
    arguments += ["scheduler.groups_per_step=2", "scheduler.group_size=3", "rollout.max_new_tokens=12"]
    arguments += ["learner.micro_batch_tokens=1", "learner.learning_rate=1e-3"]
    command = [sys.executable, "-m", "roll_flash", "train", "configs/ci.yaml", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "synchronous"


def groups_of_step(folder: Path, step: int) -> list[Group]:
    """In the order in which they became complete: that in which they were trained."""
    members: dict[str, list[Trajectory]] = {}
    for record in read_episodes(folder / "episodes" / f"step_{step:06d}.jsonl"):
        mask = np.asarray(record["policy_mask"], np.bool_)
        assert set(np.asarray(record["versions"])[mask]) == {step}, "sampled with the weights that it trains"
        name = record["group_id"]
        members[name] = [*members.pop(name, []), _trajectory(record, mask)]
    return [Group(name, TASK, tuple(sorted(found, key=lambda t: t.episode_id))) for name, found in members.items()]


def _trajectory(record: dict[str, Any], mask: NDArray[np.bool_]) -> Trajectory:
    return make_trajectory(
        record["token_ids"],
        mask.tolist(),
        reward=record["reward"],
        logprobs=record["logprobs"],
        name=record["episode_id"],
    )


@pytest.mark.nightly
@pytest.mark.ray
def test_alpha_zero_is_the_plain_synchronous_loop_from_end_to_end(tmp_path: Path) -> None:
    """Workers, servers, stream, loader, ranks and publication must not show in any bit of the weights."""
    folder = train(tmp_path)
    steps = [groups_of_step(folder, step) for step in range(STEPS)]
    assert [len(groups) for groups in steps] == [2, 2]
    rewards = [trajectory.reward for groups in steps for group in groups for trajectory in group.trajectories]
    assert len(set(rewards)) > 2, "something to learn from"
    expected = synchronous_loop(resolve_model("tiny"), steps, row_tokens=1)
    found = load_file(folder / "model" / "model.safetensors")
    start = load_file(resolve_model("tiny") / "model.safetensors")
    assert any(not torch.equal(found[name], start[name]) for name in start)
    assert_equal_weights(found, expected)
