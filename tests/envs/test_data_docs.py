"""docs/data.md and the README's section on data, done as a new user would."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_flash.cli.main import main
from roll_flash.config.sections.data import RewardConfig
from roll_flash.config.tree import EnvConfig
from roll_flash.envs.datasets.rewards import IN_SANDBOX, READY
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.envs.registration import make_env
from tests.command_line import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()
README = (ROOT / "README.md").read_text()


TINY = ("model.path=tiny", "model.max_length=512")
"""Its tokens are characters."""
FILES = (
    "make_sums.py",
    "sums.yaml",
    "brief.py",
    "final.py",
    "my_rows.py",
    "mixed.jsonl",
    "solved.jsonl",
    "solved_first.yaml",
)


def block(page: str, name: str) -> str:
    """The block that follows the paragraph with `name`."""
    found = re.search(rf"as `{re.escape(name)}`.*?```\w+\n(.*?)```", page, re.DOTALL)
    assert found is not None, name
    return found[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).write_text(block(PAGE, name))
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "make_sums.py"], check=True, timeout=60)
    return tmp_path


def test_its_commands_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tiny model, as far as training goes without servers."""
    lines = [line.split() for each in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in each.splitlines()]
    commands = [words[1:] for words in lines if words[0] == "roll-flash"]
    assert [words[0] for words in commands] == ["train", "train", "envs", "train", "envs"]
    assert [words for words in lines if words[0] != "roll-flash"] == [["python", "make_sums.py"]], "the fixture ran it"
    demonstrate = commands.pop()
    assert main(demonstrate) == 0
    assert "lake.jsonl: 200 demonstrations" in capsys.readouterr().out
    for words in commands:
        parse(words)
        limited = [*words, "model.path=tiny"]
        if words[0] == "train" and "--dry-run" not in words:
            limited.append("--dry-run")
        assert main(limited) == 0
        assert re.search(r"tasks: 950 to train on|950 to train on, 50 held out", capsys.readouterr().out)


def test_its_parts_of_configs_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block of YAML that is no whole file replaces its keys in `sums.yaml`."""
    blocks = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    parts = [block for block in blocks if "base" not in block]
    assert [next(iter(part)) for part in parts] == ["name", "data", "data", "reward", "stages", "envs"]
    (folder / "my.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "answer": n}) + "\n" for n in range(40))
    )
    for part in parts[1:]:
        keys = {"data": "envs.0.data", "reward": "envs.0.reward"}
        overrides = [f"{keys.get(key, key)}={json.dumps(value)}" for key, value in part.items()]
        assert main(["train", "sums.yaml", *TINY, *overrides, "--dry-run"]) == 0, part


def test_its_reward_for_gsm8k_finds_the_last_number_of_the_answer(folder: Path) -> None:
    row = {"question": "Half of 2,500?", "answer": "2,500 / 2 = <<2500/2=1250>>1,250\n#### 1,250"}
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps({**row, "question": f"{n}"}) + "\n" for n in range(9)))
    data = {"path": "gsm8k.jsonl", "columns": {"prompt": "question"}}
    kwargs = {"answer_in": "last_number"}
    entry = EnvConfig.model_validate(
        {"id": "Dataset-v0", "data": data, "reward": "final.py:same_number", "kwargs": kwargs}
    )
    env = make_env("Dataset-v0", **DatasetTasks(entry).next().kwargs)
    for text, value in (("It is 1250.", 1.0), ("So it is 1,250", 1.0), ("1 + 1250 = 1251", 0.0)):
        assert asyncio.run(score(env, text)) == {"same_number": value}


async def score(env: Any, text: str) -> Mapping[str, float]:
    await env.begin(0)
    found: Mapping[str, float] = await env.score_answer(text)
    return found


def test_its_demonstrations_come_before_reinforcement(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "solved_first.yaml", "model.path=tiny", "--dry-run"]) == 0
    (folder / "solved.jsonl").write_text('{"messages": []}\n')
    assert main(["train", "solved_first.yaml", "model.path=tiny", "--dry-run"]) == 2
    assert "warm_start.demonstrations: " in capsys.readouterr().err


def test_it_names_every_ready_reward() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert named == [*READY, IN_SANDBOX]
    assert all(each in (RewardConfig.model_fields["function"].description or "") for each in named)


def test_the_config_of_the_readme_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(block(README, "mine.yaml"))
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]
    (tmp_path / "my.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["train", "mine.yaml", "model.path=tiny", "--dry-run"]) == 0
    assert "tasks: 38 to train on" in capsys.readouterr().out
