"""Run folders as they are found: empty, being written, cut off, of another version, read-only, hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll_flash.cli.main import main
from roll_flash.diagnosis import diagnose, reading
from roll_flash.diagnosis.reading import read_run
from roll_flash.diagnosis.run_view import FIRST_EPISODES, RECENT_EPISODES
from roll_flash.diagnosis.summaries import repeated_share
from roll_flash.errors import RunError
from tests.diagnosis.planted import unpack


def episode(number: int = 0, *, step: int = 0, action: str = "a", observation: str = "b") -> dict[str, Any]:
    turn = {"action": action, "observation": observation, "finish_reason": "stop", "generate_s": 0.5}
    times = {"started_s": 1.0, "finished_s": 2.0}
    task = {"task_id": f"Maze-v0:{number}", "env_id": "Maze-v0", "seed": number, "env_kwargs": {}}
    return {"step": step, "kind": "trajectory", **task, "reward": 1.0, "success": True, **times, "turns": [turn, turn]}


def run_folder(folder: Path, episodes: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Path:
    (folder / "config.yaml").write_text("steps: 100\n")
    (folder / "episodes").mkdir()
    for each in episodes:
        with (folder / f"episodes/step_{each['step']:06d}.jsonl").open("a") as file:
            file.write(json.dumps(each) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match=r"config\.yaml: no such file; .* is not the folder of a run"):
        diagnose(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_run_without_a_step_has_nothing_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("name: new\n")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "no episode has ended yet" in capsys.readouterr().out


def test_lines_that_are_being_written_are_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [episode(0), episode(1)], [{"step": 1, "step_s": 1.0}, {"step": 2, "step_s": 1.0}])
    for path in (folder / "metrics.jsonl", folder / "episodes/step_000000.jsonl"):
        path.write_bytes(path.read_bytes()[:-10])
    view = read_run(folder)
    assert (len(view.recent), len(view.episodes), view.notes) == (1, 1, ())


def test_every_prefix_of_a_recorded_run_can_be_read(tmp_path: Path) -> None:
    folder = unpack("sound-sandbox", tmp_path)
    whole = (folder / "metrics.jsonl").read_bytes()
    for size in range(0, len(whole), len(whole) // 50):
        (folder / "metrics.jsonl").write_bytes(whole[:size])
        assert [finding.severity for finding in diagnose(folder) if finding.severity == "error"] == []


def test_a_damaged_line_of_metrics_is_one_line_and_of_episodes_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path, [episode(0)], [{"step": 1, "step_s": 1.0}])
    with (folder / "episodes/step_000000.jsonl").open("a") as file:
        file.write('{"kind": "traj\n{"kind": 7}\n[]\n')
    assert main(["diagnose", str(folder)]) == 0
    assert "3 damaged lines of episodes/" in capsys.readouterr().err
    (folder / "logs").mkdir()
    (folder / "logs/timeline.jsonl").write_text("[" * 100_000)
    assert main(["diagnose", str(folder)]) == 0
    (folder / "config.yaml").write_text("[" * 10_000)
    assert main(["diagnose", str(folder)]) == 1
    assert "config.yaml: is no YAML" in capsys.readouterr().err
    (folder / "config.yaml").write_text("steps: 100\n")
    (folder / "metrics.jsonl").write_text('{"step": 1\n{"step": 2, "step_s": 1.0}\n')
    assert main(["diagnose", str(folder)]) == 1
    assert "metrics.jsonl, line 1: not a record" in capsys.readouterr().err


def test_a_run_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [{**episode(0), "mood": {"deep": [1]}}], [{"step": 1, "step_s": 1.0, "new/name": 3}])
    (folder / "config.yaml").write_text(
        "steps: 7\nscheduler: {async_ratio: auto, async_ratio_bounds: [0, 3], x: 1}\ny: 2\n"
    )
    view = read_run(folder)
    assert (view.settings.steps, view.settings.async_ratio, len(view.episodes)) == (7, 3, 1)
    for odd in ("scheduler: 3\nsteps: many\nlearner: [1]\n", "rollout: {max_new_tokens: .nan}\n"):
        (folder / "config.yaml").write_text(odd)
        assert diagnose(str(folder)) == []


@pytest.mark.parametrize("content", ["", "- 1\n", "a: [\n"])
def test_a_config_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(RunError, match="put back the config of the run"):
        diagnose(tmp_path)


def test_nothing_is_written_into_the_folder(tmp_path: Path) -> None:
    folder = unpack("clipped-lengths", tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    diagnose(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_of_a_long_run_only_the_ends_are_read(tmp_path: Path) -> None:
    episodes = [episode(number, step=number // 100) for number in range(2000)]
    view = read_run(run_folder(tmp_path, episodes, [{"step": step, "step_s": 1.0} for step in range(1, 200)]))
    assert (view.start.span, view.recent.span) == ((1, 10), (136, 199))
    assert [each.task_id for each in view.first_episodes] == [f"Maze-v0:{each}" for each in range(FIRST_EPISODES)]
    assert [each.task_id for each in view.episodes] == [
        f"Maze-v0:{each}" for each in range(2000 - RECENT_EPISODES, 2000)
    ]


def test_a_line_beyond_the_limit_is_counted_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_LINE", 1000)
    view = read_run(run_folder(tmp_path, [episode(0, action="x" * 5000), episode(1)], []))
    assert [each.task_id for each in view.episodes] == ["Maze-v0:1"]
    assert "1 episodes of more than" in view.notes[0]


def test_what_a_model_writes_is_read_in_linear_time_and_shown_without_control_characters(tmp_path: Path) -> None:
    nasty = "\x1b]0;title\x07\u202e" + " \t" * 1_000_000 + "a" * 1_000_000
    folder = run_folder(tmp_path, [episode(number, action=nasty, observation=nasty) for number in range(40)], [])
    findings = diagnose(folder)
    assert "same" in repr(findings) or findings == []
    assert not any("\x1b" in finding.line or "\u202e" in finding.line for finding in findings)


def test_a_loop_is_told_from_prose_and_short_text() -> None:
    prose = Path(reading.__file__).read_text()
    assert repeated_share(prose) < 0.4
    assert repeated_share("I will try again. " * 50) > 0.8
    assert repeated_share("a" * 100) == 0
