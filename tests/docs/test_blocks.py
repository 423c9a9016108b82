"""Every block of code in the documentation is run by a test, or says why not."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_line import parse

from .pages import PAGES, ROOT, Block, blocks_of

RUN_BY = {
    "README.md": {
        "sh": "tests/test_readme.py",
        "yaml": "tests/envs/test_data_docs.py",
        "python": "tests/test_readme.py",
    },
    "docs/adapters.md": dict.fromkeys(("sh", "yaml", "python"), "tests/envs/test_adapters_docs.py"),
    "docs/agents.md": dict.fromkeys(("sh", "yaml", "python"), "tests/envs/test_agents_docs.py"),
    "docs/algorithms.md": dict.fromkeys(("python", "yaml"), "tests/learner/test_own_functions.py"),
    "docs/data.md": dict.fromkeys(("sh", "yaml", "python", "json"), "tests/envs/test_data_docs.py"),
    "docs/diagnosis.md": {"sh": "tests/diagnosis/test_docs.py"},
    "docs/environments.md": dict.fromkeys(("sh", "yaml", "python"), "tests/envs/test_docs.py"),
    "docs/evaluation.md": dict.fromkeys(("sh", "yaml"), "tests/evaluate/test_evaluation_docs.py"),
    "docs/exporters.md": dict.fromkeys(("yaml", "python"), "tests/monitor/test_exporters.py"),
    "docs/gateway.md": dict.fromkeys(("sh", "python"), "tests/gateway/test_gateway_docs.py"),
    "docs/gpu.md": {"sh": "tests/gpu_check/test_gpu_docs.py"},
    "docs/inference.md": {"yaml": "tests/docs/test_examples.py"},
    "docs/models.md": {
        "sh": "tests/test_models_docs.py",
        "yaml": "tests/test_models_docs.py",
        "python": "tests/test_model_check.py",
    },
    "docs/plan.md": {"yaml": "tests/docs/test_examples.py"},
    "docs/replay.md": dict.fromkeys(("sh", "yaml", "python"), "tests/replay/test_replay_docs.py"),
    "docs/sandboxes.md": dict.fromkeys(("yaml", "python"), "tests/docs/test_examples.py"),
    "docs/scaling.md": {"yaml": "tests/docs/test_examples.py"},
    "docs/scheduling.md": dict.fromkeys(("yaml", "python"), "tests/docs/test_examples.py"),
    "docs/self-play.md": dict.fromkeys(("sh", "yaml", "python"), "tests/gateway/test_self_play_docs.py"),
    "docs/streaming.md": {
        "python": "tests/stream/test_documentation.py",
        "yaml": "tests/stages/test_documentation.py",
    },
    "docs/tinker.md": dict.fromkeys(("sh", "python"), "tests/tinker_api/test_tinker.py"),
    "docs/tools.md": dict.fromkeys(("sh", "yaml", "python"), "tests/envs/test_tool_docs.py"),
    "docs/tutorial.md": dict.fromkeys(("sh", "python"), "tests/test_tutorial.py"),
}
"""By page and language: the test that runs its blocks (what takes long is at least parsed)."""
CODE = ("sh", "console", "python", "yaml", "json")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language in ("sh", "console")]


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in CODE], ids=name)
def test_the_block_is_run_or_says_why_not(block: Block) -> None:
    is_run = block.language in RUN_BY.get(block.page, {})
    assert is_run or block.reason, "name its test in RUN_BY, or write <!-- not run: REASON --> above"


def test_each_test_that_is_named_reads_its_page() -> None:
    for page, tests in RUN_BY.items():
        for test in set(tests.values()):
            assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


def test_no_test_is_named_for_blocks_that_are_not_there() -> None:
    there = {(block.page, block.language) for block in BLOCKS if block.reason is None}
    assert {(page, language) for page, tests in RUN_BY.items() for language in tests} <= there


def test_blocks_without_a_language_are_no_commands() -> None:
    for block in BLOCKS:
        if not block.language:
            assert not re.search(r"^(\$|roll-flash|python|pip|make) ", block.text, re.MULTILINE), name(block)


@pytest.mark.parametrize("block", SHELL, ids=name)
def test_commands_of_ours_are_taken(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in block.commands:
        match command.split():
            case ["roll-flash", *words]:
                parse(words)
            case ["make", target, *_]:
                assert target in targets, command
            case ["python", "-m", module, *_]:
                assert find_spec(module), command
