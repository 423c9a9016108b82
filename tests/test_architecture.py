"""ARCHITECTURE.md names what exists: its layers are those that lint enforces, its modules and methods are there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
MODULES = sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)(?:: (\w+))?`", PAGE)))
METHODS = sorted(set(re.findall(r"`([A-Z]\w*)\.(\w+)`", PAGE)))


def test_the_layers_on_the_page_are_those_that_lint_enforces() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = project["tool"]["importlinter"]["contracts"]
    enforced = [layer for layer in contract["layers"] if layer != "__main__"]
    assert "```\n" + "\n".join(enforced) + "\n```" in PAGE


@pytest.mark.parametrize(("path", "function"), MODULES)
def test_every_module_and_function_on_the_page_exists(path: str, function: str) -> None:
    assert re.search(rf"\bdef {function or '.*'}\(", (ROOT / "roll_flash" / path).read_text())


@pytest.mark.parametrize(("owner", "method"), METHODS)
def test_every_method_on_the_page_exists(owner: str, method: str) -> None:
    sources = (path.read_text() for path in (ROOT / "roll_flash").glob("**/*.py"))
    found = [re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", source, re.DOTALL | re.MULTILINE) for source in sources]
    assert any(f"def {method}(" in match.group() for match in found if match)
