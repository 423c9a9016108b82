"""A run on a user's own rows, as a user starts it: demonstrations first, then reinforcement learning on rows of two
environments with two rewards, with thinking stripped from later turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metric_table import find_metric
from roll_flash.monitor.metrics import read_metrics

RUN_TIMEOUT_S = 800

CONFIG = """
name: mine
steps: 2
model: {path: tiny, max_length: 256, thinking: strip}
envs:
  - id: Dataset-v0
    data:
      path: mixed.jsonl
      environment_column: env
      environments: [guess:Guess-v0]
      kwargs_column: with
      shuffle: false
    reward:
      - {function: number, weight: 1.0}
      - {function: "brief.py:is_brief", weight: 0.1}
warm_start: {demonstrations: solved.jsonl, steps: 2, batch_size: 16, learning_rate: 1.0e-3}
scheduler: {async_ratio: 1, groups_per_step: 4, group_size: 2}
rollout: {max_concurrent: 4, max_new_tokens: 8, workers: 1}
inference: {engine: transformers}
eval: {before_and_after: false}
checkpoint: {every_minutes: 60}
"""
GUESS = """
import roll_flash

class Guess(roll_flash.Env):
    def __init__(self, top): self.top = top
    async def reset(self, *, seed=None, options=None):
        self.left = 2
        return f"A number from 1 to {self.top}?", {}
    async def step(self, action):
        self.left -= 1
        return "Wrong.", 0.0, False, self.left == 0, {"success": False}

roll_flash.register_env("Guess-v0", Guess)
"""


def write_lines(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_of_two_environments_are_trained_after_demonstrations_and_show_each_reward(tmp_path: Path) -> None:
    rows: list[object] = []
    for n in range(10):
        rows += [
            {"prompt": f"{n} + 1?", "answer": n + 1, "with": {"answer_in": "last_number"}},
            {"env": "guess:Guess-v0", "with": {"top": n}},
        ]
    write_lines(tmp_path / "mixed.jsonl", rows)
    said = {"role": "assistant", "reasoning_content": "I add.", "content": "1"}
    chat = [{"role": "user", "content": "0 + 1?"}, said, {"role": "user", "content": "Sure?"}, said]
    write_lines(tmp_path / "solved.jsonl", [{"messages": chat}] * 16)
    (tmp_path / "brief.py").write_text("def is_brief(completion): return len(completion) <= 20\n")
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "roll_flash", "train", "mine.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm start: 2 supervised steps" in done.stdout
    metrics = {name: value for row in read_metrics(tmp_path / "runs" / "mine") for name, value in row.items()}
    assert metrics["warm_start/last_loss"] < metrics["warm_start/first_loss"]
    assert {"rewards/number", "rewards/is_brief"} <= metrics.keys()
    assert sorted(name for name in metrics.keys() - {"step", "time"} if find_metric(name) is None) == []
    episodes = list(read_episodes(tmp_path / "runs" / "mine" / "episodes"))
    assert {episode["env_id"] for episode in episodes} == {"Dataset-v0", "guess:Guess-v0"}
    of_rows = [episode["info"]["rewards"] for episode in episodes if episode["env_id"] == "Dataset-v0"]
    assert all(rewards.keys() == {"number", "is_brief"} for rewards in of_rows)
