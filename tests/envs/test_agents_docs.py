"""docs/agents.md, done as a new user would: its files are saved, its commands are run."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_run import agent_episode
from scripted_chat import calls

from roll_flash.envs.agents.agent_env import AgentEnv
from roll_flash.envs.agents.presets import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
RUN_TIMEOUT_S = 900


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_an_agent_takes_ten_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 10


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.docker
def test_its_agent_is_evaluated_and_trained_by_its_commands(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(blocks("python")[0])
    (tmp_path / "my_agent.yaml").write_text(blocks("yaml")[0])
    for line in blocks("sh")[0].splitlines():
        command = [sys.executable, "-m", "roll_flash", *shlex.split(line)[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "the books balance" in done.stdout


def test_every_argument_that_it_names_is_one() -> None:
    table = PAGE.partition("## The task")[2].partition("## How an agent ends")[0]
    first_cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named <= set(AgentEnv.__init__.__annotations__)
    assert len(named) > 12


def test_the_agents_that_it_lists_are_there() -> None:
    for preset in PRESETS.values():
        for path in preset.files.values():
            assert f"`envs/agents/programs/{path.name}`" in PAGE
            assert path.is_file()


@pytest.mark.adapters
def test_its_agent_of_inspect_ai_is_recorded_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model calls the tool, reads its result, and answers: one sample of two turns."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(blocks("python")[1])

    def says(messages: list[dict[str, Any]]) -> str | dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return f"It is {messages[-1]['content']}."
        assert messages[-1]["content"] == "What is 5 plus 7?"
        return calls("add", a=5, b=7)

    trajectory = asyncio.run(agent_episode("sums.py:Sums", 5, says))
    assert (trajectory.reward, trajectory.success, trajectory.branches) == (1.0, True, ())
    assert [turn.observation for turn in trajectory.turns] == ["12", ""]
