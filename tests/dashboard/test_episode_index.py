"""The index of episodes: heads of lines, growth while a run writes, and files that are cut, damaged or replaced."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from served import serving
from written_run import RecordedRun, trajectory

from roll_flash.dashboard import episode_index
from roll_flash.dashboard.episode_index import EpisodeIndex, head_of
from roll_flash.dashboard.episode_search import Search, Selection, counts, row_for_table
from roll_flash.monitor.episode_files import steps
from roll_flash.monitor.episode_files.steps import compress_step, remove_steps, step_file, step_files

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def look_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_index, "REFRESH_S", 0.0)


def index_of(folder: Path) -> EpisodeIndex:
    index = EpisodeIndex(lambda: sorted(folder.glob("step_*.jsonl")))
    index.refresh(PATIENCE_S)
    return index


def selected(index: EpisodeIndex, **filters: Any) -> list[str]:
    search = Search(index, Selection(run="r", **filters))
    while search.searched < len(index.ids):
        search.go_on()
    return [index.ids[row] for row in search.rows(0, 500)]


def test_each_episode_is_found_with_its_columns_and_its_whole_record(run: RecordedRun) -> None:
    index = index_of(run.run_dir.episodes)
    assert len(index.ids) == 12
    row = index.row("g00000001-r3")
    assert row is not None
    shown = row_for_table(index, row)
    assert shown | {"started_s": 0, "finished_s": 0} == {
        "id": "g00000001-r3", "task": "Sum-v0:01", "env": "Sum-v0", "group": "g00000001", "outcome": "terminated",
        "worker": "", "step": 1, "failed": False, "reward": 1.0, "success": True, "tokens": 38,
        "started_s": 0, "finished_s": 0,
    }  # fmt: skip
    assert index.record(row)["episode_id"] == "g00000001-r3"
    assert [index.ids[row] for row in index.rows_of_group("g00000001")] == [f"g00000001-r{n}" for n in range(4)]


def test_episodes_of_a_run_that_goes_on_are_found_as_they_come(run: RecordedRun) -> None:
    index = index_of(run.run_dir.episodes)
    run.step()
    run.fail("env_error", "the door is stuck")
    index.refresh(PATIENCE_S)
    assert len(index.ids) == 17
    assert selected(index, outcome="failed") == ["failed-1"]
    assert index.generation == 0


def test_an_episode_is_found_by_its_id_as_soon_as_it_has_ended(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_index, "REFRESH_S", 60.0)
    with serving(run.folder) as dashboard:
        assert dashboard.get("episodes", run=run.folder.name)["episodes"] == 12
        run.step()
        run.episodes.sync()
        assert dashboard.get("episode", run=run.folder.name, id="g00000003-r0")["id"] == "g00000003-r0"


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run: RecordedRun) -> None:
    run.episodes.sync()
    path = sorted(run.run_dir.episodes.glob("step_*.jsonl"))[-1]
    line = path.read_bytes().splitlines(keepends=True)[0].replace(b"g00000002-r0", b"later-000-r0")
    with path.open("ab") as file:
        file.write(line[:300])
        file.flush()
        index = index_of(run.run_dir.episodes)
        assert index.row("later-000-r0") is None
        file.write(line[300:])
        file.flush()
        index.refresh(PATIENCE_S)
    assert index.row("later-000-r0") is not None
    assert index.damaged == 0


def test_lines_that_are_no_episodes_are_counted_and_the_others_shown(run: RecordedRun) -> None:
    path = sorted(run.run_dir.episodes.glob("step_*.jsonl"))[0]
    newer = b'{"kind":"dream","episode_id":"x","group_id":"g","task_id":"t","env_id":"e","turns":[]}\n'
    no_text = path.read_bytes().splitlines(keepends=True)[0].replace(b"g00000000-r0", b"g0000\xff000-r0")
    assert b"\xff" in no_text
    path.write_bytes(b"\x00\xff\n{}\n[1]\n" + newer + b"[" * 5000 + b"\n" + no_text + path.read_bytes())
    index = index_of(run.run_dir.episodes)
    assert (index.damaged, len(index.ids)) == (6, 12)


def test_after_a_resume_took_steps_back_the_index_begins_again(run: RecordedRun) -> None:
    index = index_of(run.run_dir.episodes)
    run.run_dir.set_aside_after(1)
    index.refresh(PATIENCE_S)
    assert len(index.ids) == 8
    assert index.row("g00000002-r0") is None
    assert index.generation == 1


def test_a_longer_file_in_the_place_of_another_is_read_anew_also_with_its_inode(run: RecordedRun) -> None:
    index = index_of(run.run_dir.episodes)
    path, ids = sorted(run.run_dir.episodes.glob("step_*.jsonl"))[-1], set(index.ids)
    whole = path.read_bytes()
    for content in (b'{"kind":"other"}\n', whole):
        path.write_bytes(content)  # the inode stays
        index.refresh(PATIENCE_S)
    assert set(index.ids) == ids


def test_the_index_stays_while_a_run_compresses_and_removes_its_files(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SMALL_BYTES", 0)
    folder = run.run_dir.episodes
    index = EpisodeIndex(lambda: step_files(folder))
    index.refresh(PATIENCE_S)
    names, records = list(index.ids), [index.record(row) for row in range(12)]
    compress_step(step_file(folder, 0))
    compress_step(step_file(folder, 1))
    run.step()
    run.episodes.sync()
    index.refresh(PATIENCE_S)
    assert (index.ids[:12], len(index.ids), index.generation) == (names, 16, 0)
    assert [index.record(row) for row in range(12)] == records
    assert selected(index, text="g00000001-r3") == ["g00000001-r3"]
    fresh = EpisodeIndex(lambda: step_files(folder))
    fresh.refresh(PATIENCE_S)
    assert (fresh.ids, fresh.record(3)) == (index.ids, records[3])
    remove_steps(folder, 2)
    index.refresh(PATIENCE_S)
    assert (len(index.ids), index.line(0), index.generation, index.error) == (16, b"", 0, "")
    assert selected(index, text="Sum-v0") == index.ids[:7:-1]


@pytest.mark.parametrize(
    "kwargs", [{"turns": [1, {"turns": []}]}, {"a": [{"b": 1, "turns": [2]}] * 50}, {"t": ',"turns":['}]
)
def test_keyword_arguments_of_an_environment_do_not_mislead_it(kwargs: Any) -> None:
    record = {
        "kind": "trajectory",
        "episode_id": "e",
        "group_id": "g",
        "task_id": "t",
        "env_id": "E",
        "env_kwargs": kwargs,
    }
    line = json.dumps({**record, "reward": 0.25, "turns": [{"action": "go"}]}, separators=(",", ":")).encode()
    head = head_of(line)
    assert head is not None
    assert (head.episode_id, head.reward) == ("e", 0.25)


def test_filters_select_and_columns_sort(run: RecordedRun) -> None:
    run.step(
        [trajectory("long", "g7", ["x" * 90], reward=-2.5), trajectory("short", "g7", ["y"], reward=0.25, success=None)]
    )
    index = index_of(run.run_dir.episodes)
    assert selected(index, group="g7") == ["short", "long"]
    assert selected(index, min_reward=-3, max_reward=0.3, min_step=3) == ["short", "long"]
    assert selected(index, success="unknown") == ["short"]
    assert selected(index, min_tokens=90) == ["long"]
    assert selected(index, env="No-v0") == []
    assert selected(index, sort="tokens", descending=True)[0] == "long"
    assert selected(index, sort="tokens", descending=False)[0] == "short"
    assert selected(index, sort="reward", descending=False)[0] == "long"


def test_text_is_found_wherever_it_stands_and_as_it_was_written(run: RecordedRun) -> None:
    run.step([trajectory("quotes", "g8", ['say "ünïcode"\nand \\ more'])])
    run.fail("env_error", "the lamp broke")
    index = index_of(run.run_dir.episodes)
    assert selected(index, text='"ünïcode"\nand \\') == ["quotes"]
    assert selected(index, text="the lamp broke") == ["failed-1"]
    assert selected(index, text="answer is 43") == []
    assert len(selected(index, text="answer is 42")) == 6
    assert selected(index, text="answer is 42", max_step=0) == ["g00000000-r3", "g00000000-r1"]


def test_a_long_search_goes_on_from_request_to_request(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_flash.dashboard.episode_search.SLICE_S", -1.0)
    index = index_of(run.run_dir.episodes)
    search = Search(index, Selection(run="r", text="answer is 42"))
    search.go_on()
    assert search.searched == 0
    monkeypatch.setattr("roll_flash.dashboard.episode_search.SLICE_S", 60.0)
    search.go_on()
    assert (search.searched, search.total) == (12, 6)


def test_numbers_that_miss_the_end_of_the_index_are_not_called_complete(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look = threading.Event()

    def paths() -> list[Path]:
        assert may_look.wait(PATIENCE_S)
        return step_files(run.run_dir.episodes)

    index = EpisodeIndex(paths)
    index.refresh(0)
    columns = index.columns

    def columns_before_the_end() -> Any:
        found = columns()
        may_look.set()
        index.refresh(PATIENCE_S)
        return found

    monkeypatch.setattr(index, "columns", columns_before_the_end)
    first = counts(index)
    assert (first["episodes"], first["is_complete"]) == (0, False)
    monkeypatch.undo()
    second = counts(index)
    assert (second["episodes"], second["is_complete"]) == (12, True)


def test_an_unreadable_folder_is_said_and_not_raised(tmp_path: Path) -> None:
    def gone() -> list[Path]:
        return [tmp_path / "gone.jsonl"]

    index = EpisodeIndex(gone)
    index.refresh(PATIENCE_S)
    assert index.error == f"{tmp_path / 'gone.jsonl'}: No such file or directory"
