"""Data sets as tasks: rows of files, what is held out, rewards, and one line for what cannot be played."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from roll_flash.chat.templates import chat_template_of
from roll_flash.config.sections.data import DataConfig, RewardConfig
from roll_flash.config.tree import EnvConfig, ModelConfig, load_config
from roll_flash.config.user_code import forget_changed_files, load_file
from roll_flash.envs.datasets import env as dataset_env
from roll_flash.envs.datasets import formats, prompt_lengths, rewards
from roll_flash.envs.datasets.answers import find_answer
from roll_flash.envs.datasets.columns import UsedColumns, demonstration_of, environment_of, prompt_of, task_arguments
from roll_flash.envs.datasets.env import python_code
from roll_flash.envs.datasets.formats import open_rows
from roll_flash.envs.datasets.rewards import exact, fault_of_answer, json_schema, math, number, regex
from roll_flash.envs.datasets.rows import Rows
from roll_flash.envs.datasets.source import DatasetTasks
from roll_flash.envs.registration import make_env
from roll_flash.envs.task_sources import open_tasks
from roll_flash.errors import ConfigError, EnvError
from roll_flash.models.prepare import resolve_model
from roll_flash.sandboxes import SandboxSpec, open_sandbox


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(count)]


Q = {"prompt": "1 + 1?"}


def tasks(data: Any, **entry: Any) -> DatasetTasks:
    return DatasetTasks(EnvConfig(id="Dataset-v0", data=data, **{"reward": "exact", **entry}))


def prompts(found: Any) -> list[str]:
    return [task.kwargs["messages"][-1]["content"] for task in found]


def all_of(source: DatasetTasks) -> list[str]:
    return prompts(source.next() for _ in range(source.size or 0))


def test_a_file_of_questions_and_answers_is_all_that_a_config_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", questions(100))
    config = load_config({"model": {"path": "tiny"}, "envs": [{"id": "Dataset-v0", "data": path, "reward": "exact"}]})
    source = open_tasks(config)
    task = source.next()
    assert source.size == 95
    assert len(source.held_out(100)) == 5
    assert task.task_id.startswith("my/")
    assert task.kwargs["answer"] in range(1, 101)


def test_each_row_is_played_once_and_what_is_held_out_never(tmp_path: Path) -> None:
    source = tasks(write(tmp_path / "my.jsonl", questions(200)))
    source.shuffle(3)
    trained, held_out = all_of(source), prompts(source.held_out(200))
    assert sorted([*trained, *held_out]) == sorted(row["prompt"] for row in questions(200))
    assert len(held_out) == 10


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    source = tasks({"path": write(tmp_path / "my.jsonl", questions(20) * 5), "held_out_share": 0.3})
    trained, held_out = set(all_of(source)), set(prompts(source.held_out(100)))
    assert held_out
    assert not trained & held_out


def test_rows_that_are_in_the_file_of_held_out_rows_too_are_not_trained_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held_out = write(tmp_path / "test.jsonl", questions(3))
    source = tasks({"path": write(tmp_path / "train.jsonl", questions(10)), "held_out": held_out})
    assert len(source.held_out(10)) == 3
    assert not set(all_of(source)) & set(prompts(source.held_out(10)))
    assert "3 rows are held out too and are not trained on" in capfd.readouterr().err


def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", questions(50))
    first, again = tasks(path), tasks(path)
    for source in (first, again):
        source.shuffle(7)
    for _ in range(20):
        first.next()
    again.restore(json.loads(json.dumps(first.state())))
    assert [first.next().task_id for _ in range(60)] == [again.next().task_id for _ in range(60)]


def test_a_checkpoint_of_other_rows_is_refused(tmp_path: Path) -> None:
    state = tasks(write(tmp_path / "my.jsonl", questions(50))).state()
    with pytest.raises(ValueError, match="are not those of the checkpoint"):
        tasks(write(tmp_path / "my.jsonl", questions(51))).restore(state)


def test_a_checkpoint_of_rows_with_other_answers_is_refused(tmp_path: Path) -> None:
    state = tasks(write(tmp_path / "my.jsonl", questions(50))).state()
    others = [{**row, "answer": 0} for row in questions(50)]
    with pytest.raises(ValueError, match="are not those of the checkpoint"):
        tasks(write(tmp_path / "my.jsonl", others)).restore(state)


def test_a_file_that_is_edited_in_place_ends_the_run_with_one_line(tmp_path: Path) -> None:
    source = tasks({"path": write(tmp_path / "my.jsonl", questions(50)), "shuffle": False})
    source.next()
    write(tmp_path / "my.jsonl", [{"prompt": "New", "answer": 1}, *questions(50)])
    with pytest.raises(ConfigError, match=r"my\.jsonl, line [0-9]+: the row has changed since the run began"):
        source.next()


def test_two_files_of_one_name_have_tasks_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write(tmp_path / name / "train.jsonl", questions(9)) for name in ("a", "b", "b")]
    entry = {"id": "Dataset-v0", "reward": "exact"}
    envs = [{**entry, "data": path, "kwargs": {"max_turns": n + 1}} for n, path in enumerate(paths)]
    config = load_config({"model": {"path": "tiny"}, "envs": envs})
    assert [env.data.name for env in config.envs if env.data] == ["a/train", "b/train", "b/train-2"]
    source = open_tasks(config)
    assert len({source.next().task_id for _ in range(source.size or 0)}) == source.size
    envs = [
        {**entry, "data": {"path": path, "name": "one"}, "kwargs": {"max_turns": n + 1}} for n, path in enumerate(paths)
    ]
    with pytest.raises(ConfigError, match="two data sets are called 'one'"):
        load_config({"model": {"path": "tiny"}, "envs": envs})


def test_epochs_end_and_without_a_shuffle_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", questions(40))
    source = tasks({"path": path, "epochs": 2, "shuffle": False})
    once = all_of(source)
    assert once == sorted(once, key=lambda text: int(text.split()[2]))
    assert all_of(source) == once
    with pytest.raises(StopIteration):
        source.next()


def test_columns_templates_and_a_system_message_make_the_prompt(tmp_path: Path) -> None:
    row = {"question": "2 + 2?", "solution": "4", "hint": "even"}
    path = write(tmp_path / "my.jsonl", [row, {**row, "question": "3 + 3?"}])
    data = {"path": path, "columns": {"answer": "solution"}, "template": "{question} ({hint})", "system": "Be brief."}
    kwargs = tasks(data, kwargs={"answer_in": "boxed"}).next().kwargs
    assert [message["role"] for message in kwargs["messages"]] == ["system", "user"]
    assert kwargs["messages"][1]["content"].endswith("? (even)")
    assert (kwargs["answer"], kwargs["answer_in"]) == ("4", "boxed")
    chats = [{"messages": [{"role": "user", "content": str(n)}], "answer": n} for n in range(2)]
    assert len(tasks(write(tmp_path / "chats.jsonl", chats)).next().kwargs["messages"]) == 1


def test_rows_are_keyword_arguments_of_other_environments(tmp_path: Path) -> None:
    path = write(tmp_path / "mazes.jsonl", [{"wide": n} for n in range(10)])
    env = EnvConfig(id="Maze-v0", kwargs={"walls": 2}, data={"path": path, "columns": {"size": "wide"}})
    assert DatasetTasks(env).next().kwargs.keys() == {"walls", "size"}


def test_a_csv_file_has_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text('prompt,answer\n"one,\ntwo?",2\nthree?,3\n')
    source = tasks(str(tmp_path / "my.csv"))
    assert sorted([*all_of(source), *prompts(source.held_out(2))]) == ["one,\ntwo?", "three?"]


@pytest.mark.adapters
def test_parquet_files_folders_and_saved_data_sets_have_the_same_rows(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    rows, others = (library.Dataset.from_list(part) for part in (questions(40), questions(45)[40:]))
    rows.to_parquet(tmp_path / "my.parquet")
    library.DatasetDict({"train": rows, "test": others}).save_to_disk(tmp_path / "saved")
    (tmp_path / "lines").mkdir()
    write(tmp_path / "lines" / "train.jsonl", questions(40))
    write(tmp_path / "lines" / "test.jsonl", questions(45)[40:])
    for name, part in (("train", rows), ("test", others)):
        part.to_parquet(tmp_path / "tables" / f"{name}.parquet")
    expected = all_of(tasks({"path": write(tmp_path / "my.jsonl", questions(40)), "held_out_share": 0.001}))
    assert all_of(tasks({"path": str(tmp_path / "my.parquet"), "held_out_share": 0.001})) == expected
    for folder in ("saved", "lines", "tables"):
        source = tasks({"path": str(tmp_path / folder), "held_out": "test"})
        assert sorted(all_of(source)) == sorted(row["prompt"] for row in questions(40))
        assert len(source.held_out(10)) == 5
        with pytest.raises(ConfigError, match=f"data .*{folder}: .*'?dev"):
            tasks({"path": str(tmp_path / folder), "split": "dev"})


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, str]:
    """Data sets with columns that no row can hold: a file, a folder of files with maps, one that `datasets` saved."""
    library, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    rows, count = questions(40), 40
    types = {
        "raw": (b"\xff", arrow.binary()),
        "map": ([("a", 1)], arrow.map_(arrow.string(), arrow.int64())),
        "deep": ({"x": b"1"}, None),
        "took": (datetime.timedelta(seconds=3), None),
        "when": (datetime.datetime(2026, 1, 2), arrow.timestamp("ns")),
    }
    table = arrow.Table.from_pylist(rows)
    for name, (value, kind) in types.items():
        table = table.append_column(name, arrow.array([value] * count, kind))
    (tmp_path / "folder").mkdir()
    for file in ("my.parquet", "folder/train.parquet"):
        arrow.parquet.write_table(table, tmp_path / file)
    features = library.Features(
        prompt=library.Value("string"), answer=library.Value("int64"), picture=library.Image(decode=False)
    )
    pictures = [{**row, "picture": {"bytes": b"no picture", "path": None}} for row in rows]
    library.Dataset.from_list(pictures, features=features).cast_column("picture", library.Image()).save_to_disk(
        tmp_path / "saved"
    )
    return {name: str(tmp_path / name) for name in ("my.parquet", "folder", "saved")}


@pytest.mark.adapters
def test_columns_that_the_config_does_not_use_are_not_read(odd: Mapping[str, str], tmp_path: Path) -> None:
    expected = all_of(tasks({"path": write(tmp_path / "my.jsonl", questions(40))}))
    for path in odd.values():
        source = tasks(path)
        assert all_of(source) == expected
        assert source.task(0).kwargs["row"] == {}


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("name", "column", "kind"),
    [
        ("my.parquet", "raw", "a bytes"),
        ("my.parquet", "deep", "a bytes"),
        ("my.parquet", "took", "a timedelta"),
        ("folder", "raw", "a bytes"),
        ("saved", "picture", "a bytes"),
    ],
)
def test_a_used_column_that_no_row_can_hold_is_one_line(
    name: str, column: str, kind: str, odd: Mapping[str, str]
) -> None:
    with pytest.raises(ConfigError) as error:
        tasks({"path": odd[name], "columns": {"answer": column}})
    says = f"{odd[name]}, row 1: {column!r} is {kind}, which a row cannot hold; make it a text, a number, a list or a"
    assert str(error.value).startswith(says)


@pytest.mark.adapters
def test_rewards_see_of_the_other_columns_what_a_row_can_hold(
    odd: Mapping[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def sees(row): return 1\n")
    source = tasks(odd["my.parquet"], reward=f"{tmp_path}/mine.py:sees")
    assert source.task(0).kwargs["row"] == {"map": {"a": 1}, "when": "2026-01-02T00:00:00"}
    assert "rewards do not see the column 'raw', because a row cannot hold a bytes" in capsys.readouterr().err
    assert tasks(odd["saved"], reward=f"{tmp_path}/mine.py:sees").task(0).kwargs["row"] == {}


@pytest.mark.adapters
def test_a_missing_column_is_told_with_the_names_of_those_that_are_there(odd: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"no column 'question'.* it has 'prompt', 'answer', 'map', 'when'"):
        tasks({"path": odd["my.parquet"], "columns": {"prompt": "question"}})


@pytest.mark.adapters
def test_keys_that_only_other_messages_have_are_not_in_a_chat(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?", "name": "Ann"}]
    rows = [{"messages": chat, "answer": 2}, {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": 3}]
    library.Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    source = tasks(str(tmp_path / "chats.parquet"))
    found = [source.task(0).kwargs["messages"], source.held_out_task(0).kwargs["messages"]]
    assert sorted(found, key=len, reverse=True) == [row["messages"] for row in rows]


def test_a_chat_in_a_file_without_lists_is_json(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"messages": json.dumps([*chat, {"role": "user", "content": str(n)}]), "answer": 2} for n in range(9)]
    assert tasks(write(tmp_path / "chats.jsonl", rows)).task(0).kwargs["messages"][:2] == chat
    with pytest.raises(ConfigError, match=r"my\.jsonl, line 1: 'messages' is no JSON"):
        tasks(write(tmp_path / "my.jsonl", [{"messages": "[{", "answer": 2}]))
    with pytest.raises(ConfigError, match="line 1: 'messages' is nested more than 64 deep"):
        tasks(write(tmp_path / "my.jsonl", [{"messages": "[" * 400 + "]" * 400, "answer": 2}]))


@pytest.mark.parametrize(("answer", "is_said"), [("1 + 1 #### 2", True), ("2", False)])
def test_a_first_answer_that_its_reward_rejects_is_said_at_the_start(
    answer: str, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"1 + {n}?", "answer": answer} for n in range(9)]
    tasks(write(tmp_path / "my.jsonl", rows), kwargs={"answer_in": "last_number"})
    says = (
        f"reward exact gives 0 to the right answer of {tmp_path}/my.jsonl, line 1, '1 + 1 #### 2', with answer_in: last"
    )
    assert (says in capsys.readouterr().err) == is_said


class StandInRows(list[dict[str, Any]]):
    """A stand-in for a data set of the library."""

    features = None

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> StandInRows:
        return StandInRows({name: row[name] for name in names} for row in self)


class StandInLibrary(ModuleType):
    """A stand-in for the library `datasets`, for what needs a hub."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("datasets")
        self.asked: list[Any] = []
        self._error = error

    def load_dataset(self, path: str, subset: str | None, **options: Any) -> StandInRows:
        self.asked.append((path, subset, options))
        if self._error is not None:
            raise self._error
        return StandInRows({**row, "picture": b"raw"} for row in questions(20))


