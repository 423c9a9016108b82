"""docs/errors.md: each text that it explains is in the code, and its causes of failure are all that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from roll_flash.types import FailureCause

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
VARIES = "\0"


def first_cells(page: str) -> list[str]:
    return re.findall(r"^\| `(.+?)` \| ", page, re.MULTILINE)


def texts_of(source: str) -> Iterator[str]:
    """Each string in Python source, with a mark where its values go."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values)


@pytest.fixture(scope="module")
def code() -> str:
    """All strings of the package, one after the other."""
    files = (path for name in ("roll_flash", "envs", "sandboxes") for path in (ROOT / name).rglob("*.py"))
    return "\n\n".join(text for path in files for text in texts_of(path.read_text()))


CAUSES = first_cells(PAGE.partition("### Why an episode failed")[2].partition("\n## ")[0])
TEXTS = [text for text in first_cells(PAGE) if text not in CAUSES]


def test_there_are_texts() -> None:
    assert len(TEXTS) > 60
    assert len(set(TEXTS)) == len(TEXTS)


@pytest.mark.parametrize("text", [*TEXTS, "internal error: ...", "...; run again with --debug for the traceback"])
def test_the_text_is_in_the_code(text: str, code: str) -> None:
    fixed = [part for part in text.split("...") if part.strip(" `")]
    within_one_string = "[^\n]*?".join(map(re.escape, fixed))
    assert fixed
    assert re.search(within_one_string, code), f"no error of the code reads {text!r}"


def test_it_explains_each_cause_of_a_failed_episode() -> None:
    assert tuple(CAUSES) == get_args(FailureCause)
