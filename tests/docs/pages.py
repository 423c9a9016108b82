"""The pages of the documentation, and the fenced blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "configs/*/README.md")
    for path in ROOT.glob(pattern)
)
_FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason`: why it is not run, from the comment before it (`<!-- not run: REASON -->`)."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, without prompts and comments."""
        return [line.removeprefix("$ ").partition(" #")[0].strip() for line in self.text.splitlines() if line.strip()]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCED.finditer(text):
        before = text[: match.start()]
        comment = re.search(r"<!-- not run: ([^\n]+) -->\n\n?$", before)
        found.append(
            Block(page, before.count("\n") + 1, match[2].split(" ")[0], match[3], comment[1] if comment else None)
        )
    return found