def test_a_data_set_of_a_hub_is_asked_for_by_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandInLibrary()
    monkeypatch.setitem(sys.modules, "datasets", library)
    data = {"path": "owner/sums", "subset": "easy", "revision": "v2", "split": "train"}
    assert tasks(data).size == 19
    assert library.asked == [("owner/sums", "easy", {"split": "train", "revision": "v2"})]


def test_a_hub_that_cannot_be_reached_is_one_line_with_the_command_to_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", StandInLibrary(ConnectionError("no route\nto the hub")))
    config = load_config(
        {"model": {"path": "tiny"}, "envs": [{"id": "Dataset-v0", "data": "o/sums", "reward": "exact"}]}
    )
    with pytest.raises(ConfigError) as error:
        open_tasks(config)
    assert str(error.value).startswith("envs: data o/sums: neither a file or folder here nor")
    assert "`hf download --repo-type dataset o/sums --local-dir sums`" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [{"split": "dev"}, {"subset": "easy"}, {"revision": "v2"}, {"held_out": "test"}])
def test_what_only_folders_and_hubs_have_is_refused_for_a_file(key: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is one file"):
        tasks({"path": write(tmp_path / "my.jsonl", questions(9)), **key})


PYTHON = """
def rows():
    for n in range(40):
        yield {"prompt": f"What is {n} + 1?", "answer": n + 1}
some = list(rows())
def fails():
    yield some[0]
    raise KeyError("gone")
def texts(): return ["one"]
"""


def test_rows_can_come_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PYTHON)
    expected = all_of(tasks(write(tmp_path / "my.jsonl", questions(40))))
    assert all_of(tasks("mine.py:rows")) == all_of(tasks("mine.py:some")) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "data mine.py:fails: raised KeyError after 1 rows: 'gone'"),
        ("texts", "data mine.py:texts: row 1 is a str; a row is a dict with columns"),
        ("none", "data mine.py:none: mine.py has no 'none'"),
        ("rows", "data mine.py:rows: it gives more than 10 rows; one without an end is a task_source"),
    ],
)
def test_python_that_gives_no_rows_is_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "MAX_ROWS", 10)
    (tmp_path / "mine.py").write_text(PYTHON)
    with pytest.raises(ConfigError) as error:
        tasks(f"mine.py:{name}")
    assert str(error.value) == message


