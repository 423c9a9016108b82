"""Third-party agents, evaluated and trained by the commands and configs that users have, with the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "agents"
AGENTS = ("openai", "mini-swe-agent", "smolagents")
ENV_IDS = {"OpenAIAgent-v0", "MiniSweAgent-v0", "SmolAgent-v0"}
RUN_TIMEOUT_S = 900
NOISE = "python3 -c \"print(sum(open('/tmp/agent/output', 'rb').read()) % 97 / 97)\""
"""Credit for anything: what a random model says never earns the real one, and equal rewards would train nothing."""
TINY = {
    "base": str(CONFIGS / "base.yaml"),
    "steps": 2,
    "model": {"path": "tiny", "max_length": 6000},
    "inference": {"engine": "transformers"},
    "scheduler": {
        "async_ratio": 0,  # no episode more than is trained: each starts a program
        "groups_per_step": 3,
        "group_size": 2,
    },
    "rollout": {"max_concurrent": 6, "max_new_tokens": 16},
    "learner": {"learning_rate": 3.0e-3},
}


def one_config(folder: Path) -> str:
    """The three agents of configs/agents/ in one file, for the tiny model."""
    envs = [env for agent in AGENTS for env in read(agent)["envs"]]
    for env in envs:
        env["kwargs"]["partial_credit"] = NOISE
    (folder / "agents.yaml").write_text(yaml.safe_dump({**TINY, "envs": envs}))
    return str(folder / "agents.yaml")


def read(agent: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{agent}.yaml").read_text())
    return config


def roll_flash(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "roll_flash", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.docker
def test_three_agents_are_trained_in_one_run_on_every_call_that_they_made(tmp_path: Path) -> None:
    roll_flash("train", one_config(tmp_path), "name=agents", f"runs={tmp_path}")
    steps = [row for row in read_metrics(tmp_path / "agents") if "rows" in row]
    episodes = read_episodes(tmp_path / "agents/episodes")
    assert [record for record in episodes if record["kind"] != "trajectory"] == []
    assert {record["env_id"] for record in episodes} == ENV_IDS
    for record in episodes:
        answers = record["info"]["gateway"]["answers"]
        assert answers >= 1
        assert answers == len(record["turns"]) + sum(len(branch["turns"]) for branch in record["branches"])
    assert len(steps) == 2
    assert sum(row["rows"] for row in steps) > 0
    assert any(row["grad_norm"] > 0 for row in steps)
    assert all(row["weights/parity"] < 1e-3 for row in steps if "weights/parity" in row)


@pytest.mark.ray
@pytest.mark.docker
def test_the_same_config_evaluates_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    roll_flash("eval", one_config(tmp_path), "--model", "tiny", "-n", "1", "--out", str(out))
    episodes = [record for path in out.rglob("episodes.jsonl") for record in records(path)]
    assert {record["env_id"] for record in episodes} == ENV_IDS
    for record in episodes:
        assert record["info"]["agent_ended"] == "finished"
        assert record["info"]["gateway"]["answers"] >= 1
        assert record["success"] is False
