"""`roll-flash checkpoints`: what a user sees, and what is never removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.monitor.json_lines import with_checksum
from roll_flash.run import run_dir as run_dir_module
from roll_flash.run.run_dir import RunDir, list_checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints 1, 2 and 3, that has ended."""
    tree = {"name": "mine", "runs": str(tmp_path), "model": {"path": "tiny"}, "envs": [{"id": "Maze-v0"}]}
    with RunDir.create(load_config(tree), resume=False) as run_dir:
        for step in (1, 2, 3):
            with run_dir.writing_checkpoint(step) as folder:
                (folder / "trainer.json").write_text("{}" * 1000)
    return run_dir.folder


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run)]


def change_a_byte(run: Path, step: int) -> None:
    with (run / f"checkpoints/step_{step}/trainer.json").open("rb+") as file:
        file.write(b"[")


def test_ls_shows_step_time_size_and_what_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step_1/checksums.json").unlink()
    (run / "checkpoints/step_2/trainer.json").unlink()
    assert main(["checkpoints", "ls", str(run)]) == 0
    head, *rows = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert head == ["step", "time", "size", "state"]
    assert [[row[0], row[3], row[4]] for row in rows] == [
        ["1", "MiB", "unknown: an older version wrote it without checksums"],
        ["2", "MiB", "damaged: trainer.json is missing"],
        ["3", "MiB", "whole"],
    ]
    assert main(["checkpoints", "ls", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[2]["bytes"] > 2000


def test_verify_finds_a_changed_byte_and_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(run)]) == 0
    change_a_byte(run, 2)
    capsys.readouterr()
    assert main(["checkpoints", "verify", str(run)]) == 1
    assert "damaged: trainer.json has other bytes than were written" in capsys.readouterr().out
    assert main(["checkpoints", "verify", str(run), "2"]) == 1
    assert main(["checkpoints", "verify", str(run), "3"]) == 0
    assert main(["checkpoints", "verify", str(run), "7"]) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 200_000, "checksums.json cannot be read"),
        ('{"files": {"a": {"bytes": Infinity, "crc32": "0"}}}', "checksums.json cannot be read"),
        ('{"files": {"/etc/passwd": {"bytes": 1, "crc32": "0"}}}', "names '/etc/passwd', which is no file of it"),
        ('{"files": {"hf/../../../x": {"bytes": 1, "crc32": "0"}}}', "which is no file of it"),
        (json.dumps({"files": {"a" * 300: {"bytes": 1, "crc32": "0"}}}), "which is no file of it"),
        ('{"files": {"\\ud800": {"bytes": 1, "crc32": "0"}}}', "checksums.json cannot be read"),
    ],
)
def test_checksums_that_no_run_wrote_are_damage(
    content: str, says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copied run may hold anything: no file outside of it is looked at, and nothing in it ends the command."""
    (run / "checkpoints/step_2/checksums.json").write_text(content)
    assert main(["checkpoints", "verify", str(run), "2"]) == 1
    assert says in capsys.readouterr().out


def test_rm_removes_the_named_ones(run: Path) -> None:
    assert main(["checkpoints", "rm", str(run), "1", "2"]) == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_3"]


def test_rm_keeps_the_newest_whole_one_and_removes_damaged_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "rm", str(run), "2", "3"]) == 2
    assert "step_3: is the newest whole checkpoint" in capsys.readouterr().err
    assert main(["checkpoints", "rm", str(run), "1", "9"]) == 2
    assert "no complete checkpoint of step 9; it has: 1, 2, 3" in capsys.readouterr().err
    assert steps_of(run) == [1, 2, 3]
    change_a_byte(run, 3)
    assert main(["checkpoints", "rm", str(run), "2"]) == 2
    assert main(["checkpoints", "rm", str(run), "1", "3"]) == 0
    assert steps_of(run) == [2]


def test_a_damaged_model_is_neither_exported_nor_evaluated_and_damage_elsewhere_does_not_matter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        RunDir.create(load_config(run / "config.yaml"), resume=True) as run_dir,
        run_dir.writing_checkpoint(4) as folder,
    ):
        (folder / "trainer.json").write_text("{}")
        (folder / "hf").mkdir()
        (folder / "hf/config.json").write_text("{}" * 1000)
    change_a_byte(run, 4)
    monkeypatch.setattr(run_dir_module, "LARGE_BYTES", 1000)
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "hf: reading 0.0 GiB to compare them with their checksums" in capsys.readouterr().err
    (run / "checkpoints/step_4/hf/config.json").write_text("[]" * 1000)
    for command in (["export", str(run), str(tmp_path / "out2")], ["eval", "--model", f"{run}@4"]):
        assert main(command) == 1
        assert "step_4: damaged (hf/config.json has other bytes than were written)" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()


def test_rm_leaves_a_running_run_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.create(load_config(run / "config.yaml"), resume=True):
        assert main(["checkpoints", "rm", str(run), "1"]) == 2
    said = capsys.readouterr().err
    assert "the run is in use by process" in said
    assert said.endswith("; wait until it has ended, or stop it with Ctrl-C\n")
    assert steps_of(run) == [1, 2, 3]


@pytest.mark.parametrize(
    "event",
    [
        b"{nonsense}",
        b'{"event":' + b"[" * 100_000,
        b'{"x":1}',
        b'{"event":"trained"}',
        b'{"event":"admitted","number":"x"}',
        b'{"event":"dropped","group":[]}',
    ],
)
def test_verify_says_in_one_line_that_files_are_none_of_a_run(
    event: bytes, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their checksums are right: somebody wrote them so."""
    lines = [with_checksum(line) + b"\n" for line in (b'{"event":"begin","format":1}', event)]
    (run / "journal").mkdir(exist_ok=True)
    (run / "journal/after_step_000000.jsonl").write_bytes(b"".join(lines))
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr()
    (line,) = [
        line for line in (said.out + said.err).splitlines() if "after_step_000000" in line or "not as a run" in line
    ]
    assert "internal error" not in line