MIXED = [
    *questions(20),
    {"env": "Maze-v0", "with": {"size": 3}},
    {"env": "Maze-v0", "with": {"size": 5}},
    {"prompt": "Half?", "answer": "1/2", "with": {"reward": "exact", "answer_in": "boxed", "max_turns": 2}},
]


def mixed(folder: Path, rows: list[Any]) -> DatasetTasks:
    data = {"path": write(folder / "my.jsonl", rows), "environment_column": "env", "kwargs_column": "with"}
    rewards = [{"function": "number", "weight": 1.0}, "exact"]
    return tasks({**data, "held_out_share": 0.01}, reward=rewards if len(rows) > 20 else "exact")


def test_a_row_can_choose_its_environment_kwargs_and_rewards(tmp_path: Path) -> None:
    rows = [
        row if "answer" not in row or row["answer"] == "1/2" else {**row, "with": {"reward": ["number"]}}
        for row in MIXED
    ]
    source = mixed(tmp_path, rows)
    found = [source.next() for _ in range(source.size or 0)]
    found += source.held_out(9)
    assert {task.env_id for task in found} == {"Dataset-v0", "Maze-v0"}
    assert sorted(task.kwargs["size"] for task in found if task.env_id == "Maze-v0") == [3, 5]
    (half,) = (task.kwargs for task in found if task.kwargs.get("answer") == "1/2")
    assert (half["answer_in"], half["max_turns"], half["row"]) == ("boxed", 2, {})
    assert [reward["name"] for reward in half["rewards"]] == ["exact"]
    assert len(source.examples()) == 3, "one of each kind is checked at the start"


def test_keys_of_other_rows_that_a_file_with_columns_fills_in_are_none_of_a_row(tmp_path: Path) -> None:
    """Parquet has one set of keys for all rows: each named an argument that its environment does not have."""
    rows: list[Any] = questions(20)
    filled = dict.fromkeys(("size", "reward", "answer_in", "max_turns", "tools"))
    rows += [{**row, "with": filled} for row in questions(3)]
    rows.append({"env": "Maze-v0", "with": {**filled, "size": 3}})
    source = mixed(tmp_path, [{**row, "with": {"reward": ["number"]}} if "with" not in row else row for row in rows])
    found = [*(source.next() for _ in range(source.size or 0)), *source.held_out(9)]
    assert [dict(task.kwargs) for task in found if task.env_id == "Maze-v0"] == [{"size": 3}]
    assert all(value is not None for task in found for value in task.kwargs.values())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"env": 5}, "'env' is 5, not the id of an environment"),
        ({**Q, "answer": 2, "with": "{"}, "'with' is no JSON"),
        ({**Q, "answer": 2, "with": "[" * 100_000}, "'with' is no JSON: maximum recursion depth"),
        ({**Q, "answer": 2, "with": [1]}, r"'with' is \[1\], not a mapping"),
        ({**Q, "answer": 2, "with": {"turns": 1}}, "a row can set answer_in, tools, max_turns, reward"),
        ({**Q, "answer": 2, "with": {"max_turns": "x"}}, "max_turns is 'x', not a whole number of at least 1"),
        ({**Q, "answer": 2, "with": {"max_turns": 0}}, "max_turns is 0, not a whole number of at least 1"),
        ({**Q, "answer": 2, "with": {"reward": "math"}}, "reward 'math' is none of the entry's: exact"),
        ({**Q, "answer": 2, "with": {"reward": [["exact"]]}}, r"reward \['exact'\] is none of the entry's: exact"),
        ({**Q, "answer": 2, "with": {"tools": ["os:system"]}}, "tool 'os:system' is none of the entry's: none"),
        (
            {"env": "antigravity:Maze-v0", "with": {}},
            "rows name no code but that of the entry's id and of data",
        ),
    ],
)
def test_a_row_that_chooses_what_there_is_not_is_one_line(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"line 4: .*{message}"):
        mixed(tmp_path, [*questions(3), row])


def test_rows_choose_among_the_tools_and_the_code_of_their_entry() -> None:
    """A data set from elsewhere could have any function run in a worker, with what a model writes as arguments."""
    find = "/there/shop.py:find"
    data = {"path": "my.jsonl", "kwargs_column": "with"}
    kwargs = {"tools": [find, "shop.py:buy"]}
    shop = EnvConfig.model_validate({"id": "Dataset-v0", "data": data, "reward": "exact", "kwargs": kwargs})
    for chosen, wanted in ((["shop.py:find"], [find]), ("find", [find]), ([], []), (None, kwargs["tools"])):
        found = task_arguments(shop, {**Q, "answer": 1, "with": {"tools": chosen}}, "line 1")
        assert found["tools"] == wanted
    data = {"path": "my.jsonl", "environment_column": "env"}
    entry = EnvConfig.model_validate({"id": "/there/mazes.py:Small", "data": data})
    assert environment_of(entry, {"env": "mazes.py:Large"}, "line 1") == "/there/mazes.py:Large"


