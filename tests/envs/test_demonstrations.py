"""`roll-flash envs demonstrate`: what an oracle solves becomes demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.envs.registration import make_env

FROZEN_LAKE = ("envs", "demonstrate", "TextFrozenLake-v0", "size=4", "--seeds", "5")


def test_each_solved_task_is_a_conversation_that_wins_when_it_is_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lake.jsonl"
    assert main([*FROZEN_LAKE, "-o", str(file)]) == 0
    assert f"{file}: 5 demonstrations" in capsys.readouterr().out
    env = make_env("TextFrozenLake-v0", size=4)
    for seed, line in enumerate(file.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        assert messages[0] == {"role": "user", "content": env.reset(seed=seed)[0]}
        rewards = [env.step(message["content"])[1] for message in messages if message["role"] == "assistant"]
        assert sum(rewards) == 1.0


def test_without_an_oracle_and_into_a_file_that_exists_it_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.jsonl").touch()
    assert main([*FROZEN_LAKE, "-o", str(tmp_path / "there.jsonl")]) == 2
    assert "exists; name another file" in capsys.readouterr().err
    assert main([*FROZEN_LAKE, "-o", "/proc/lake.jsonl"]) == 2
    assert "/proc/lake.jsonl: cannot be written: No such file or directory; name another" in capsys.readouterr().err
    assert main(["envs", "demonstrate", "tests.counting:Counting-v0", "-o", str(tmp_path / "none.jsonl")]) == 2
    assert "has no oracle()" in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


def test_tasks_that_the_oracle_does_not_solve_are_counted_with_the_first_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "half.py"
    module.write_text(
        "import gymnasium\n"
        "from roll_flash.envs import TextSpace\n"
        "class Half(gymnasium.Env):\n"
        "    observation_space = action_space = TextSpace()\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self.seed = seed\n"
        "        return f'say {seed}', {}\n"
        "    def step(self, action):\n"
        "        right = action == str(self.seed)\n"
        "        return '', float(right), True, False, {'success': right}\n"
        "    def oracle(self):\n"
        "        return str(self.seed // 2 * 2)\n"
    )
    file = tmp_path / "half.jsonl"
    assert main(["envs", "demonstrate", f"{module}:Half", "--seeds", "6", "-o", str(file), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["demonstrations"] == len(file.read_text().splitlines()) == 3
    assert value["left_out"][0] == "seed 1: not solved, reward 0"
