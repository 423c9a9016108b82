"""A run's folder that anybody may have written: each reader refuses it with one line, waits for nothing, ends."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from roll_flash import checked_files
from roll_flash.checked_files import UnusableFileError, load_yaml, open_checked, read_checked
from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.engines.inference import Generation
from roll_flash.errors import CheckpointError, ConfigError, RunError
from roll_flash.monitor.episodes import episode_record, find_trajectories, next_group_number
from roll_flash.monitor.json_lines import encode, with_checksum
from roll_flash.monitor.metrics import keep_steps_until
from roll_flash.rollout.recovery import Recovery
from roll_flash.rollout.turn_file import HEAD, NAME, framed, read_turns
from roll_flash.rollout.turns import RecordedTurn
from roll_flash.run.checkpoints.folder import MANIFEST, read_manifest
from roll_flash.run.journal import read_journal
from roll_flash.run.results import Run
from roll_flash.run.run_dir import Checkpoint
from roll_flash.system.resume import read_state
from tests.dashboard.served import Dashboard, serving
from tests.dashboard.written_run import RecordedRun, trajectory

DEEP = b"[" * 100_000 + b"]" * 100_000
READERS = {
    "config.yaml": ["diagnose"],
    "metrics.jsonl": ["verify", "diagnose"],
    "status.json": ["status"],
    "summary.json": [],
    "journal/after_step_000000.jsonl": ["verify"],
    "episodes/step_000000.jsonl": ["verify", "diagnose"],
    "logs/timeline.jsonl": ["diagnose"],
    "logs/learner_logprobs/step_000001.jsonl": [],
    "checkpoints/step_1/checksums.json": ["checkpoints verify"],
    ".lock": ["scale"],
}
"""Commands that read a file, beside the dashboard."""
QUESTIONS = {
    "run": {},
    "findings": {},
    "metrics": {"name": "reward"},
    "episodes": {},
    "timeline": {},
    "episode": {"id": "g00000000-r0"},
}
"""What a page of the dashboard asks."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recorded = RecordedRun(tmp_path / "runs")
    recorded.step()
    recorded.checkpoint()
    recorded.close()
    return recorded.folder


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(300 << 20)


def deep_record(path: Path) -> None:
    line = b'{"step":' + DEEP + b',"kind":"trajectory","event":' + DEEP + b"}"
    path.write_bytes(with_checksum(line) + b"\n")


def absurd(path: Path) -> None:
    """Numbers that float64 or an array does not hold, and types that no run writes."""
    lines = [b'{"step":1e999}', b'{"step":' + b"9" * 5000 + b"}", b'{"step":NaN}', b'{"step":[],"tasks":3,"reward":{}}']
    path.write_bytes(b"\n".join(map(with_checksum, lines)) + b"\n")


def ask_all(served: Dashboard, run: str) -> list[int]:
    """Return the status of each answer."""
    with served.client() as client:
        answers = [client.get(f"/api/{path}", params={"run": run, **query}) for path, query in QUESTIONS.items()]
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert "\n" not in str(answer.json().get("error", ""))
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("make", [fifo, sparse, deep_record, absurd])
def test_no_command_breaks_off_or_waits_because_of_a_file_in_a_runs_folder(
    make: Callable[[Path], None], run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_files, "MAX_LINE_BYTES", 1 << 20)
    with serving(run) as served:
        for name, commands in READERS.items():
            path = run / name
            saved = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            path.parent.mkdir(exist_ok=True)
            make(path)
            for command in commands:
                assert main([*command.split(), str(run), *(["servers=2"] if command == "scale" else [])]) in (0, 1, 2)
                said = capsys.readouterr().err
                assert "internal error" not in said, (name, command, said)
                assert len(said.splitlines()) <= 2, (name, command, said)
            assert set(ask_all(served, run.name)) <= {200, 404, 422, 503}, name
            path.unlink()
            if saved is not None:
                path.write_bytes(saved)
        assert set(ask_all(served, run.name)) == {200}
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out


