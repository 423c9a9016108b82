"""While a run trains, a finding is told once, at the step at which it appears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roll_flash.diagnosis import LiveDiagnosis
from roll_flash.diagnosis.run_view import RECENT_STEPS
from roll_flash.types import FinishedEpisode, FinishedGroup, Task


def run_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "config.yaml").write_text("steps: 100\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def resumed(folder: Path, rows: list[dict[str, Any]]) -> LiveDiagnosis:
    live = LiveDiagnosis({"steps": 100})
    live.go_on(run_folder(folder, rows))
    return live


def row(step: int, *rewards: float, spread: float) -> dict[str, Any]:
    low, high = min(rewards), max(rewards)
    return {"step": step, "step_s": 1.0, "reward_min": low, "reward_max": high, "reward_std_in_group": spread}


def told(live: LiveDiagnosis, rows: list[dict[str, Any]]) -> dict[int, list[str]]:
    found = {each["step"]: [finding.line for finding in live.step(each["step"], each, ())] for each in rows}
    return {step: lines for step, lines in found.items() if lines}


def test_five_steps_without_signal_are_told_once_with_their_first_step_and_what_to_do() -> None:
    rows = [row(1, 0, 1, spread=0.5), *(row(step, 0, 0, spread=0.0) for step in range(2, 40))]
    found = told(LiveDiagnosis({"steps": 100}), rows)
    assert list(found) == [6]
    [line] = found[6]
    assert line.startswith("error: no-reward-variance: nothing is learnt since step 2: every episode earned 0. Look at")
    assert "warm_start" in line
    assert line.endswith("(docs/diagnosis.md#no-reward-variance)")


def test_a_resumed_run_counts_the_steps_before_and_says_nothing_again(tmp_path: Path) -> None:
    rows = [row(step, 0, 0, spread=0.0) for step in range(1, 11)]
    assert list(told(resumed(tmp_path, rows[:3]), rows[3:])) == [5]
    assert told(resumed(tmp_path, rows[:6]), rows[6:]) == {}


def test_a_level_that_always_fails_is_told_from_the_groups_of_the_steps() -> None:
    def group(number: int, level: str, success: bool) -> FinishedGroup:
        task = Task(f"{level}:{number}", "Maze-v0", number, {"level": level})
        episode = {"reward": 1.0, "success": success, "started_s": 0.0, "finished_s": 1.0, "prompt_length": 1}
        names = [f"g{number}-{level}-r{replica}" for replica in range(4)]
        members = [FinishedEpisode(name, "g", task, **episode, versions=(), policy_tokens=1) for name in names]
        return FinishedGroup(f"g{number}", task, tuple(members))

    live = LiveDiagnosis({"steps": 100})
    found = {}
    for step in range(1, 30):
        groups = [group(step, "easy", True), group(step, "hard", False)]
        if lines := [finding.line for finding in live.step(step, row(step, 0, 1, spread=0.5), groups)]:
            found[step] = lines
    assert list(found) == [12]
    assert "'Maze-v0[level=hard]': none of 48 episodes succeeded" in found[12][0]


def test_it_keeps_only_the_ends_of_a_long_run() -> None:
    live = LiveDiagnosis({"steps": 100})
    for step in range(1, 200):
        live.step(step, row(step, 0, 1, spread=0.5), ())
    assert len(live.view.recent) == RECENT_STEPS
    assert live.view.start.span == (1, 10)
