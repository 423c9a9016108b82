"""`roll-flash diagnose`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roll_flash.cli.options import Json, argument, show
from roll_flash.terminal import say

if TYPE_CHECKING:
    from roll_flash.diagnosis import Finding

HELPED_BY_PLAN = ("learner-starved", "servers-idle", "staleness-at-bound")
WORTH_SAYING = 1.05
"""Speed of the best settings over that of the run's."""


def diagnose(run: Annotated[str, argument("RUN", "A run's name or folder.")], as_json: Json = False) -> int:
    """Say what is wrong with a run, by its metrics and episodes: also while it trains.

    docs/diagnosis.md explains each finding. The exit code is 1 if there is an error among them.
    """
    from roll_flash.diagnosis import find
    from roll_flash.diagnosis.reading import read_run
    from roll_flash.run.run_dir import find_run

    folder = find_run(run)
    view = read_run(folder)
    for note in view.notes:
        say(f"note: {note}", error=True)
    findings = [_with_plan(folder, finding) for finding in find(view)]
    text = "\n\n".join(map(_text, findings)) or f"{folder}: nothing found in {view.last_step} steps"
    if not len(view.recent) and not view.episodes:
        text = f"{folder}: no episode has ended yet, so there is nothing to judge"
    show([finding.as_dict() for finding in findings], text, as_json=as_json)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _text(finding: Finding) -> str:
    rows = [*map(str, finding.evidence), f"do: {finding.remedy}", f"see: {finding.docs}"]
    return "\n    ".join([f"{finding.severity}: {finding.name}: {finding.summary}", *rows])


def _with_plan(folder: Path, finding: Finding) -> Finding:
    """Add to the remedy which settings `roll-flash plan` would change, and what that brings."""
    from roll_flash.errors import RollFlashError

    if finding.name not in HELPED_BY_PLAN:
        return finding
    try:
        advice = _planned(folder)
    except RollFlashError as error:
        advice = f"plan cannot say more ({error})"
    return replace(finding, remedy=f"{finding.remedy}; {advice}")


def _planned(folder: Path) -> str:
    from roll_flash.config.tree import load_config
    from roll_flash.planner.plan import plan_run
    from roll_flash.planner.search import differing_words

    config = load_config(folder / "config.yaml")
    plan = plan_run(config, run=folder)
    if plan.prediction.problem or not plan.best:
        return f"plan cannot say more ({plan.prediction.problem or 'no settings could be simulated'})"
    best, now = plan.best[0], plan.prediction["episodes_per_s"].value
    if best.speed < WORTH_SAYING * now:
        return "plan finds no settings that are faster on this machine"
    words = " ".join(differing_words(config, best))
    return f"plan would set {words}: {best.speed / now:.2g} times as many episodes per second"