@pytest.mark.parametrize("name", ["plot", "plan"])
def test_metrics_that_no_run_wrote_are_one_line_of(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (b'{"step":' + DEEP + b"}\n", b'{"step":1e999}\n', b'{"step":"x"}\n', b"[]\n"):
        (run / "metrics.jsonl").write_bytes(content)
        words = {"plot": [str(run)], "plan": [str(run / "config.yaml"), "--from", str(run)]}[name]
        assert main([name, *words]) in (1, 2)
        said = capsys.readouterr().err
        assert "metrics.jsonl" in said
        assert "internal error" not in said


def test_what_python_reads_of_a_damaged_run_is_an_error_of_this_package(run: Path) -> None:
    absurd(run / "metrics.jsonl")
    (run / "summary.json").write_bytes(b'{"a":' + DEEP + b"}")
    with pytest.raises(RunError, match="line 1"):
        Run(run).metrics()
    with pytest.raises(ValueError, match="nested too deeply"):
        Run(run).summary()


def test_lines_of_other_files_keep_what_is_no_number_when_later_steps_are_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"step":1,"learner":[["update",1.5,2.5,3]]}\n{"step":2,"learner":[]}\n')
    keep_steps_until(path, 1)
    assert json.loads(path.read_text()) == {"step": 1, "learner": [["update", 1.5, 2.5, 3]]}


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 100_000,
        "- " * 100_000 + "1",
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{two}: &{two} [*{one}{f', *{one}' * 9}]\n" for one, two in itertools.pairwise("abcdefgh")),
        "a: &a [*a]",
        "a: 1" + ":1" * 300_000,
        "a: [" + "1, " * 200_000 + "]",
        "#" * (2 << 20),
    ],
    ids=["nested", "nested in blocks", "aliases of aliases", "alias of itself", "base 60", "many values", "large"],
)
def test_yaml_that_would_take_the_process_or_all_memory_is_refused(text: str, run: Path) -> None:
    """The C loader composes by recursion without a limit: the first one ended the dashboard with SIGSEGV."""
    with pytest.raises(ValueError, match=r"nests deeper|stands within|over 4,000 digits|larger than 1 MiB"):
        load_yaml(text.encode())
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(run / "config.yaml")


def test_yaml_with_aliases_and_merged_keys_is_read() -> None:
    text = b"base: &base {a: 1, b: [2, 3]}\nother:\n  <<: *base\n  a: 4\nlist: [*base, *base]\n"
    first = {"a": 1, "b": [2, 3]}
    assert load_yaml(text) == {"base": first, "other": {"a": 4, "b": [2, 3]}, "list": [first, first]}


