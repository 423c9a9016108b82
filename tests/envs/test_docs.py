"""docs/environments.md, done as a new user would: what it says to save is saved, what it says to run is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.config.tree import load_config
from roll_flash.envs.check.checks import check_environment
from roll_flash.envs.registration import SHIPPED, make_env
from roll_flash.envs.task_sources import open_tasks
from roll_flash.envs.tools.calls import ToolCall, parse_tool_calls
from roll_flash.envs.tools.functions import make_tool
from roll_flash.evaluation.tasks import held_out_tasks
from tests.command_line import parse

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def saved_files() -> dict[str, str]:
    """Each block that follows a paragraph with "as `NAME`"."""
    found = {}
    for match in re.finditer(r"```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL):
        paragraph = PAGE[: match.start()].rstrip().rpartition("\n\n")[2]
        if name := re.search(r"as `(\w+\.(?:py|yaml))`", paragraph):
            found[name[1]] = match[1]
    return found


SAVED = saved_files()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in SAVED.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[list[str]]:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    return [line.split() for line in lines]


def test_the_page_saves_the_files_that_it_talks_about() -> None:
    assert set(SAVED) == {
        "shop.py",
        "shop.yaml",
        "guess.py",
        "parity.py",
        "riddles.py",
        "riddles.yaml",
        "hardest.py",
        "errand.py",
    }


def test_the_first_environment_takes_less_than_thirty_lines() -> None:
    assert sum(bool(line.strip()) for line in SAVED["shop.py"].splitlines()) < 30


@pytest.mark.parametrize("env_id", ["shop.py:Shop", "guess.py:Guess", "parity.py:Parity-v0"])
def test_its_environments_are_fit_to_train_on(folder: Path, env_id: str) -> None:
    report = check_environment(env_id, seeds=3)
    assert report.ok, report.as_table()


def test_its_data_set_is_ready_to_train_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "riddles.yaml", "--dry-run"]) == 0
    assert "tasks: 90 to train on" in capsys.readouterr().out


@pytest.mark.parametrize("entry_point", ["riddles.py:riddles", "hardest.py:Hardest"])
def test_its_task_sources_go_on_after_a_resume_and_hold_tasks_out(folder: Path, entry_point: str) -> None:
    overrides = ["envs.0.task_source.kwargs={}", f"envs.0.task_source.entry_point={entry_point}"]
    config = load_config("riddles.yaml", overrides)
    source, resumed = open_tasks(config), open_tasks(config)
    for draw in range(150):
        source.report(source.next(), float(draw % 3 > 0))
    resumed.restore(json.loads(json.dumps(source.state())))
    drawn = [source.next() for _ in range(100)]
    assert [resumed.next() for _ in range(100)] == drawn
    held_out = held_out_tasks(config.envs[0], config.eval)
    assert 20 <= len(held_out) == len({task.task_id for task in held_out})
    assert not {task.task_id for task in drawn} & {task.task_id for task in held_out}
    for task in (drawn[0], held_out[0]):
        assert make_env(task.env_id, **task.kwargs).unwrapped.answer == task.kwargs["answer"]


@pytest.mark.docker
def test_its_environment_with_a_sandbox_is_fit_to_train_on(folder: Path) -> None:
    report = check_environment("errand.py:Errand", seeds=2, provider="docker")
    assert report.ok, report.as_table()


def test_the_table_it_shows_is_that_of_the_check(folder: Path) -> None:
    shown = re.findall(r"^ok    (.+?)  ", PAGE, re.MULTILINE)
    assert [check.name for check in check_environment("shop.py:Shop", seeds=2).checks] == shown


def test_all_its_other_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    others = [block for block in blocks if block not in SAVED.values()]
    assert others
    for block in others:
        exec(compile(block, "docs/environments.md", "exec"), {"__name__": "page"})


def test_every_call_that_it_shows_is_understood() -> None:
    def price(fruit: str) -> int:
        """Tell the price."""
        return 1

    def copy(source: str, target: str) -> None:
        """Copy."""

    tools = {tool.name: tool for tool in map(make_tool, (price, copy))}
    rows = PAGE[PAGE.index("| `tool_format` |") : PAGE.index("Several calls in one turn")].splitlines()[2:]
    written = [text for row in rows if row.startswith("|") for text in re.findall(r"`([<{][^`]+)`", row)]
    assert len(written) == 5
    for text in written:
        (call,) = parse_tool_calls(text, tools)
        assert isinstance(call, ToolCall)
        tools[call.name].check(call.arguments)


def test_it_names_everything_that_ships() -> None:
    assert all(f"| `{env_id}` |" in PAGE for env_id in SHIPPED)


@pytest.mark.ray
def test_its_commands_lead_from_nothing_to_a_trained_step(folder: Path) -> None:
    ran = commands()
    assert [words[1] for words in ran] == ["envs", "train"]
    for words in ran:
        parse(words[1:])
        command = [sys.executable, "-m", "roll_flash", *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "runs/try-shop/metrics.jsonl").read_text().splitlines()]
    assert any(row["step"] == 1 and "reward" in row for row in rows), rows
