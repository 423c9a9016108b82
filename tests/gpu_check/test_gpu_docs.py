"""docs/gpu.md says what is true: commands exist, and what has not run on a GPU is what no report of one has passed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_reports import page
from roll_flash.gpu_check.groups import all_groups
from roll_flash.gpu_check.settings import Settings
from tests.command_line import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text()


def passed_on_a_gpu() -> set[str]:
    reports = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("gpu-*.json")]
    results = [each for report in reports if not report["rehearsal"] for each in report["results"]]
    return {each["name"] for each in results if each["status"] in ("passed", "slow")}


def test_the_page_lists_what_has_not_run_on_a_gpu(settings: Settings) -> None:
    groups = all_groups(replace(settings, gpus=2))
    missing = [check.name for group in groups for check in group.rows if check.name not in passed_on_a_gpu()]
    listed = re.search(r"Not yet run on a GPU: (.*?)\.\n", PAGE, re.DOTALL)
    assert listed is not None
    assert [" ".join(name.split()) for name in listed[1].split(";")] == missing


def test_the_page_of_reports_is_made_of_them() -> None:
    assert (ROOT / "benchmarks" / "results" / "gpu.md").read_text() == page()


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
