"""README and docs/gpu.md say what is true: commands exist, and "not yet run" stands until a report says otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roll_flash.gpu_check.groups import all_groups
from roll_flash.gpu_check.settings import Settings
from tests.command_line import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
NOT_YET = "proven on CPU; GPU path checked against vLLM's sources, not yet run"


def real_reports() -> list[Path]:
    files = (ROOT / "benchmarks" / "results").glob("gpu-*.json")
    return [file for file in files if json.loads(file.read_text()).get("rehearsal") is False]


@pytest.mark.parametrize("page", ["README.md", "docs/gpu.md"])
def test_the_pages_say_that_no_gpu_was_used_exactly_until_there_is_a_report_of_one(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert (NOT_YET in text) == (not real_reports())


def test_every_command_of_the_page_is_one_the_parser_takes() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.split("#")[0].split() for block in blocks for line in block.splitlines()]
    commands = [words[1:] for words in lines if words and words[0] == "roll-flash"]
    assert len(commands) >= 8
    for words in commands:
        parse(words)
    files = [word for words in lines for word in words if word.startswith("configs/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_the_way_to_a_run_takes_ten_lines() -> None:
    first = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert first is not None
    assert len(first[1].splitlines()) <= 10


def test_names_of_checks_are_unique_and_their_functions_exist(settings: Settings) -> None:
    import importlib

    checks = [check for group in all_groups(settings) for check in group.rows]
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        module, _, name = check.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), check.function