def test_only_plain_files_of_a_size_are_read_and_links_to_them(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_checked(link, 5) == b"12345"
    with pytest.raises(RunError, match=r"file: cannot be read: larger than 0 MiB"):
        read_checked(path, 4)
    for other in (tmp_path, Path("/dev/zero")):
        with pytest.raises(UnusableFileError):
            open_checked(other)


FIELDS = (
    "episode_id",
    "index",
    "prompt",
    "answer",
    "token_ids",
    "logprobs",
    "versions",
    "finish",
    "server",
    "elapsed_s",
)


def turn_record(name: str, index: int, change: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    tokens = np.array([3, 4], np.int32)
    generation = Generation(tokens, np.array([-0.5, -0.25], np.float32), np.array([1, 1], np.int32), "stop", "s", 0.1)
    record = dict(
        zip(FIELDS, msgspec.msgpack.decode(RecordedTurn(7, generation, 8).sent(name, index).record), strict=True)
    )
    assert change.keys() <= record.keys()
    return framed(msgspec.msgpack.encode(list((record | change).values())))


def test_a_group_number_of_thousands_of_digits_is_none_of_ours(tmp_path: Path) -> None:
    line = b'{"group_id":"g%s"}\n'
    (tmp_path / "step_000000.jsonl").write_bytes(line % b"00000007" + line % (b"9" * 5000))
    assert next_group_number(tmp_path, 0) == 8


def test_an_episode_whose_first_turn_is_damaged_begins_again_and_the_run_goes_on(tmp_path: Path) -> None:
    first = bytearray(turn_record("a", 0))
    first[-1] ^= 1
    (tmp_path / NAME).write_bytes(HEAD + first + turn_record("a", 1) + turn_record("b", 0))
    assert read_turns(tmp_path)[0].versions() == {"b": (1, 1)}


@pytest.mark.parametrize(
    "change",
    [
        {"index": 1 << 40},
        {"index": -1},
        {"episode_id": ["a"]},
        {"token_ids": "x"},
        {"token_ids": b"x"},
        {"token_ids": bytes.fromhex("ffffffff00000000")},
        {"logprobs": bytes.fromhex("0000c07f0000c07f")},
        {"logprobs": bytes.fromhex("0000803f0000803f")},
        {"versions": [[1, 1 << 30]]},
        {"versions": [[1 << 40, 2]]},
        {"versions": [[1, -2]]},
        {"finish": []},
        {"elapsed_s": "x"},
        {"elapsed_s": float("nan")},
        {"answer": "x"},
    ],
    ids=str,
)
def test_turns_that_no_worker_wrote_are_left_out(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(HEAD + turn_record("a", 0, change) + turn_record("b", 0))
    book, line = read_turns(tmp_path)
    assert set(book.versions()) == {"b"}
    is_next_turn = change.get("index", 0) == 0
    assert ("damaged in 1 places" in line) == (is_next_turn or change["index"] < 0)


@pytest.mark.parametrize("record", [b"\x91" * 100_000, b"\xda\x00\x02\xff\xff", b"\xdd\xff\xff\xff\xff"])
def test_what_is_no_record_of_a_turn_is_left_out(record: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(HEAD + framed(record) + turn_record("b", 0))
    assert set(read_turns(tmp_path)[0].versions()) == {"b"}


def test_after_zeros_as_a_loss_of_power_leaves_them_no_turn_is_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(HEAD + turn_record("a", 0) + framed(b"") + turn_record("b", 0))
    book, line = read_turns(tmp_path)
    assert set(book.versions()) == {"a"}
    assert "damaged in 1 places" in line


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [-1] * 3},
        {"token_ids": [1 << 40]},
        {"versions": "x"},
        {"logprobs": [{}]},
        {"policy_mask": [7]},
        {"turns": 3},
        {"prompt_length": 1 << 40},
        {"messages": ["x"]},
        {"reward": None},
        {"branches": {}},
        {"end": ["x"]},
        {"info": []},
    ],
    ids=str,
)
def test_trajectories_that_no_worker_wrote_count_as_damaged(change: dict[str, Any], tmp_path: Path) -> None:
    whole, bad = (trajectory(name, "g1", ["yes"]) for name in ("whole", "bad"))
    lines = [episode_record(whole), episode_record(bad) | change]
    written = b"\n".join(with_checksum(encode(line).encode()) for line in lines) + b"\n"
    (tmp_path / "step_000000.jsonl").write_bytes(written)
    found = find_trajectories(tmp_path, {each.episode_id: each.task for each in (whole, bad)})
    assert list(found) == ["whole"]


def state(**changes: Any) -> dict[str, Any]:
    task = {"task_id": "t", "env_id": "Env-v0", "seed": 1}
    groups = [[4, task, 0, ["g00000004-r0"]]]
    plain = {"mark": "m", "version": 2, "next_group": 5, "groups": groups, "requeued": [[task, 1]], "tasks": {}}
    return {**plain, "async_ratio": None, **changes}


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"version": 1e300},
        {"next_group": 2**70},
        {"groups": [[-1, {"task_id": "t", "env_id": "e", "seed": 1}, 0, []]]},
        {"groups": [[1, {"task_id": "t", "env_id": "e", "seed": "x"}, 0, []]]},
        {"groups": [[1, {"task_id": [], "env_id": "e", "seed": 1}, 0, []]]},
        {"groups": [3]},
        {"requeued": {"a": 1}},
        {"tasks": []},
        {"mark": None},
    ],
    ids=str,
)
def test_a_trainer_state_that_no_run_wrote_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = Checkpoint(2, tmp_path)
    checkpoint.trainer.write_text(json.dumps(state()))
    assert read_state(checkpoint).next_group == 5
    for text in (json.dumps(state(**change)), f'{{"mark":{DEEP.decode()}}}', json.dumps(state(version=float("inf")))):
        checkpoint.trainer.write_text(text)
        with pytest.raises(CheckpointError, match="not readable as a trainer state"):
            read_state(checkpoint)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "admitted", "number": -3, "task": {"task_id": "t", "env_id": "e", "seed": 1}},
        {
            "event": "admitted",
            "number": 3,
            "requeues": 0,
            "drawn": True,
            "task": {"task_id": 1, "env_id": [], "seed": {}},
        },
        {"event": "ended", "group": [], "episode": "e", "kept": True, "score": 0.0, "task": None},
        {"event": "ended", "group": "g", "episode": "e", "kept": True, "score": "x", "task": None},
        {"event": "dropped", "group": {}, "reason": "stale"},
        {"event": "trained", "version": 1e300, "batches": [], "without_rows": [], "metrics": {}},
        {"event": "trained", "version": 1, "batches": [[["g", [["e", "x"]]]]], "without_rows": [], "metrics": {}},
    ],
    ids=str,
)
def test_an_event_that_no_run_wrote_is_a_value_error(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        Recovery.beginning().repeat([event], max_requeues=1)


def test_an_event_that_cannot_be_decoded_is_damage(tmp_path: Path) -> None:
    good = with_checksum(b'{"event":"begin","format":1}')
    for text in (b'{"event":"x","y":' + DEEP + b"}", b'{"event":"x","y":1e999}', b'{"event":3}', b'{"y":NaN}'):
        (tmp_path / "after_step_000000.jsonl").write_bytes(good + b"\n" + with_checksum(text) + b"\n")
        events, damage = read_journal(tmp_path)
        assert len(events) == 1
        assert damage is not None
        assert "line 2 is damaged" in damage.message


def test_a_learners_manifest_that_no_run_wrote_is_a_checkpoint_error(tmp_path: Path) -> None:
    for text in (
        DEEP,
        b"[]",
        b'{"format":1,"model":"m","files":{"a":-1}}',
        b'{"format":1,"model":"m","version":1e999}',
    ):
        (tmp_path / MANIFEST).write_bytes(text)
        with pytest.raises(CheckpointError):
            read_manifest(tmp_path, "m")