@pytest.mark.parametrize("key", ["environment_column", "kwargs_column"])
def test_a_column_that_no_row_has_is_a_misspelt_one(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", [{**row, "with": {"answer_in": "boxed"}} for row in questions(5)])
    with pytest.raises(ConfigError, match=rf"no row has a column 'wiht', which data\.{key} names; .* 'answer', 'with'"):
        tasks({"path": path, key: "wiht"})


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [*questions(20), {"prompt": "long " * 100, "answer": 1}]
    source = tasks({"path": write(tmp_path / "my.jsonl", rows), "max_prompt_characters": 100})
    assert all(len(prompt) < 100 for prompt in [*all_of(source), *prompts(source.held_out(20))])
    assert "1 rows have more than 100 characters" in capfd.readouterr().err


def test_characters_are_counted_not_bytes_and_not_the_json_of_a_chat(tmp_path: Path) -> None:
    said = ["é" * 62, "日" * 62]
    rows = [{"messages": [{"role": "user", "content": text}], "answer": 1} for text in said]
    rows += [{"prompt": f"{text}!", "answer": 1} for text in said]
    assert len(all_of(tasks({"path": write(tmp_path / "my.jsonl", rows), "max_prompt_characters": 80}))) == 3


def fitting(folder: Path, rows: list[Any], max_length: int, **data: Any) -> DatasetTasks:
    env = EnvConfig(id="Dataset-v0", data={"path": write(folder / "my.jsonl", rows), **data}, reward="exact")
    return DatasetTasks(env, ModelConfig(path="tiny", max_length=max_length))


def test_prompts_that_do_not_fit_into_the_model_are_not_trained_on_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [*questions(30), *({"prompt": f"{n} " + "long " * 100, "answer": n} for n in range(4))]
    source = fitting(tmp_path, rows, 128, held_out=write(tmp_path / "test.jsonl", [rows[-1], {**Q, "answer": 2}]))
    assert sorted(all_of(source)) == sorted(row["prompt"] for row in questions(30))
    assert len(source.held_out(9)) == 2, "what is evaluated does not depend on the model"
    assert "3 rows have prompts that leave no room in model.max_length=128 tokens" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"no prompt leaves room for an answer in model\.max_length=8"):
        fitting(tmp_path, questions(3), 8)


def test_the_last_token_of_room_decides(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "answer": 1} for n in range(1, 60)]
    template = chat_template_of(AutoTokenizer.from_pretrained(resolve_model("tiny")))
    longest = max(all_of(fitting(tmp_path, rows, 50, held_out_share=0.01)), key=len)
    assert len(template.prompt([{"role": "user", "content": longest}])) == 49


def test_very_many_long_prompts_are_counted_in_part_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lengths, "MAX_PROMPTS", 5)
    rows = [{"prompt": f"{n} " + "long " * (100 - n), "answer": n} for n in range(20)]
    assert fitting(tmp_path, rows, 128).size == 19 - 5
    assert "tokens of the longest 5 prompts were counted, not of 14 others" in capfd.readouterr().err


