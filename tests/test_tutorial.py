"""docs/tutorial.md, done as a stranger would: each block is run or saved, in order; only the long run is made short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.command_line import parse

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
SHORT = (
    "model.path=tiny inference.engine=transformers steps=1 "
    "scheduler.groups_per_step=2 scheduler.group_size=2 eval.tasks=2"
)
"""Appended to the run of the real model."""
TIMEOUT_S = 900


def blocks() -> Iterator[tuple[str, str | None, str]]:
    """Yield language, the file as which it is saved, and text of each block."""
    for match in re.finditer(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL):
        paragraph = PAGE[: match.start()].rstrip().rpartition("\n\n")[2]
        name = re.search(r"Save this as `([\w.]+)`:$", paragraph)
        yield match[1], name[1] if name else None, match[2]


def commands() -> list[str]:
    return [line for language, _, text in blocks() if language == "sh" for line in text.splitlines()]


def test_every_command_is_one_that_the_program_takes() -> None:
    own = [shlex.split(line)[1:] for line in commands() if line.startswith("roll-flash ")]
    assert len(own) > 8
    for words in own:
        parse(words)
    others = {line.split()[0] for line in commands()} - {"roll-flash"}
    assert others == {"cd", "python"}


def test_a_stranger_gets_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "roll-flash").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m roll_flash "$@"\n')
    (tmp_path / "bin" / "roll-flash").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    folder, said = tmp_path, ""

    def run(command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    for language, name, text in blocks():
        if name is not None:
            (folder / name).write_text(text)
        elif language == "python":
            said += run([sys.executable, "-c", text])
        else:
            for line in text.splitlines():
                if line.startswith("cd "):
                    folder = folder / line.removeprefix("cd ")
                else:
                    said += run(["sh", "-c", f"{line} {SHORT}" if line == "roll-flash train train.yaml" else line])
    assert "What is the order number?" in said
    assert "try  done  step 2/2" in said
    assert "FAIL" not in said
    assert "Run orders is done" in said
    assert (folder / "orders.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "after" / "report.html").is_file()
    assert (folder / "orders-model" / "config.json").is_file()
