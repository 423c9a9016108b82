"""What is generated is current, and the navigation has every page."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import roll_flash

from .pages import ROOT


def tool(name: str) -> ModuleType:
    """A script of docs/tools."""
    spec = importlib.util.spec_from_file_location(f"docs_tools_{name}", ROOT / "docs" / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_commands_is_current() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == tool("commands").reference(), "make it again: python docs/tools/commands.py > docs/commands.md"


def test_the_reference_of_commands_has_each_command_once() -> None:
    found = re.findall(r"^## `roll-flash (.+)`$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert {"train", "eval", "envs check", "sandbox reap", "checkpoints verify", "doctor"} <= set(found)
    assert len(found) == len(set(found))


def test_the_reference_of_python_has_each_public_name_once() -> None:
    found = re.findall(r"^::: roll_flash\.(\w+)$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(roll_flash.__all__)


def test_the_navigation_has_every_page_once() -> None:
    pages = tool("site").pages_of_navigation()
    assert len(pages) == len(set(pages))
    every = {path.relative_to(ROOT).as_posix() for pattern in ("docs/*.md", "*.md") for path in ROOT.glob(pattern)}
    assert every <= set(pages)
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def test_each_link_of_a_page_leads_to_a_file_and_a_heading_of_it() -> None:
    """As a forge resolves them; `make docs` checks the built site."""
    site = tool("site")
    broken = []
    for page in site.pages_of_navigation():
        text = site.FENCED.sub("", (ROOT / page).read_text())
        for link, anchor in re.findall(r"\]\(([^)\s:#]*)(?:#([^)\s]*))?\)", text):
            target = (ROOT / page).parent / link if link else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page}: {link}#{anchor}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors that a forge gives the headings of a page."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
