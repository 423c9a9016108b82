"""The diagnosis of a run that goes on: what is new after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_flash.diagnosis.findings import Finding
from roll_flash.diagnosis.reading import read_run
from roll_flash.diagnosis.rules import find
from roll_flash.diagnosis.run_view import (
    FIRST_STEPS,
    RECENT_EPISODES,
    RECENT_STEPS,
    Episode,
    Row,
    RunView,
    Settings,
    Steps,
)
from roll_flash.diagnosis.summaries import of_groups
from roll_flash.types import FinishedGroup


class LiveDiagnosis:
    """Call `step` once after each step. It reads no texts; rules that need them come with the summary."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: as config.yaml has it."""
        self._settings = Settings.of(config)
        self._start: list[Row] = []
        self._recent: deque[Row] = deque(maxlen=RECENT_STEPS)
        self._episodes: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        self._said: set[str] = set()

    def go_on(self, run_folder: Path) -> None:
        """Go on with the steps of a run that is resumed; what they show already is not said again. Raises RunError."""
        before = read_run(run_folder)
        self._start = before.start.rows
        self._recent.extend(before.recent.rows)
        self._episodes.extend(before.episodes)
        self._said = {finding.name for finding in find(before)}

    @property
    def view(self) -> RunView:
        """What the rules see now."""
        return RunView(self._settings, Steps(self._start), Steps(self._recent), (), self._episodes)

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[FinishedGroup]) -> list[Finding]:
        """Return the findings that were not there before. `step`: its number, from 1; `metrics`: its row; `groups`:
        those that it trained."""
        row = {**metrics, "step": step}
        if len(self._start) < FIRST_STEPS:
            self._start.append(row)
        self._recent.append(row)
        self._episodes.extend(of_groups(step - 1, groups))
        new = [finding for finding in find(self.view) if finding.name not in self._said]
        self._said |= {finding.name for finding in new}
        return new
