"""What a diagnosis says: a name, its evidence, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from roll_flash.terminal import one_line

Severity = Literal["error", "warning"]
"""`error`: what is trained is wrong, or nothing is learnt. `warning`: the run loses speed, signal or episodes."""
PAGE = "docs/diagnosis.md"
SHOWN = 60
"""Characters of a text that are shown."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure of a run: the value of `what` over the steps `first` to `last` (numbers as in metrics.jsonl)."""

    what: str
    value: float
    first: int
    last: int

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"
        return f"{self.what} {self.value:.4g} ({steps})"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run. `name` is also its heading in docs/diagnosis.md; `summary` and `remedy` are one line each."""

    name: str
    severity: Severity
    summary: str
    evidence: tuple[Evidence, ...]
    remedy: str

    @property
    def docs(self) -> str:
        """Page and anchor."""
        return f"{PAGE}#{self.name}"

    @property
    def line(self) -> str:
        """The finding as one line for the terminal."""
        return f"{self.severity}: {self.name}: {self.summary}. {self.remedy} ({self.docs})"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return {**asdict(self), "evidence": [asdict(each) for each in self.evidence], "docs": self.docs}


def quoted(text: str) -> str:
    """Return text of a model or a user on one line, shortened, without control characters."""
    return f"'{one_line(text[:SHOWN])}{'...' if len(text) > SHOWN else ''}'"
