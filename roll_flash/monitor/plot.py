"""Plot of a run: learning, staleness, and utilization."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_flash.errors import RunError
from roll_flash.monitor.metrics import (
    EVAL_SUCCESS,
    EVAL_SUCCESS_HIGH,
    EVAL_SUCCESS_LOW,
    KL_K3,
    LEARNER_IDLE,
    REWARD,
    SERVERS_IDLE,
    STALENESS_MAX,
    STALENESS_MEAN,
    SUCCESS,
    TOKENS_PER_S,
    read_metrics,
    series,
)

Rows = Sequence[dict[str, Any]]

BLUE, ORANGE, GREEN, GREY, RED = "#2463b4", "#d9730d", "#2a8a4a", "#8a8f98", "#b3261e"


def plot_run(run_dir: Path) -> Path:
    """Draw `metrics.jsonl` of a run folder into `plots/reward.png`. Raises RunError if no metrics were logged."""
    rows = read_metrics(run_dir)
    if not rows:
        raise RunError(f"{run_dir}: there are no metrics to plot yet")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    learning, policy, speed = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1))
    figure.suptitle(run_dir.resolve().name, fontsize=13, fontweight="bold")
    _learning_panel(learning, rows)
    _policy_panel(policy, rows)
    _speed_panel(speed, rows)
    for panel in (learning, policy, speed):
        panel.grid(alpha=0.25)
        panel.spines["top"].set_visible(False)
    learning.spines["right"].set_visible(False)
    speed.set_xlabel("training step")
    speed.xaxis.get_major_locator().set_params(integer=True)
    path = run_dir / "plots" / "reward.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    return path


def _learning_panel(panel: Any, rows: Rows) -> None:
    for name, label, colour in ((REWARD, "reward (training)", BLUE), (SUCCESS, "success (training)", GREEN)):
        steps, values = series(rows, name)
        panel.plot(steps, values, label=label, color=colour, marker="o", markersize=3, linewidth=1.6)
    _held_out(panel, rows)
    panel.set_ylabel("per episode")
    top = max(panel.get_ylim()[1], 1.0)
    panel.set_ylim(min(panel.get_ylim()[0], 0.0), top * 1.06)
    _legend(panel)


def _held_out(panel: Any, rows: Rows) -> None:
    steps, values = series(rows, EVAL_SUCCESS)
    if not steps:
        return
    _, low = series(rows, EVAL_SUCCESS_LOW)
    _, high = series(rows, EVAL_SUCCESS_HIGH)
    errors = None
    if len(low) == len(high) == len(values):
        errors = [
            [max(0.0, value - bound) for value, bound in zip(values, low, strict=True)],
            [max(0.0, bound - value) for value, bound in zip(values, high, strict=True)],
        ]
    panel.errorbar(
        steps, values, yerr=errors, label="success (held out, 95 %)", color=ORANGE, fmt="D", markersize=6, capsize=4
    )
    ends = ((steps[0], values[0], 9, "left"), (steps[-1], values[-1], -9, "right"))
    for step, value, offset, side in ends[: len(steps)]:
        panel.annotate(
            f"{value:.2f}",
            (step, value),
            xytext=(offset, -11),
            textcoords="offset points",
            ha=side,
            color=ORANGE,
            fontweight="bold",
        )


def _policy_panel(panel: Any, rows: Rows) -> None:
    for name, label, style in ((STALENESS_MEAN, "staleness, mean", "-"), (STALENESS_MAX, "staleness, max", ":")):
        steps, values = series(rows, name)
        if steps:
            panel.plot(steps, values, style, label=label, color=BLUE, linewidth=1.6)
    panel.set_ylabel("staleness (versions)", color=BLUE)
    panel.set_ylim(bottom=0, top=max(panel.get_ylim()[1], 1.1))
    steps, values = series(rows, KL_K3)
    if not steps:
        _legend(panel)
        return
    twin = _twin(panel, "KL sampler ‖ learner (k3)", RED)
    twin.plot(steps, values, label="KL (k3)", color=RED, linewidth=1.3)
    twin.set_ylim(bottom=0)
    twin.ticklabel_format(axis="y", scilimits=(-3, 3))
    _legend(panel, twin)


def _speed_panel(panel: Any, rows: Rows) -> None:
    steps, values = series(rows, TOKENS_PER_S)
    if steps:
        panel.plot(steps, values, label="tokens/s", color=BLUE, linewidth=1.6)
    panel.set_ylabel("tokens/s", color=BLUE)
    panel.set_ylim(bottom=0)
    idle = [(label, colour, *series(rows, name)) for name, label, colour in _IDLE]
    if not any(steps for _, _, steps, _ in idle):
        _legend(panel)
        return
    twin = _twin(panel, "idle (fraction of a step)", GREY)
    for label, colour, steps, values in idle:
        if steps:
            twin.plot(steps, values, "--", label=label, color=colour, linewidth=1.3)
    twin.set_ylim(0, 1)
    _legend(panel, twin)


_IDLE = ((LEARNER_IDLE, "learner idle", ORANGE), (SERVERS_IDLE, "servers idle", GREY))


def _twin(panel: Any, label: str, colour: str) -> Any:
    twin = panel.twinx()
    twin.set_ylabel(label, color=colour)
    twin.spines["top"].set_visible(False)
    return twin


def _legend(panel: Any, *others: Any) -> None:
    """Draw one legend for a panel and its twins, above the data."""
    found = [axes.get_legend_handles_labels() for axes in (panel, *others)]
    handles = [handle for pair in found for handle in pair[0]]
    labels = [label for pair in found for label in pair[1]]
    if handles:
        panel.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(labels), frameon=False, fontsize=9
        )
