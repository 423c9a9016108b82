"""`roll-flash dash` as a user starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from written_run import RecordedRun

from roll_flash.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "roll_flash/dashboard/pages"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_an_address_that_works_until_it_is_ended(run: RecordedRun, number: int) -> None:
    command = [sys.executable, "-m", "roll_flash", "dash", str(run.folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        found = re.fullmatch(rf"{re.escape(str(run.folder))}: (http://127\.0\.0\.1:\d+/\?token=[\w-]{{32}})\n", line)
        assert found is not None, line
        answer = httpx.get(found[1], follow_redirects=True, timeout=60)
        assert answer.status_code == 200
        assert "<title>ROLL Flash</title>" in answer.text
        assert program.stdout.readline() == "Open it in a browser on this machine; Ctrl-C ends the dashboard.\n"
        program.send_signal(number)
        assert program.communicate(timeout=60) == ("", "")
    assert program.returncode == 0


def test_a_wrong_name_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dash", str(tmp_path / "none")]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "no run of this name and no run folder" in said.err


def test_it_loads_neither_torch_nor_ray(run: RecordedRun) -> None:
    program = "import sys, roll_flash.dashboard.server; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert not {"torch", "ray", "transformers", "vllm"} & set(said.stdout.split())


def test_the_package_has_every_file_of_the_front_end() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in patterns["roll_flash.dashboard"] for path in PAGES.parent.glob(pattern)}
    assert {path for path in PAGES.rglob("*") if path.is_file()} == {path for path in packaged if path.is_file()}


def test_vendored_libraries_are_named_with_their_licence() -> None:
    listed = (PAGES / "vendor/README.md").read_text()
    for folder in (path for path in (PAGES / "vendor").iterdir() if path.is_dir()):
        assert f"`{folder.name}/`" in listed
        assert (folder / "LICENSE").is_file()
