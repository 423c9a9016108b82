"""The picture of `stream.py`: one step twice, handed over as a whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2463b4", "#d9730d", "#8a8f98"
Work = Sequence[tuple[float, float, int]]


def draw(
    arrivals_s: Sequence[float], whole: Work, whole_step_s: float, streamed: Work, streamed_step_s: float, path: Path
) -> None:
    """Arrivals as ticks, the learner's work as bars with the number of groups in each, the step's end as a line."""
    figure = Figure(figsize=(9, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True)
    _panel(panels[0], "whole batch: the learner waits for the last group", arrivals_s, whole, whole_step_s, ORANGE)
    _panel(panels[1], "streamed: it begins with the first", arrivals_s, streamed, streamed_step_s, BLUE)
    panels[1].set_xlabel("seconds from the beginning of the step")
    figure.savefig(path)


def _panel(panel: Any, title: str, arrivals_s: Sequence[float], work: Work, step_s: float, colour: str) -> None:
    panel.set_title(title, loc="left", fontsize=10)
    panel.vlines(arrivals_s, 1.15, 1.75, color=GREY, linewidth=1.5)
    for begin, end, groups in work:
        panel.barh(0.5, end - begin, left=begin, height=0.7, color=colour, edgecolor="white")
        panel.text((begin + end) / 2, 0.5, str(groups), ha="center", va="center", color="white", fontsize=8)
    panel.axvline(step_s, color="black", linewidth=1.5)
    panel.set_yticks([0.5, 1.45], ["learner", "groups come"])
    panel.set_ylim(0, 1.9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
