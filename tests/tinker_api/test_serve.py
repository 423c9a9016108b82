"""`roll-flash serve`: one line for a command that cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_flash.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to serve"),
        (["--model", "tiny", "--api-key-env", "KEY_OF_ANOTHER_KIND"], "only keys that begin tml-"),
        (["--model", "tiny", "--port", "80000"], "from 0 to 65535"),
        (["--model", "tiny", "learner.engine=other"], "nobody provides 'other'"),
        (["tiny"], "a model is given with --model"),
    ],
)
def test_a_command_that_cannot_be_run_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.setenv("KEY_OF_ANOTHER_KIND", "sk-1")
    assert main(["serve", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()
