"""What the README prints works: its environment is made and played, its commands are known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

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


@pytest.mark.ray
def test_three_commands_lead_from_nothing_to_an_episode_in_the_browser(tmp_path: Path) -> None:
    """The second and the third one, with fewer steps; `tests/dashboard` shows that a browser draws what they answer."""
    first = [line.partition("#")[0].strip() for line in blocks("sh")[0].splitlines()]
    assert first == ["pip install -e .", "roll-flash train examples/first.yaml", "roll-flash dash"]
    program, runs = [sys.executable, "-m", "roll_flash"], tmp_path / "runs"
    train = [*program, "train", "examples/first.yaml", "steps=2", f"runs={runs}"]
    done = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    dash = [*program, "dash", "--port", "0"]
    with subprocess.Popen(dash, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as dashboard:
        try:
            assert dashboard.stdout is not None
            address = dashboard.stdout.readline().split()[-1]
            with httpx.Client(base_url=address.partition("?")[0], timeout=60, follow_redirects=True) as browser:
                assert "<title>ROLL Flash</title>" in browser.get(address).raise_for_status().text
                row, *_ = browser.get("/api/episodes", params={"run": "first"}).raise_for_status().json()["rows"]
                shown = {"run": "first", "id": row["id"]}
                (sample,) = browser.get("/api/episode", params=shown).raise_for_status().json()["samples"]
        finally:
            dashboard.terminate()
    assert dashboard.returncode == 0
    assert sample["messages"][0]["text"].startswith("say letters")
    assert "".join(sample["turns"][0]["tokens"]["texts"])


def test_every_command_of_the_readme_is_one_the_parser_takes() -> None:
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    commands = [words[1:] for words in lines if words and words[0] == "roll-flash"]
    assert len(commands) >= 6
    for words in commands:
        parse(words)
