"""Where rows come from: separators, what Python may give, what is no file of rows, and code that never ends."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_flash.config.sections.data import DataConfig
from roll_flash.config.sections.evaluation import EvalConfig
from roll_flash.config.tree import EnvConfig
from roll_flash.envs.datasets import columns, formats, trial
from roll_flash.envs.datasets.columns import UsedColumns
from roll_flash.envs.datasets.formats import open_rows
from roll_flash.envs.datasets.rows import Rows
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.envs.datasets.splits import split_rows
from roll_flash.envs.datasets.spooled import as_json, spooled
from roll_flash.envs.hosting import waiting
from roll_flash.errors import ConfigError
from roll_flash.evaluation.tasks import held_out_tasks

ALL = UsedColumns(None)


def opened(path: Path) -> Rows:
    return open_rows(DataConfig(path=str(path)), str(path), "train", ALL)


@pytest.mark.parametrize(
    ("name", "separator"),
    [("my.csv", ","), ("my.csv", ";"), ("my.csv", "\t"), ("my.csv", "|"), ("my.tsv", "\t"), ("my.tsv", ",")],
)
def test_columns_of_a_spreadsheet_are_found_and_another_separator_is_said(
    name: str, separator: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(f"prompt{separator}answer\nHow much is it?{separator}6\n")
    assert list(opened(tmp_path / name)) == [{"prompt": "How much is it?", "answer": "6"}]
    is_said = "its columns are separated by" in capfd.readouterr().err
    assert is_said == (separator != {"my.csv": ",", "my.tsv": "\t"}[name])


def test_a_column_without_a_name_and_a_separator_within_quotes_are_read(tmp_path: Path) -> None:
    (tmp_path / "index.csv").write_text(",prompt,answer\n0,How much is it?,6\n")  # as pandas writes its index
    assert list(opened(tmp_path / "index.csv")) == [{"": "0", "prompt": "How much is it?", "answer": "6"}]
    (tmp_path / "quoted.csv").write_text('"question, in short";answer\nHow much is it?;6\n')
    assert list(opened(tmp_path / "quoted.csv")) == [{"question, in short": "How much is it?", "answer": "6"}]


@pytest.mark.parametrize("column", ["environment_column", "kwargs_column"])
def test_the_numbers_of_a_column_without_a_name_are_no_environments(column: str, tmp_path: Path) -> None:
    """With pandas' index each row was a kind of its own: the start tried the rewards of all rows."""
    rows = "".join(f"{number},What is {number}?,{number},\n" for number in range(20))
    (tmp_path / "index.csv").write_text(f",prompt,answer,own\n{rows}")
    (tmp_path / "odd.jsonl").write_text('{"": [[]], "prompt": "a?", "answer": "1", "own": null}\n' * 3)
    for name in ("index.csv", "odd.jsonl"):
        data = {"path": str(tmp_path / name), column: "own"}
        env = EnvConfig.model_validate({"id": "Dataset-v0", "data": data, "reward": "exact"})
        assert len(split_rows(env.model_dump_json(), None).examples) == 1


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("C:\\data\\my.jsonl", "this is a path of Windows"),
        ("C:/data/my.csv", "this is a path of Windows"),
        ("data\\my.jsonl", "this is a path of Windows"),
        ("https://example.com/my.jsonl", "an address is not read; download the file"),
        ("", "the path is empty"),
    ],
)
def test_a_path_that_cannot_be_one_here_is_no_module_of_python(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_rows(DataConfig(path=path), path, "train", ALL)
    assert says in str(error.value)


def test_a_folder_with_the_suffix_of_a_file_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "my.parquet").mkdir()
    with pytest.raises(ConfigError, match=r"my\.parquet, a folder: the package datasets"):
        opened(tmp_path / "my.parquet")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("my.jsonl", b"\x1f\x8b\x08", "my.jsonl: it is compressed; run gunzip"),
        ("my.jsonl", b"\x28\xb5\x2f\xfd", "my.jsonl: it is compressed; run unzstd"),
        ("my.jsonl", b'[\n{"prompt": "a"}\n]\n', "my.jsonl: it is one list; write one object per line: jq"),
        ("my.jsonl", '{"prompt": "a"}'.encode("utf-16-le"), "my.jsonl: it is UTF-16; save it as UTF-8"),
        ("my.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', "my.jsonl, line 2: it is not UTF-8; save it as UTF-8"),
        ("my.csv", b"\x1f\x8b\x08", "my.csv: it is compressed; run gunzip"),
        ("my.csv", "prompt,answer\na,1\n".encode("utf-16"), "my.csv: it is UTF-16; save it as UTF-8"),
        ("my.csv", b"prompt,answer\na,1\nb,2\n\xe9,3\n", "my.csv, line 4: it is not UTF-8; save it as UTF-8"),
        (
            "my.csv",
            b'prompt,answer\na,1\n"b,2\nc,3\n',
            "my.csv, line 3: unexpected end of data; is a quote not closed?",
        ),
        ("my.jsonl.gz", b"", "not .gz; unpack it with gunzip"),
        ("my.xlsx", b"", "not .xlsx; save it as CSV"),
    ],
)
def test_what_has_no_rows_is_named_with_its_line_and_the_way_out(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        list(opened(tmp_path / name))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (np.int64(3), 3),
        (np.float32(0.3), 0.3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([True]), [True]),
        (float("nan"), None),
        (10**40, 10**40),
        (Decimal("1.50"), "1.50"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (np.datetime64("2020-01-02T03:04:05", "ns"), "2020-01-02T03:04:05.000000000"),
        (Path("a/b"), "a/b"),
        ({"a": (np.int8(1), None)}, {"a": [1, None]}),
    ],
)
def test_what_python_gives_is_held_exactly(value: Any, held: Any) -> None:
    found = as_json(value)
    assert (found, type(found)) == (held, type(held))
    (row,) = Rows(spooled([{"value": value}], "mine.py:rows", 60.0, ALL), "mine.py:rows", "row")
    assert row == {"value": held}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"raw", "a bytes"),
        ({1, 2}, "a set"),
        (1j, "a complex"),
        (float("inf"), "an infinite number"),
        (datetime.timedelta(1), "a timedelta"),
        ([{"a": object()}], "a object"),
        ({1: 2}, "a dict"),
    ],
)
def test_what_no_row_can_hold_is_one_line_and_never_becomes_a_text(value: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        spooled([{"value": 1}, {"value": value}], "mine.py:rows", 60.0, ALL)
    assert str(error.value).startswith(f"mine.py:rows, row 2: 'value' is {kind}, which a row cannot hold; make it")
    others = UsedColumns(frozenset({"prompt"}))
    (row,) = Rows(spooled([{"prompt": "a?", "value": value}], "mine.py:rows", 60.0, others), "mine.py:rows", "row")
    assert row == {"prompt": "a?"}


STUCK = """
import pathlib, time
def wait():
    while not pathlib.Path(__file__).with_name("go").exists(): time.sleep(0.01)
def rows():
    yield {"prompt": "a?", "answer": 1}
    wait()
async def blocks(answer): wait()
"""


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DatasetTasks]]:
    """Code that waits until the test has ended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "imports.py").write_text(f"{STUCK}wait()\n")
    (tmp_path / "my.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(9)))
    for module, name in ((formats, "NO_ROW_S"), (columns, "LOADING_S"), (trial, "REWARD_TIMEOUT_S")):
        monkeypatch.setattr(module, name, 1.0)
    monkeypatch.setattr(trial, "START_S", 0.0)
    monkeypatch.setattr(waiting, "FIRST_SAID_S", 0.1)

    def tasks(data: str, reward: str = "exact") -> DatasetTasks:
        return DatasetTasks(EnvConfig(id="Dataset-v0", data=data, reward=reward))  # type: ignore[arg-type]

    yield tasks
    (tmp_path / "go").touch()


@pytest.mark.parametrize(
    ("data", "reward", "what"),
    [
        ("stuck.py:rows", "exact", "data stuck.py:rows"),
        ("imports.py:rows", "exact", "data imports.py:rows"),
        ("my.jsonl", "stuck.py:blocks", "reward stuck.py:blocks"),
        ("my.jsonl", "imports.py:blocks", "the code of reward imports.py:blocks"),
    ],
)
def test_code_of_the_user_that_never_ends_is_said_and_then_one_line(
    data: str, reward: str, what: str, stuck: Callable[..., DatasetTasks], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=rf"^{what}: nothing came for 1 s.*does it wait for something\?"):
        stuck(data, reward)
    assert f"waiting for {what}" in capfd.readouterr().err


def test_a_folder_that_is_not_there_is_said_before_a_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data data/mine, which is no file or folder here: the package datasets"):
        opened(Path("data/mine"))


def test_rows_of_which_none_can_be_held_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"prompt": "a?", "answer": 1}\n' * 3)
    data: Any = str(tmp_path / "my.jsonl")
    with pytest.raises(ConfigError, match=r"my\.jsonl: no row can be held out, because all have one prompt"):
        held_out_tasks(EnvConfig(id="Dataset-v0", data=data, reward="exact"), EvalConfig())  # type: ignore[arg-type]


def test_a_template_names_no_column_that_is_null(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"q": "a", "answer": 1}\n{"q": null, "answer": 1}\n')
    data: Any = {"path": str(tmp_path / "my.jsonl"), "template": "{q}?"}
    with pytest.raises(ConfigError, match=r"line 2: 'q'.* is null"):
        DatasetTasks(EnvConfig(id="Dataset-v0", data=data, reward="exact"))  # type: ignore[arg-type]
