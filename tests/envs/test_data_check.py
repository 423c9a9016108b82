"""`roll-flash envs check CONFIG.yaml`: each way in which rows can train badly is found, good rows are not blamed."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from roll_flash.cli.main import main
from roll_flash.config.tree import EnvConfig
from roll_flash.envs.check.checks import EnvCheck
from roll_flash.envs.check.datasets import Room, _Rows, check_data_set
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.models.prepare import resolve_model
from roll_flash.types import Message

GOOD = [{"prompt": f"What is {n} plus 1?", "answer": n + 1} for n in range(60)]
REPEATS, ANSWERS, LEAKS, ROOM, SCORERS = (
    "no row is there twice",
    "one prompt has one answer",
    "held-out rows are not trained on",
    "prompts leave room for an answer",
    "right answers earn the full reward",
)


def words_of(messages: Sequence[Message]) -> int:
    """A stand-in for a tokenizer."""
    return sum(len(message["content"].split()) for message in messages)


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def check(
    folder: Path, rows: Sequence[Mapping[str, Any]], *, room: Room | None = None, **entry: Any
) -> dict[str, EnvCheck]:
    data = {"path": write(folder / "rows.jsonl", rows), **entry.pop("data", {})}
    env = EnvConfig(id="Dataset-v0", data=data, **{"reward": "exact", **entry})
    return {each.name: each for each in check_data_set(env, room or Room(words_of, 64, 16)).checks}


def test_good_rows_pass_every_check(tmp_path: Path) -> None:
    found = check(tmp_path, GOOD)
    assert {each.status for each in found.values()} == {"pass"}
    assert found["rows are tasks"].detail == "57 to train on, 3 held out"
    assert found[SCORERS].detail == "57 rows"


def test_rows_that_repeat_are_counted_and_need_not_be_wrong(tmp_path: Path) -> None:
    found = check(tmp_path, GOOD, data={"held_out": write(tmp_path / "test.jsonl", [{"prompt": "?", "answer": 1}])})
    assert found[REPEATS].status == "pass"
    found = check(tmp_path, [*GOOD, GOOD[0], GOOD[0]], data={"held_out": str(tmp_path / "test.jsonl")})
    assert found[REPEATS].status == "skip"
    assert found[REPEATS].detail.startswith("2 of 62 training rows repeat an earlier one, first rows/60")
    assert found[ANSWERS].status == "pass"


def test_rows_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    other = {**GOOD[5], "answer": 77}
    found = check(
        tmp_path, [*GOOD, other], data={"held_out": write(tmp_path / "test.jsonl", [{"prompt": "?", "answer": 1}])}
    )
    assert found[ANSWERS].status == "fail"
    assert "first rows/60 and rows/5" in found[ANSWERS].detail


@pytest.mark.parametrize("prompt", ["what is 5 PLUS 1", "What  is 5 plus 1 ?", "What is 5, plus 1?!"])
def test_held_out_rows_in_another_spelling_are_found(tmp_path: Path, prompt: str) -> None:
    test = write(tmp_path / "test.jsonl", [{"prompt": prompt, "answer": 6}, {"prompt": "Else?", "answer": 1}])
    found = check(tmp_path, GOOD, data={"held_out": test})
    assert found[LEAKS].status == "fail"
    assert "first rows/5 and rows/held_out/0" in found[LEAKS].detail


@pytest.mark.parametrize(("trained", "held_out"), [("What is 5 + 1?", "What is 5 - 1?"), ("Go: #.@", "Go: @.#")])
def test_signs_tell_tasks_apart(tmp_path: Path, trained: str, held_out: str) -> None:
    """Rows of sums failed the check, because their differences were held out."""
    test = write(tmp_path / "test.jsonl", [{"prompt": held_out, "answer": 4}])
    found = check(tmp_path, [*GOOD, {"prompt": trained, "answer": 6}], data={"held_out": test})
    assert found[LEAKS].status == "pass"


def test_a_row_takes_little_memory(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} plus 1?", "answer": n + 1} for n in range(8000)]
    source = DatasetTasks(EnvConfig(id="Dataset-v0", data=write(tmp_path / "rows.jsonl", rows), reward="exact"))
    tracemalloc.start()
    try:
        _Rows.read(source)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / len(rows) < 120, "bytes of a row; a million of them fit beside a run"


def test_prompts_that_leave_no_room_are_counted(tmp_path: Path) -> None:
    long = [{"prompt": f"{n} " + "word " * (40 + n), "answer": n} for n in range(12)]
    held_out = {"held_out": write(tmp_path / "test.jsonl", [{"prompt": "?", "answer": 1}])}
    found = check(tmp_path, [*GOOD, *long], data=held_out, room=Room(words_of, max_length=64, answer=16))
    assert found[ROOM].status == "skip"
    assert found[ROOM].detail.startswith(
        "4 prompts leave fewer than rollout.max_new_tokens=16 tokens; the longest has 52"
    )
    assert check(tmp_path, long, data=held_out, room=Room(words_of, 68, 16))[ROOM].status == "pass"


@pytest.mark.parametrize(
    ("entry", "row", "reason"),
    [
        ({"kwargs": {"answer_in": "last_number"}}, {"prompt": "Half?", "answer": "1/2"}, "exact gives 0 to '1/2'"),
        ({"kwargs": {"answer_in": "boxed"}}, {"prompt": "Open?", "answer": "}{"}, "exact gives 0"),
        ({"reward": "reward.py:never"}, {"prompt": "Half?", "answer": "1"}, "never gives 0 to"),
    ],
)
def test_answers_that_their_own_reward_rejects_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], row: dict[str, Any], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def never(answer, expected):\n    return 0.0\n")
    entry = {**entry, "data": {"held_out": write(tmp_path / "test.jsonl", [{"prompt": "?", "answer": 1}])}}
    found = check(tmp_path, [*GOOD[:3], row] if "never" not in str(entry) else [row], **entry)
    assert found[SCORERS].status == "fail"
    assert reason in found[SCORERS].detail
    assert found[SCORERS].detail.startswith("1 of ")


def test_rows_with_patterns_or_tests_have_no_answer_to_score(tmp_path: Path) -> None:
    found = check(tmp_path, [{"prompt": f"{n}?", "answer": "[0-9]+"} for n in range(30)], reward="regex")
    assert found[SCORERS].status == "skip"


def test_the_command_checks_rows_and_plays_the_first_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "my.jsonl", GOOD)
    config = tmp_path / "my.yaml"
    config.write_text(
        "model: {path: tiny, max_length: 256}\nrollout: {max_new_tokens: 16}\n"
        "envs: [{id: Dataset-v0, data: my.jsonl, reward: number}]\n"
    )
    assert main(["envs", "check", str(config), "--json"]) == 0
    rows, played = json.loads(capsys.readouterr().out)["reports"]
    assert [each["status"] for each in rows["checks"]] == ["pass"] * 6
    assert "model.max_length is 256" in rows["checks"][4]["detail"]
    assert played["env_id"] == "Dataset-v0"
    assert played["ok"]
    assert main(["envs", "check", str(config), "rollout.max_new_tokens=200", "model.max_length=204"]) == 0
    assert "prompts leave fewer than rollout.max_new_tokens=200 tokens" in capsys.readouterr().out


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "my.jsonl", GOOD)
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    config = tmp_path / "my.yaml"
    config.write_text("model: {path: model}\nenvs: [{id: Dataset-v0, data: my.jsonl, reward: number}]\n")
    assert main(["envs", "check", str(config)]) == 2
    assert "model: its tokenizer cannot be loaded: " in capsys.readouterr().err


def test_the_verdict_is_that_of_training_which_leaves_out_what_is_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(
        "model: {path: tiny, max_length: 256}\nrollout: {max_new_tokens: 16}\n"
        "envs: [{id: Dataset-v0, data: {path: my.jsonl, held_out: test.jsonl}, reward: number}]\n"
    )
    write(tmp_path / "test.jsonl", [{"prompt": "?", "answer": 1}])
    write(tmp_path / "my.jsonl", [*GOOD, {"prompt": "word " * 400, "answer": 1}])
    assert main(["envs", "check", str(config), "--json"]) == 0
    rows = {each["name"]: each for each in json.loads(capsys.readouterr().out)["reports"][0]["checks"]}
    assert rows["rows are tasks"]["detail"] == "60 to train on, 1 held out, 1 left out"
    assert rows[ROOM]["status"] == "pass"
    write(tmp_path / "my.jsonl", [{"prompt": f"{n} " + "word " * 400, "answer": 1} for n in range(9)])
    for command in (["envs", "check", str(config)], ["train", str(config), "--dry-run"]):
        assert main(command) == 2
        assert "no prompt leaves room for an answer in model.max_length=256 tokens" in capsys.readouterr().err