BAD_ROWS: dict[str, tuple[list[Any], str]] = {
    "broken line": ([*questions(4), '{"prompt": "wh'], "my.jsonl, line 5: this is no JSON"),
    "no object": ([*questions(4), [1]], "my.jsonl, line 5: a row is an object with columns, not a list"),
    "missing column": (
        [{"question": "?", "answer": 1}],
        "no column 'prompt' or 'messages'; it has 'question', 'answer'",
    ),
    "empty file": ([], "my.jsonl: there is no row in it"),
    "blank lines": (["", "  "], "my.jsonl: there is no row in it"),
    "deep row": (
        [*questions(4), '{"prompt": "why?", "answer": ' + "[" * 700 + "]" * 700 + "}"],
        "line 5: the row is nested more than 64 deep",
    ),
    "huge row": ([{"prompt": "a" * 10_000_000}], "line 1: the row has more than 1 MiB, the most that"),
    "duplicate ids": ([{**row, "id": 7} for row in questions(3)], "line 2: id 7 is also that of"),
    "no text": ([{"prompt": 5}], "'prompt' is 5, not a text"),
    "a message without text": (
        [{"messages": [{"role": "user", "text": "a"}]}],
        "a message is {role, content}, both texts",
    ),
    "a number in a chat": ([{"messages": [{"role": "user", "content": 5}]}], "a message is {role, content}"),
    "images": (
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
        "has content in parts, such as images; only text can be played",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_file_that_cannot_be_played_is_one_line_that_names_the_row(case: str, tmp_path: Path) -> None:
    rows, message = BAD_ROWS[case]
    with pytest.raises(ConfigError) as error:
        tasks(write(tmp_path / "my.jsonl", rows))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_column_that_a_config_names_asks_though_rows_have_a_chat_too(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "no"}]
    path = write(tmp_path / "my.jsonl", [{"question": f"{n}?", "messages": talk, "answer": n} for n in range(5)])
    found = all_of(tasks({"path": path, "columns": {"prompt": "question"}}))
    assert all(prompt.endswith("?") for prompt in found)


BAD_ANSWERS: dict[str, tuple[list[Any], Mapping[str, Any], str]] = {
    "no answers": ([{**Q, "solution": 2}] * 3, {}, "line 1: no column 'answer', which reward exact needs"),
    "one is missing": ([*questions(3), Q], {}, "line 4: no column 'answer'"),
    "another name": (
        questions(3),
        {"columns": {"answer": "nope"}},
        "no column 'nope', which data.columns.answer names",
    ),
    "an id of another name": (questions(3), {"columns": {"id": "key"}}, "no column 'key', which data.columns.id names"),
    "null": ([*questions(3), {**Q, "answer": None}], {}, "line 4: 'answer' is None: reward exact needs an answer"),
    "blank": ([*questions(3), {**Q, "answer": " "}], {}, "line 4: 'answer' is ' ': reward exact needs an answer"),
    "no list": ([*questions(3), {**Q, "answer": []}], {}, "line 4: 'answer' is []"),
    "one of several": ([*questions(3), {**Q, "answer": ["a", ""]}], {}, "line 4: 'answer' is ['a', '']"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_a_row_without_an_answer_is_one_line_that_names_it(case: str, tmp_path: Path) -> None:
    rows, data, message = BAD_ANSWERS[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        tasks({"path": write(tmp_path / "my.jsonl", rows), **data})


def test_an_empty_cell_of_a_csv_file_is_one_line_that_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text("prompt,answer\none?,1\ntwo?,\n")
    with pytest.raises(ConfigError, match=r"my\.csv, row 2: 'answer' is '': reward exact needs an answer"):
        tasks(str(tmp_path / "my.csv"))


def test_rewards_that_do_not_read_the_answer_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def short(completion): return 1\ndef may(completion, expected=None): return 1\n")
    path = write(tmp_path / "my.jsonl", [{"prompt": f"{n}?"} for n in range(3)])
    pattern = {"function": "regex", "kwargs": {"pattern": "[0-9]"}}
    schema = {"function": "json_schema", "kwargs": {"schema": {}}}
    assert tasks(path, reward=["mine.py:short", "mine.py:may", pattern, schema]).size == 2


def test_rows_with_an_answer_of_the_wrong_kind_are_one_line(tmp_path: Path) -> None:
    rows = [*questions(3), {**Q, "answer": "two"}]
    with pytest.raises(ConfigError, match="line 4: 'answer' is 'two': reward number needs a number"):
        tasks(write(tmp_path / "my.jsonl", rows), reward="number")
    for answer, why in (([{"input": 3, "output": "6"}], "tests are Python code or a list"), ("[" * 100_000, "maximum")):
        with pytest.raises(ConfigError, match=f"reward python_tests needs tests: {why}"):
            tasks(write(tmp_path / "tests.jsonl", [{**Q, "answer": answer}] * 2), reward="python_tests")


@pytest.mark.parametrize("said", ["", " ", "None", "null"])
def test_saying_nothing_earns_nothing(said: str) -> None:
    assert [exact(said, wanted) for wanted in (None, "", " ", [], [None], [""])] == [0] * 6
    assert [regex(said.replace("None", "").replace("null", ""), ".*", pattern=way) for way in (None, "^$", "")] == [
        0
    ] * 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"data": {"path": "my.jsonl", "columns": {"anser": "x"}}, "reward": "exact"},
            "there is no 'anser'; did you mean 'answer'?",
        ),
        ({"data": "my.jsonl", "reward": ["regex", "regex"]}, "two rewards are called 'regex'"),
        ({"data": "my.jsonl", "id": "Maze-v0", "reward": "exact"}, "reward is for Dataset-v0"),
        ({"data": "my.jsonl"}, "needs a reward, such as reward: exact"),
        ({"reward": "exact"}, "needs rows: data: my.jsonl"),
        ({"data": "my.jsonl", "reward": "exact", "train_seeds": [0, 5]}, "train_seeds have no effect beside data"),
        ({"data": {"path": "my.jsonl", "colums": {}}, "reward": "exact"}, "colums"),
    ],
)
def test_entries_that_contradict_themselves_are_refused(entry: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"model": {"path": "tiny"}, "envs": [{"id": "Dataset-v0", **entry}]})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("exakt", "reward 'exakt' is none of exact, number"),
        ("judge", "a judge is a stage"),
        ({"function": "number", "kwargs": {"tolerence": 1}}, "there is no argument 'tolerence'"),
        ("missing.py:mine", "no such file"),
        ("json_schema", "is no schema: it is no object .tried with the right answer of .*my.jsonl, line 1"),
        ({"function": "json_schema", "kwargs": {"schema": {"type": "objekt"}}}, "is no schema: 'objekt' is not valid"),
        ({"function": "regex", "kwargs": {"pattern": "("}}, "'\\(' is no pattern"),
        ({"function": "python_tests", "kwargs": {"timeout": 3}}, "there is no argument 'timeout'"),
        ({"function": "python_tests", "kwargs": {"timeout_s": 60}}, "timeout_s is 60"),
        ("mine.py:later", "reward later returned '1.0'; it must return a finite number"),
        ("mine.py:nothing", "reward nothing returned nan; it must return a finite number"),
        ("mine.py:raises", "raised KeyError: 'no' .tried with the right answer of .*my.jsonl, line 1"),
        ("mine.py:says", "returned '1.0'; it must return a finite number or a bool"),
        ("mine.py:wants", "nothing gives its argument 'colour'"),
        ("mine.py:half", "arguments of @reward are for methods of an environment .* write weight: 0.5 beside function"),
        (
            "mine.py:only_right",
            "returned None; it must return a finite number or a bool .tried with 'I do not know.' at",
        ),
        ("mine.py:only_numbers", "raised ValueError: .* .tried with 'I do not know.' at .*my.jsonl, line 1"),
    ],
)
def test_a_reward_that_cannot_be_computed_is_one_line_at_the_start(
    reward: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = [
        "def raises(answer): raise KeyError('no')",
        "def says(answer): return '1.0'",
        "def wants(colour): return 1",
        "import roll_flash\n@roll_flash.reward(weight=0.5)\ndef half(answer): return 1",
        "def only_right(answer, expected):\n    if int(expected) == 1:\n        return answer == str(expected) or None",
        "def only_numbers(answer, expected): return float(answer) == expected",
        "async def later(answer): return '1.0'",
        "def nothing(answer): return float('nan')",
    ]
    (tmp_path / "mine.py").write_text("\n".join(functions))
    with pytest.raises(ConfigError, match=message):
        tasks(write(tmp_path / "my.jsonl", questions(5)), reward=reward)


@pytest.mark.parametrize(
    ("answer", "message"),
    [("42", "every program passes '42'"), ("The answer is 4.", "this is no Python: invalid syntax")],
)
def test_answers_that_are_no_tests_of_programs_are_one_line_at_the_start(
    answer: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks(write(tmp_path / "my.jsonl", [{**row, "answer": answer} for row in questions(5)]), reward="python_tests")


def test_a_misspelt_argument_of_the_environment_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kwargs has 'answr_in'; Dataset-v0 takes answer_in, tools, max_turns"):
        tasks(write(tmp_path / "my.jsonl", questions(5)), kwargs={"answr_in": "boxed"})


def test_several_files_in_one_entry_are_told_the_way_out() -> None:
    with pytest.raises(ValueError, match="several files are a folder, or several entries of envs"):
        EnvConfig.model_validate({"id": "Dataset-v0", "data": ["a.jsonl", "b.jsonl"], "reward": "exact"})


KEEPS_A_CLIENT = """
import asyncio, roll_flash
used = []
@roll_flash.reward
async def judged(answer):
    used.append(asyncio.get_running_loop())
    if used[0] is not used[-1]:
        raise RuntimeError("Event loop is closed")
    return 1
def also(answer): return judged(answer)
"""


def test_a_function_that_keeps_a_client_is_tried_in_one_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is played in a worker. The second trial met the connection of the first, whose loop was closed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keeps.py").write_text(KEEPS_A_CLIENT)
    path = write(tmp_path / "my.jsonl", questions(5))
    assert tasks(path, reward=["keeps.py:judged", "keeps.py:also"]).size == 4
    assert tasks(path, reward={"function": "keeps.py:judged", "weight": 2.0}).size == 4, "another run of this process"


def test_files_that_have_changed_are_read_again_when_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, the rows of the next run were the old ones, and a reward that was corrected still raised."""
    monkeypatch.chdir(tmp_path)
    rows = "def rows(): return [{'prompt': f'%s {n}?', 'answer': n} for n in range(3)]\n"
    wrong, right = "def mine(answer): return answer.no\n", "def mine(answer): return 1\n"
    (tmp_path / "code.py").write_text(rows % "old" + wrong)
    with pytest.raises(ConfigError, match="no attribute 'no'"):
        tasks("code.py:rows", reward="code.py:mine")
    (tmp_path / "code.py").write_text(rows % "newer" + right)
    forget_changed_files()
    assert all("newer" in prompt for prompt in all_of(tasks("code.py:rows", reward="code.py:mine")))
    module = load_file("code.py")
    forget_changed_files()
    assert load_file("code.py") is module, "what has not changed is kept"


def test_a_reward_that_has_changed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "my.jsonl", questions(5))
    (tmp_path / "code.py").write_text("def mine(answer): return 1\n")
    assert tasks(path, reward="code.py:mine").size == 4
    (tmp_path / "code.py").write_text("def mine(answer): return answer.no\n")
    forget_changed_files()
    with pytest.raises(ConfigError, match="no attribute 'no'"):
        tasks(path, reward="code.py:mine")


def test_a_reward_may_be_a_number_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    functions = ["def single(answer): return numpy.float32(0.5)", "def flag(answer): return numpy.bool_(True)"]
    (tmp_path / "mine.py").write_text("\n".join(["import numpy", *functions]))
    _, _, values = play("4", answer=4, rewards=[{"function": "mine.py:single"}, {"function": "mine.py:flag"}])
    assert values == {"single": 0.5, "flag": 1.0}


def test_a_reward_without_its_package_is_one_line_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"reward math: the package math-verify.* pip install"):
        tasks(write(tmp_path / "my.jsonl", questions(5)), reward="math")


def play(text: str, **kwargs: Any) -> tuple[float, Any, Mapping[str, Any]]:
    env: Any = make_env("Dataset-v0", **kwargs).unwrapped

    async def episode() -> tuple[float, Any, Mapping[str, Any]]:
        await env.reset(seed=0)
        _, reward, terminated, _, info = await env.step(text)
        assert terminated
        return reward, info["success"], info["rewards"]

    return asyncio.run(episode())


def test_rewards_add_up_and_are_shown_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def is_short(completion, row): return len(completion) < row['most']")
    rewards = [{"function": "exact", "weight": 1.0}, {"function": "mine.py:is_short", "weight": 0.5}]
    right = play("<answer>4</answer>", answer=4, row={"most": 50}, rewards=rewards)
    assert right == (1.5, True, {"exact": 1.0, "is_short": 1.0})
    wrong = play("<answer>5</answer> " + "so " * 50, answer=4, row={"most": 50}, rewards=rewards)
    assert wrong == (0.0, False, {"exact": 0.0, "is_short": 0.0})


def test_a_reward_that_blocks_holds_up_no_other_episode_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "import threading\nboth = threading.Barrier(2)\ndef meets(answer):\n    both.wait(20)\n    return 1.0\n"
    (tmp_path / "mine.py").write_text(source)
    episodes: list[Any] = [make_env("Dataset-v0", rewards=[{"function": "mine.py:meets"}]).unwrapped for _ in range(2)]

    async def score_both() -> list[Mapping[str, float]]:
        return await asyncio.gather(*(env.score_answer("4") for env in episodes))

    assert asyncio.run(score_both()) == [{"meets": 1.0}] * 2


@pytest.mark.parametrize(("answer", "seen"), [("4", {"expected": "4"}), ([{"input": "", "output": ""}], {})])
def test_a_judge_can_see_the_answer_of_the_row(answer: Any, seen: Mapping[str, str]) -> None:
    env: Any = make_env("Dataset-v0", answer=answer).unwrapped

    async def info() -> Mapping[str, Any]:
        await env.reset(seed=0)
        found: Mapping[str, Any] = (await env.step("4"))[-1]
        return found

    found = asyncio.run(info())
    assert {name: value for name, value in found.items() if name == "expected"} == seen


def test_tools_may_be_called_before_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text('def double(x: int) -> int:\n    """Double x."""\n    return 2 * x\n')
    env: Any = make_env("Dataset-v0", answer=8, tools=["mine.py:double"]).unwrapped

    async def episode() -> tuple[str, float]:
        await env.reset(seed=0)
        call = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
        shown, *_ = await env.step(call)
        _, reward, *_ = await env.step("<answer>8</answer>")
        return str(shown), reward

    shown, reward = asyncio.run(episode())
    assert "8" in shown
    assert reward == 1.0


@pytest.mark.parametrize(
    ("text", "answer_in", "found"),
    [
        ("I think <answer> 4 </answer>", "tag", "4"),
        ("just 4", "tag", "just 4"),
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{never closed", "boxed", ""),
        ("first 12, then 1,234.5.", "last_number", "1,234.5"),
        ("<think>7</think>5 and no more", "last_number", "5"),
        ("no number", "last_number", ""),
        ("so it is -5.", "last_number", "-5"),
        ("from 3-5", "last_number", "5"),
        ("on 2024-05-17", "last_number", "17"),
        ("about 6.02e23", "last_number", "6.02e23"),
        ("1e-3 or 2.", "last_number", "2"),
        (" all of it ", "text", "all of it"),
    ],
)
def test_the_answer_in_a_text(text: str, answer_in: Any, found: str) -> None:
    assert find_answer(text, answer_in) == found


@pytest.mark.parametrize("answer_in", ["tag", "boxed", "last_number", "text"])
@pytest.mark.parametrize("piece", ["\\boxed{", "{", "1,", "<answer>", "12.5 ", "<think>", "+-"])
def test_finding_an_answer_takes_linear_time(answer_in: Any, piece: str) -> None:
    def seconds(characters: int) -> float:
        text = piece * (characters // len(piece))
        began = time.process_time()
        find_answer(text, answer_in)
        return time.process_time() - began

    assert min(seconds(1 << 20) for _ in range(3)) <= 8 * max(min(seconds(1 << 18) for _ in range(3)), 0.02)


def test_ready_rewards() -> None:
    assert [exact(" The  Cat ", "the cat"), exact("a", ["b", "A"]), exact("4.0", 4), exact("4", 4.0)] == [1, 1, 0, 1]
    assert [number("$1,234.50", "1234.5"), number("nan", 1), number("", 1), number("50%", 50)] == [1, 0, 0, 1]
    assert [number(".5", 5), number(".5", 0.5), number("-.5", "-0.5"), number("$.75.", 0.75)] == [0, 1, 1, 1]
    assert [number("0", 6.6e-34), number("6.6e-34", 6.6e-34), number("0", 0), number("1e-7", 0)] == [0, 1, 1, 1]
    assert [regex("it is 42!", r"\b42\b"), regex("a+b", "a+b", pattern="^{expected}$")] == [1, 1]
    schema = {"type": "object", "required": ["x"]}
    assert [json_schema('```json\n{"x": 1}\n```', schema), json_schema("{}", schema), json_schema("x", schema)] == [
        1,
        0,
        0,
    ]
    with pytest.raises(EnvError, match="is no number"):
        number("4", "four")


@pytest.mark.parametrize("wanted", [10**400, "-1e999"])
def test_a_number_that_no_float_holds_is_not_within_the_tolerance_of_all_others(wanted: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="is no number"):
        number("5", wanted)
    assert number("1e999", 5) == 0
    with pytest.raises(ConfigError, match="reward number needs a number, of at most 308 digits; `exact` compares"):
        tasks(write(tmp_path / "my.jsonl", [*questions(3), {**Q, "answer": wanted}]), reward="number")


@pytest.mark.parametrize("answer", ["NaN", '{"score": NaN}', "[Infinity]", "-Infinity", "1" + "0" * 400, "[" * 9000])
def test_what_is_no_json_or_no_value_of_any_bound_earns_nothing(answer: str) -> None:
    share = {"type": "number", "minimum": 0, "maximum": 1}
    either = [share, {"properties": {"score": share}, "type": "object"}, {"items": {"type": "number"}, "type": "array"}]
    assert json_schema(answer, {"anyOf": either}) == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/minimum", "minimum": 0},
        {"$defs": {"a": {"enum": [3]}}, "$ref": "#/$defs/a/enum"},
        {"allOf": [{}], "$ref": "#/allOf/x"},
    ],
)
def test_a_reference_to_what_is_no_schema_is_a_fault_of_the_schema(schema: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="is no schema: "):
        json_schema('{"x": 1}', schema)


@pytest.mark.parametrize("pattern", ["(", "(" * 5_000, "a{99999999999}", "[" * 5_000])
def test_what_is_no_pattern_is_a_fault_of_the_row(pattern: str) -> None:
    with pytest.raises(EnvError, match=r"^.{,300} is no pattern: .{,99}$"):
        regex("a", pattern)


def test_a_pattern_that_takes_for_ever_to_compile_is_a_fault_of_the_row_and_holds_up_no_worker() -> None:
    """A hundred such sets take a second, in the thread of a worker, and a row has room for 150,000."""
    began_s = time.thread_time()
    with pytest.raises(EnvError, match="is no pattern: it raised an error, or takes more than 3 s"):
        regex("a", "(?i)" + "[\x00-\uffff]" * 10_000)
    assert time.thread_time() - began_s < 0.5


def test_a_schema_that_nests_without_end_is_a_fault_of_the_row() -> None:
    with pytest.raises(EnvError, match=r"^.{,300} is no schema: it is no JSON$"):
        json_schema("1", "[" * 100_000)


@pytest.mark.parametrize("place", ["#/nothing", "#", "http://127.0.0.1:9/schema", "file:///proc/self/mounts"])
def test_a_reference_of_a_schema_that_leads_nowhere_is_a_fault_of_the_schema(place: str) -> None:
    """And no answer's: else all would be 0. Other files and URLs are not read."""
    with pytest.raises(EnvError, match=r"is no schema: a reference in it leads (nowhere|to itself)"):
        json_schema('{"x": 1}', {"$ref": place})


def test_a_schema_may_contain_itself_and_an_answer_that_is_too_deep_for_it_earns_nothing() -> None:
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert [json_schema("[[[]]]", nested), json_schema("[[1]]", nested)] == [1, 0]
    assert json_schema("[" * 400 + "]" * 400, nested) == 0.0


@pytest.mark.adapters
def test_mathematics_is_compared_by_its_value() -> None:
    same = [("1/2", "\\frac{1}{2}"), ("0.5", "\\frac{1}{2}"), ("x^2 + 2x + 1", "(x+1)^2"), ("\\{2, 1\\}", "\\{1, 2\\}")]
    assert [math(answer, expected) for answer, expected in same] == [1] * len(same)
    assert [math("1/3", "1/2"), math("", "1/2"), math("import os", "1/2"), math("9" * 5000, "1/2")] == [0] * 4
    assert math("9**9**9**9", "7") == 0.0


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("expected", "same"),
    [
        (r"1.6 \times 10^{-19}", [r"16 \cdot 10^{-20}", r"\frac{1.6}{10^{19}}"]),
        ("0.0000003", [r"3 \times 10^{-7}", r"\frac{3}{10000000}"]),
        (r"\frac{1}{8000000}", ["0.000000125", r"\frac{0.5}{4000000}"]),
        (r"10^{-20}\sqrt{2}", [r"\sqrt{2 \cdot 10^{-40}}"]),
        (r"\{0.0000001, 2\}", ["2, 0.0000001"]),
        (r"\begin{pmatrix} 0.0000001 & 2 \end{pmatrix}", [r"\begin{pmatrix} \frac{1}{10000000} & 2 \end{pmatrix}"]),
    ],
)
def test_a_small_number_is_not_any_other_small_number(expected: str, same: list[str]) -> None:
    others = ["0.0", "0", "0.0000004", "-0.0000002", r"\sqrt{2} - \sqrt{2}", r"10^{-30}", "x = 0.0", "2, 0.0000003"]
    others.append(r"\begin{pmatrix} 0.0 & 2 \end{pmatrix}")
    assert [rewards._verify(answer, expected) for answer in (expected, *same)] == [1.0] * (1 + len(same))
    assert [rewards._verify(answer, expected) for answer in others] == [0.0] * len(others)


@pytest.mark.adapters
def test_a_busy_machine_makes_no_right_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time-out of the clock is over at once here, as if the process had got no core."""
    pytest.importorskip("math_verify")
    alarm = signal.alarm
    monkeypatch.setattr(signal, "alarm", lambda seconds: signal.raise_signal(signal.SIGALRM) if seconds else alarm(0))
    assert rewards._verify("x^2 + 2x + 1", "(x+1)^2") == 1.0


def test_a_pattern_that_takes_for_ever_on_what_the_model_wrote_earns_nothing_in_time() -> None:
    began = time.monotonic()
    assert regex("a" * 40 + "!", r"(a|aa)+$") == 0.0
    assert time.monotonic() - began < 60


@given(st.text(max_size=200))
def test_any_text_has_code(text: str) -> None:
    assert isinstance(python_code(text), str)


def test_code_is_in_the_last_block() -> None:
    assert python_code("First:\n```python\nx = 1\n```\nthen\n```\ny = 2\n```") == "\ny = 2\n"
    assert python_code("```python\nx = 1\n```") == "x = 1\n"
    assert python_code("print(1)") == "print(1)"
    assert python_code("This is it: <answer>\nprint(1)\n</answer>") == "print(1)"


@pytest.mark.docker
@pytest.mark.parametrize(
    ("program", "tests", "earned"),
    [
        ("print(int(input()) * 2)", [{"input": "3", "output": "6"}, {"input": "5", "output": "10"}], 1.0),
        ("print(6)", [{"input": "3", "output": "6"}, {"input": "5", "output": "10"}], 0.5),
        ("def double(x): return 2 * x", "assert double(3) == 6", 1.0),
        ("def double(x): return 3 * x", "assert double(3) == 6", 0.0),
        ("raise SystemExit(0)", "assert double(3) == 6", 0.0),
        ("while True: pass", "assert double(3) == 6", 0.0),
    ],
)
def test_programs_are_tested_in_the_sandbox(program: str, tests: Any, earned: float) -> None:
    reward = {"function": "python_tests", "kwargs": {"timeout_s": 2.0}}
    env: Any = make_env("Dataset-v0", answer=tests, rewards=[reward]).unwrapped

    async def episode() -> float:
        async with open_sandbox(SandboxSpec(), provider="docker") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            _, found, *_ = await env.step(f"```python\n{program}\n```")
            return float(found)

    assert asyncio.run(episode()) == earned


@pytest.mark.parametrize(
    ("said", "earned"),
    [
        ("<think>```python\nprint(6)\n```", 0.0),
        ("<think>Perhaps\n```python\nprint(6)\n```\n</think>I do not know.", 0.0),
        ("<think>Twice, or</think>print(6)", 1.0),
        ("<think>It must begin with ``` or</think>```python\nprint(6)\n```", 1.0),
    ],
)
def test_a_program_in_thoughts_is_none(said: str, earned: float) -> None:
    """In the `local` sandbox. Models that think write programs there that they then reject."""
    tests = [{"input": "3", "output": "6"}]
    env: Any = make_env("Dataset-v0", answer=tests, rewards=[{"function": "python_tests"}]).unwrapped

    async def episode() -> float:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            return float((await env.step(said))[1])

    assert asyncio.run(episode()) == earned


def test_a_program_whose_right_output_is_long_passes() -> None:
    """In the `local` sandbox. An output of which only head and tail are kept never equals what is wanted."""
    tests = [{"input": "40000", "output": "\n".join(map(str, range(40000)))}]
    env: Any = make_env("Dataset-v0", answer=tests, rewards=[{"function": "python_tests"}]).unwrapped

    async def episode() -> float:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            _, found, *_ = await env.step("```python\nfor i in range(int(input())): print(i)\n```")
            return float(found)

    assert asyncio.run(episode()) == 1.0


def test_a_right_program_passes_tests_that_are_longer_than_an_argument_may_be() -> None:
    """In the `local` sandbox. Kernels start no program with an argument of 128 KiB, so every program got 0."""
    tests = "assert double(3) == 6\n" * 10_000
    env: Any = make_env("Dataset-v0", answer=tests, rewards=[{"function": "python_tests"}]).unwrapped

    async def episode() -> float:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            _, found, *_ = await env.step("```python\ndef double(x): return 2 * x\n```")
            return float(found)

    assert asyncio.run(episode()) == 1.0


@pytest.mark.parametrize(
    "harm", ["os.remove('program.py'); os.mkdir('program.py'); open('program.py/x', 'w')", "os.chmod('.', 0)"]
)
def test_a_program_that_blocks_its_place_for_the_next_reward_earns_nothing_from_it(harm: str) -> None:
    """In the `local` sandbox. No sample would be better for a policy than the 0 it deserves."""
    rewards = [{"function": "python_tests", "name": name} for name in ("first", "second")]
    env: Any = make_env("Dataset-v0", answer=[{"input": "1", "output": "1"}], rewards=rewards).unwrapped

    async def episode() -> dict[str, float]:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            _, _, _, _, info = await env.step(f"```python\nimport os\n{harm}\nprint(1)\n```")
            return dict(info["rewards"])

    earned = asyncio.run(episode())
    assert earned["first"] == 1.0
    assert earned["second"] in (0.0, 1.0)  # what is only in the way is removed


def test_nothing_that_a_tool_left_running_is_there_when_a_program_is_tested() -> None:
    """In the `local` sandbox. It could read the tests, and answer in the program's place."""
    tests = (
        "import glob\n"
        "for name in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    assert b'98765' not in open(name, 'rb').read()\n"
    )
    env: Any = make_env("Dataset-v0", answer=tests, rewards=[{"function": "python_tests"}]).unwrapped

    async def episode() -> float:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            await sandbox.exec("setsid sleep 98765 > /dev/null 2>&1 &")
            _, found, *_ = await env.step("```python\npass\n```")
            return float(found)

    assert asyncio.run(episode()) == 1.0


def test_a_program_that_never_ends_earns_what_the_other_tests_of_its_time_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the `local` sandbox: an endless loop in each of many tests is the model's own failure, no failed episode."""
    monkeypatch.setattr(dataset_env, "ALL_TESTS_S", 6.0)
    tests = [{"input": "1", "output": "1"}, *({"input": str(n), "output": "0"} for n in range(2, 102))]
    reward = {"function": "python_tests", "kwargs": {"timeout_s": 4.0}}
    env: Any = make_env("Dataset-v0", answer=tests, rewards=[reward]).unwrapped
    program = "n = int(input())\nprint(n)\nwhile n > 1: pass"

    async def episode() -> tuple[float, float]:
        async with open_sandbox(SandboxSpec(), provider="local") as sandbox:
            env.sandbox = sandbox
            await env.reset(seed=0)
            _, found, *_ = await env.step(f"```python\n{program}\n```")
            _, nothing, *_ = await env.step("")
            return float(found), float(nothing)

    assert asyncio.run(episode()) == (1 / 101, 0.0)


def open_file(path: Path) -> Rows:
    return open_rows(DataConfig(path=str(path)), str(path), "train", UsedColumns(None))


def test_a_file_of_windows_is_read_and_another_encoding_is_named(tmp_path: Path) -> None:
    row = '{"prompt": "a", "answer": "é"}\n'
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + (row * 2).replace("\n", "\r\n").encode())
    rows = open_file(tmp_path / "bom.jsonl")
    assert list(rows) == [rows[0], rows[1]] == [{"prompt": "a", "answer": "é"}] * 2
    (tmp_path / "wide.jsonl").write_text(row, encoding="utf-16")
    with pytest.raises(ConfigError, match="it is UTF-16; save it as UTF-8"):
        open_file(tmp_path / "wide.jsonl")
    (tmp_path / "latin.csv").write_text("prompt,answer\na,é\n", encoding="latin-1")
    with pytest.raises(ConfigError, match="it is not UTF-8; save it as UTF-8"):
        open_file(tmp_path / "latin.csv")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("twice.csv", "prompt,answer,answer\na,b,c\n", "the first line names 'answer' twice"),
        ("array.json", "[]", "not .json; write one object per line"),
    ],
)
def test_what_no_file_of_data_can_be_is_one_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        open_file(tmp_path / name)


