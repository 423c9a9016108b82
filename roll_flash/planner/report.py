"""The plan of a run as text."""

from __future__ import annotations

from collections.abc import Sequence

from roll_flash.planner.plan import SHOWN, RunPlan
from roll_flash.planner.prediction import Figure
from roll_flash.planner.search import Candidate, differing_words

_ROWS = (
    ("step", "step_s", "s", 1.0),
    ("trained episodes", "episodes_per_s", "/s", 1.0),
    ("learner idle", "learner_idle", "%", 100.0),
    ("servers idle", "servers_idle", "%", 100.0),
    ("staleness, mean", "staleness_mean", "steps", 1.0),
    ("staleness, largest", "staleness_max", "steps", 1.0),
    ("sampled tokens not trained", "discarded", "%", 100.0),
)
"""(what, name of the figure, unit, factor)"""


def report(plan: RunPlan) -> str:
    """Return what `roll-flash plan` prints."""
    lines = [f"speeds: {plan.calibration.source}"]
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"memory: {line}" for line in plan.memory]
    if plan.prediction.problem:
        return "\n".join([*lines, "", f"the run would end early: {plan.prediction.problem}"])
    lines += ["", "Predicted for this config (in brackets, where about 95 % of runs should lie):", *_figures(plan)]
    if plan.best:
        lines += ["", f"Best of the settings that were simulated ({_now(plan)}):", *_table(plan)]
    return "\n".join(lines)


def _figures(plan: RunPlan) -> list[str]:
    rows = [(what, _shown(plan.prediction[name], factor, unit)) for what, name, unit, factor in _ROWS]
    step = plan.prediction["step_s"]
    costs = [plan.cost(seconds) for seconds in (step.value, step.low, step.high)]
    if plan.price_per_hour is not None:
        value, low, high = (cost or 0.0 for cost in costs)
        rows.append(("cost of the run", _shown(Figure(value, low, high), float(plan.config.steps), "")))
    width = max(len(what) for what, _ in rows)
    return [f"  {what:<{width}}  {text}" for what, text in rows]


def _shown(figure: Figure, factor: float, unit: str) -> str:
    value, low, high = (_number(factor * each) for each in (figure.value, figure.low, figure.high))
    return f"{value} {unit}".rstrip() + f" ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _now(plan: RunPlan) -> str:
    return f"now {_number(plan.prediction['episodes_per_s'].value)} episodes/s"


def _table(plan: RunPlan) -> list[str]:
    head = ("episodes/s", "s/step", "staleness", "not trained", "learner idle", "servers idle", "change, and its limit")
    rows = [head, *(_row(plan, each) for each in plan.best[:SHOWN])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    return [
        "  " + "  ".join([*(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _row(plan: RunPlan, candidate: Candidate) -> Sequence[str]:
    figures = candidate.figures
    words = " ".join(differing_words(plan.config, candidate)) or "this config"
    return (
        _number(figures["episodes_per_s"]),
        _number(figures["step_s"]),
        f"{figures['staleness_mean']:.1f}",
        f"{figures['discarded']:.0%}",
        f"{figures['learner_idle']:.0%}",
        f"{figures['servers_idle']:.0%}",
        f"{words}: {candidate.reason}",
    )
