"""The examples of docs/streaming.md run and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/streaming.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_of_the_page_is_tested() -> None:
    assert len(EXAMPLES) == len(re.findall(r"```python\n", PAGE)) == 1


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_the_page_says(number: int) -> None:
    source, expected = EXAMPLES[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, f"docs/streaming.md, example {number + 1}", "exec"), {"__name__": "example"})
    assert printed.getvalue() == expected
