"""Gantt charts of simulated runs: a line for each slot, the learner on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_flash.errors import ConfigError
from roll_flash.planner.simulation.result import SimulationResult

GENERATE, ENVIRONMENT, WAIT, LOST, LEARNER = "#3b6fb6", "#9cc4e4", "#f1e9d2", "#d9d9d9", "#d1603d"
COLOURS = {"generate": GENERATE, "environment": ENVIRONMENT, "wait": WAIT}
MAX_SLOTS = 128
"""Slots that are drawn at most."""


def draw_gantt(result: SimulationResult, slots: int, title: str, path: Path) -> None:
    """Draw a run simulated with `SimulationSettings.record` to a PNG or SVG file. Raises ConfigError if it cannot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = min(slots, MAX_SLOTS)
    figure = Figure(figsize=(12, 3 + drawn / 12), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    draw_run(axis, result, result.step_ends_s[-1], drawn)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel("predicted seconds")
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; give another file with --gantt") from None


def draw_run(axis: Any, result: SimulationResult, end_s: float, slots: int) -> None:
    """Draw the first `slots` slots of a run into `axis`, until its last step; the axis ends at `end_s`."""
    timeline = result.timeline
    assert timeline is not None
    last_s = result.step_ends_s[-1]
    for span in timeline.episodes.values():
        if span.slot >= slots:
            continue
        is_lost = span.fate in ("cancelled", "dropped", "failed")
        for activity, start_s, stop_s in span.parts:
            colour = LOST if is_lost else COLOURS[activity]
            axis.barh(span.slot, min(stop_s, last_s) - start_s, left=start_s, height=0.86, color=colour, linewidth=0)
        if span.parts:
            start_s, stop_s = span.parts[0][1], min(last_s, span.parts[-1][2])
            axis.barh(span.slot, stop_s - start_s, left=start_s, height=0.86, fill=False, ec="white", linewidth=0.8)
    for start_s, stop_s in timeline.learner:
        axis.barh(-2, min(stop_s, last_s) - start_s, left=start_s, height=1.6, color=LEARNER, linewidth=0)
    for step_s in result.step_ends_s:
        axis.axvline(step_s, color="black", linewidth=1.2)
    axis.set(xlim=(0, end_s * 1.01), ylim=(slots - 0.4, -3.2))
    axis.set_yticks([-2, (slots - 1) / 2], ["learner ", f"{slots} slots "])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def legend_handles() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=GENERATE, label="the model writes"),
        Patch(color=ENVIRONMENT, label="the environment steps"),
        Patch(color=WAIT, label="waits for others"),
        Patch(color=LOST, label="played, but not trained"),
        Patch(color=LEARNER, label="the learner works"),
        Line2D([], [], color="black", linewidth=1.2, label="a step is finished"),
    ]
