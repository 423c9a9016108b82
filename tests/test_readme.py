"""What the README prints works: its environment is made and played, its commands are known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.command_line import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_environment_of_the_readme_can_be_trained_on(tmp_path: Path) -> None:
    source, _ = blocks("python")
    (tmp_path / "guess.py").write_text(source)
    arguments = ["train", str(ROOT / "configs/ci.yaml"), "name=guess", "envs.0.id=guess:Guess-v0", "--dry-run"]
    command = [sys.executable, "-m", "roll_flash", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_of_the_readme_takes_about_twenty_lines() -> None:
    source, _ = blocks("python")
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 22


def test_every_command_of_the_readme_is_one_the_parser_takes() -> None:
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    commands = [words[1:] for words in lines if words and words[0] == "roll-flash"]
    assert len(commands) >= 6
    for words in commands:
        parse(words)
