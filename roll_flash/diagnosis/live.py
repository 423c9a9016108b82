"""The diagnosis of a run that goes on: what is new after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_flash.diagnosis.findings import Finding
from roll_flash.diagnosis.reading import read_run
from roll_flash.diagnosis.rules import find
from roll_flash.diagnosis.run_view import FIRST_STEPS, RECENT_EPISODES, RECENT_STEPS, Episode, Row, RunView, Steps
from roll_flash.diagnosis.summaries import of_groups
from roll_flash.types import FinishedGroup


class LiveDiagnosis:
    """Call `step` once after each step. It reads no texts; rules that need them come with the summary."""

    def __init__(self, run_folder: Path) -> None:
        """A run that is resumed goes on with the steps in its folder; what they show already is not said again."""
        before = read_run(run_folder)
        self._settings = before.settings
        self._start: list[Row] = before.start.rows
        self._recent: deque[Row] = deque(before.recent.rows, maxlen=RECENT_STEPS)
        self._episodes: deque[Episode] = deque(before.episodes, maxlen=RECENT_EPISODES)
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