def test_a_first_line_of_very_many_columns_takes_linear_time(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text(",".join(f"c{number}" for number in range(100_000)) + "\n1\n")
    began = time.process_time()
    with pytest.raises(ConfigError, match="more or fewer fields"):
        open_file(tmp_path / "wide.csv")
    assert time.process_time() - began < 5.0


def test_a_misspelt_file_is_not_looked_for_on_a_hub() -> None:
    with pytest.raises(ConfigError, match="data my_questons: no such file or folder"):
        open_file(Path("my_questons"))


def exits() -> list[dict[str, str]]:
    raise SystemExit(3)


def test_rows_of_a_function_that_ends_the_program_are_one_line() -> None:
    with pytest.raises(ConfigError, match="raised SystemExit after 0 rows"):
        open_file(Path(f"{__file__}:exits"))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "answer": None}, "'answer' is empty: there is nothing to imitate"),
        ({"prompt": "a", "answer": ""}, "'answer' is empty: there is nothing to imitate"),
        ({"prompt": ["a"], "answer": "b"}, "line 1"),
        (
            {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant", "assistant")]},
            "two assistant messages follow each other",
        ),
    ],
)
def test_a_demonstration_of_nothing_is_refused_with_its_line(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        demonstration_of(row, {}, "my.jsonl, line 1")


def test_of_several_right_answers_the_first_is_imitated() -> None:
    messages, _, _ = demonstration_of({"prompt": "a", "answer": ["Paris", "paris"]}, {}, "my.jsonl, line 1")
    assert messages[-1] == {"role": "assistant", "content": "Paris"}


@pytest.mark.parametrize("reward", ["exact", "number", "regex"])
@pytest.mark.parametrize("answer", [{"x": 1}, [{"x": 1}], [["a"], {}]])
def test_an_answer_that_no_text_can_equal_is_refused(reward: str, answer: Any) -> None:
    assert fault_of_answer(RewardConfig(function=reward), answer) == "needs a text, a number, or a list of these"


def test_a_template_names_columns_as_spreadsheets_have_them() -> None:
    template = "{Question Text} ({Größe-1}?)"
    env = EnvConfig(id="Dataset-v0", data=DataConfig(path="my.jsonl", template=template), reward="exact")  # type: ignore[arg-type]
    row = {"Question Text": "How much?", "Größe-1": 5}
    assert prompt_of(env, row, "my.jsonl, line 1") == "How much? (5?)"
    with pytest.raises(ConfigError, match=r"no column 'Größe-1', which data\.template names"):
        prompt_of(env, {"Question Text": "a"}, "my.jsonl, line 1")


@pytest.mark.parametrize(
    "template", ["{question:d}", "{question!r}", "{question.a}", "{question[0]}", "{0}", "{}", "{ }"]
)
def test_a_template_takes_only_names(template: str) -> None:
    env = EnvConfig(id="Dataset-v0", data=DataConfig(path="my.jsonl", template=template), reward="exact")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only columns can be in braces"):
        prompt_of(env, {"question": "a"}, "my.jsonl, line 1")
