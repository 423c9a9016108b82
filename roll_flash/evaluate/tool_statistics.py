"""How the tools of an environment were used, over all attempts that ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ToolStatistics:
    """Of one tool. `errors` counts wrong calls, exceptions and `timeouts`; `attempts` those that called it at all."""

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    attempts: int = 0

    @property
    def seconds_per_call(self) -> float:
        return self.seconds / self.calls if self.calls else 0.0


def tool_statistics(records: Iterable[Mapping[str, Any]]) -> dict[str, ToolStatistics]:
    """Sums of `info["tools"]` (see `roll_flash.envs.tools.tool_env`), the most called first. An environment of somebody
    else may put anything there: what does not look like counts is left out."""
    found: dict[str, ToolStatistics] = {}
    for record in records:
        tools = record.get("info", {}).get("tools")
        if not isinstance(tools, Mapping):
            continue
        for name, use in tools.items():
            if isinstance(use, Mapping) and isinstance(use.get("calls"), (int, float)):
                _add(found.setdefault(str(name), ToolStatistics()), use)
    return dict(sorted(found.items(), key=lambda item: (-item[1].calls, item[0])))


def _add(total: ToolStatistics, use: Mapping[str, Any]) -> None:
    total.attempts += 1
    total.calls += int(use["calls"])
    total.errors += int(use.get("errors") or 0)
    total.timeouts += int(use.get("timeouts") or 0)
    total.seconds += float(use.get("seconds") or 0.0)
