"""`roll-flash init`: what it writes works as it stands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.envs.new_project import ABOUT, write_project
from roll_flash.errors import ConfigError


class Typed(io.StringIO):
    """Lines that a person types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ABOUT)
def test_a_project_passes_its_own_test_and_all_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert main(["init", "word-count", "--kind", kind, "--model", "tiny"]) == 0
    monkeypatch.chdir(tmp_path / "word-count")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert main(["envs", "check", "train.yaml", "--seeds", "2"]) == 0
    assert main(["train", "train.yaml", "--dry-run"]) == 0


def test_its_three_questions_are_answered_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed("word-count\ntools\n\n"))
    assert main(["init", "--json"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["folder"] == str(tmp_path / "word-count")
    assert ABOUT["tools"] in written.err
    config = yaml.safe_load((tmp_path / "word-count" / "train.yaml").read_text())
    assert config["model"]["path"] == "smollm2-135m"
    assert config["envs"][0]["id"] == "word_count.py:WordCount-v0"


def test_an_answer_that_cannot_be_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").touch()
    monkeypatch.setattr(sys, "stdin", Typed("mine\n1st\nword-count\ntoys\ntools\ntiny\n"))
    assert main(["init"]) == 0
    asked = capsys.readouterr().err
    assert "mine: exists and is not empty; choose another folder" in asked
    assert "--kind toys: choose one of data, environment, tools" in asked
    assert (tmp_path / "word-count" / "train.yaml").is_file()


def test_ctrl_d_at_a_question_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Typed(""))
    assert main(["init"]) == 130
    assert os.listdir(tmp_path) == []


def test_nobody_is_asked_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("never read"))
    assert main(["init"]) == 0
    assert (tmp_path / "my-project" / "questions.jsonl").is_file()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["init", "mine", "--kind", "data", "--model", "tiny"]) == 0
    assert main(["init", "mine", "--kind", "data", "--model", "tiny"]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["1st", "2048", "a b", "class", "-x-", "a/..b", "random", "Calendar", "numpy", "none", "roll-flash"]
)
def test_a_name_that_cannot_be_a_projects_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        write_project(name, "tools", "tiny")
    assert os.listdir(tmp_path) == []


def test_a_module_of_the_current_folder_does_not_take_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "word_count.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "word_count.py" in write_project("word-count", "tools", "tiny").files


def test_a_place_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "/proc/word-count", "--kind", "data"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("roll-flash: /proc/word-count: cannot be written: ")
    assert err.endswith("; choose another folder\n")
    Path("file").touch()
    assert main(["init", "file/word-count", "--kind", "data"]) == 2
    assert "file/word-count: cannot be written: Not a directory; choose another" in capsys.readouterr().err


def test_another_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of data, environment, tools"):
        write_project("mine", "game", "tiny")


def test_a_models_folder_is_found_from_the_project(tmp_path: Path) -> None:
    """The project is another folder, in which a path as it was given leads to nothing, or to something else."""
    Path("models", "mine").mkdir(parents=True)
    assert main(["init", "word-count", "--kind", "tools", "--model", "models/mine"]) == 0
    model = load_config("word-count/train.yaml").model.path
    assert model == str(tmp_path / "models" / "mine")


def test_a_models_name_is_quoted(tmp_path: Path) -> None:
    write_project("mine", "data", 'a: "b" #c')
    assert yaml.safe_load((tmp_path / "mine" / "train.yaml").read_text())["model"]["path"] == 'a: "b" #c'
