"""docs/diagnosis.md explains each finding, and only those that exist."""

from __future__ import annotations

import re
from pathlib import Path

from roll_flash import diagnosis
from roll_flash.diagnosis.findings import PAGE
from tests.command_line import parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / PAGE).read_text()
SOURCES = "".join(path.read_text() for path in Path(diagnosis.__file__).parent.glob("*.py"))


def test_every_finding_has_a_heading_of_its_name_and_every_heading_a_finding() -> None:
    headings = set(re.findall(r"^### ([a-z-]+)$", TEXT, re.MULTILINE))
    named = set(re.findall(r'"((?:[a-z]+-)+[a-z]+)"', SOURCES)) | {"sandbox-hangs", "environment-hangs"}
    assert headings == named


def test_the_commands_are_ones_the_parser_takes() -> None:
    lines = [
        line.split("#")[0].split()
        for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
        for line in block.splitlines()
    ]
    assert lines
    for words in lines:
        assert words[0] == "roll-flash"
        parse(words[1:])
