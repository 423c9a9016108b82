"""Plots of runs: learning, staleness and utilization, with a band over the seeds of one setting; light or dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_flash.errors import ConfigError, RunError
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

Rows = Sequence[Mapping[str, Any]]
SUFFIXES = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Look:
    """Colours of a plot; `lines` in the order in which they are used."""

    paper: str
    ink: str
    muted: str
    grid: str
    lines: tuple[str, ...]


LIGHT = Look("#ffffff", "#1f2328", "#59636e", "#d8dee4", ("#2463b4", "#1a7f4b", "#c2570c", "#8250df", "#b3261e"))
DARK = Look("#0d1117", "#e6edf3", "#9198a1", "#30363d", ("#5aa2f7", "#4cc38a", "#f0883e", "#bc8cff", "#ff7b72"))


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of a panel. With several settings only `main` ones are drawn, in the colour of their setting."""

    metric: str
    label: str
    style: str = "-"
    main: bool = True


PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("per episode", (Line(REWARD, "reward", main=False), Line(SUCCESS, "success"))),
    ("staleness (versions)", (Line(STALENESS_MEAN, "mean"), Line(STALENESS_MAX, "maximum", ":", main=False))),
    ("KL(sampler ‖ learner)", (Line(KL_K3, "k3 estimate"),)),
    ("tokens per second", (Line(TOKENS_PER_S, "trained tokens"),)),
    ("idle share of a step", (Line(LEARNER_IDLE, "learner"), Line(SERVERS_IDLE, "servers", "--", main=False))),
)
PLACES = ((0, slice(0, 2)), (1, 0), (1, 1), (2, 0), (2, 1))
"""Row and column of each panel."""


def plot_run(run_dir: Path) -> Path:
    """Draw `metrics.jsonl` of a run folder into `plots/reward.png`. Raises RunError if no metrics were logged."""
    path = run_dir / "plots" / "reward.png"
    path.parent.mkdir(exist_ok=True)
    plot_settings({run_dir.resolve().name: [run_dir]}, path)
    return path


def plot_settings(settings: Mapping[str, Sequence[Path]], path: Path, *, dark: bool = False) -> None:
    """Draw runs into a PNG or SVG file; `settings`: run folders by setting, several ones are its seeds.

    Raises RunError for a run without metrics, ConfigError for a file that is neither or cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: give a file that ends with {' or '.join(SUFFIXES)}")
    rows = {name: [_rows_of(run) for run in runs] for name, runs in settings.items()}
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = DARK if dark else LIGHT
    with matplotlib.rc_context(_style(look)):
        figure = Figure(figsize=(9, 8), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_title(settings), fontsize=13, fontweight="bold", color=look.ink)
        _draw(figure, rows, look)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _rows_of(run: Path) -> Rows:
    rows = read_metrics(run)
    if not rows:
        raise RunError(f"{run}: there are no metrics to plot yet")
    return rows


def _style(look: Look) -> dict[str, Any]:
    text = dict.fromkeys(("text.color", "axes.labelcolor"), look.ink)
    ticks = dict.fromkeys(("xtick.color", "ytick.color"), look.muted)
    papers = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), look.paper)
    shape = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True}
    lines = {"grid.color": look.grid, "axes.edgecolor": look.grid, "grid.linewidth": 0.8, "lines.linewidth": 1.8}
    fonts = {"font.size": 9.5, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    plain = {"legend.frameon": False, "text.parse_math": False, "svg.hashsalt": "roll-flash"}
    return {**text, **ticks, **papers, **shape, **lines, **fonts, **plain}


def _title(settings: Mapping[str, Sequence[Path]]) -> str:
    (first, *others) = (f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name for name, runs in settings.items())
    return first if not others else ", ".join([first, *others])


def _draw(figure: Any, rows: Mapping[str, Sequence[Rows]], look: Look) -> None:
    grid = figure.add_gridspec(3, 2, height_ratios=(1.5, 1, 1))
    panels: list[Any] = []
    for (title, lines), (row, column) in zip(PANELS, PLACES, strict=True):
        panel = figure.add_subplot(grid[row, column], sharex=panels[0] if panels else None)
        panels.append(panel)
        panel.set_title(title)
        for label, line, seeds, colour in _chosen(lines, rows, look):
            _draw_line(panel, line, seeds, colour, label)
    for (_, seeds), colour in zip(rows.items(), _colours(rows, look, held_out=True), strict=False):
        _draw_held_out(panels[0], seeds, colour)
    _finish(panels)


def _colours(rows: Mapping[str, Any], look: Look, *, held_out: bool = False) -> list[str]:
    """Colours of the settings; with one setting its held-out successes have one of their own."""
    return [look.lines[2]] if held_out and len(rows) == 1 else [look.lines[n % 5] for n in range(len(rows))]


def _chosen(
    lines: Sequence[Line], rows: Mapping[str, Sequence[Rows]], look: Look
) -> Iterator[tuple[str, Line, Sequence[Rows], str]]:
    """Yield label, metric, seeds and colour of each line of a panel: one setting has a colour per metric, of several
    settings each has a colour."""
    for (name, seeds), colour in zip(rows.items(), _colours(rows, look), strict=True):
        known = [line for line in lines if any(series(each, line.metric)[0] for each in seeds)]
        if len(rows) == 1:
            for line, own in zip(known, look.lines, strict=False):
                yield line.label, line, seeds, own
        elif known:
            line = next((line for line in known if line.main), known[0])
            yield name, line, seeds, colour


def _draw_line(panel: Any, line: Line, seeds: Sequence[Rows], colour: str, label: str) -> None:
    steps, mean, low, high = _over_seeds(seeds, line.metric)
    marker = "o" if len(steps) < 2 else None  # one point makes no line
    panel.plot(steps, mean, line.style, color=colour, label=label, marker=marker, markersize=4)
    if len(seeds) > 1:
        panel.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)


def _over_seeds(seeds: Sequence[Rows], metric: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all seeds have which have the metric at all; its mean, minimum and maximum there."""
    found = [dict(zip(*series(rows, metric), strict=True)) for rows in seeds]
    found = [each for each in found if each]
    steps = sorted(set.intersection(*(set(each) for each in found))) if found else []
    values = [[each[step] for each in found] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _draw_held_out(panel: Any, seeds: Sequence[Rows], colour: str) -> None:
    """Draw the evaluations: with their 95 % intervals, or with the range over seeds."""
    steps, values, low, high = _over_seeds(seeds, EVAL_SUCCESS)
    if not steps:
        return
    what = f"range of {len(seeds)} seeds"
    if len(seeds) == 1:
        what = "95 %"
        bounds = [dict(zip(*series(seeds[0], name), strict=True)) for name in (EVAL_SUCCESS_LOW, EVAL_SUCCESS_HIGH)]
        low, high = ([each.get(step, value) for step, value in zip(steps, values, strict=True)] for each in bounds)
    errors = [
        [max(0.0, value - bound) for value, bound in zip(values, low, strict=True)],
        [max(0.0, bound - value) for value, bound in zip(values, high, strict=True)],
    ]
    label = f"success (held out, {what})"
    panel.errorbar(steps, values, yerr=errors, label=label, color=colour, fmt="D", markersize=6, capsize=4)
    ends = ((steps[0], values[0], 9, "left"), (steps[-1], values[-1], -9, "right"))
    for step, value, offset, side in ends[: len(steps)]:
        where = {"xytext": (offset, -11), "textcoords": "offset points", "ha": side}
        panel.annotate(f"{value:.2f}", (step, value), color=colour, fontweight="bold", **where)


def _finish(panels: Sequence[Any]) -> None:
    learning, staleness, divergence, speed, idle = panels
    learning.set_ylim(min(learning.get_ylim()[0], 0.0), max(learning.get_ylim()[1], 1.0) * 1.06)
    staleness.set_ylim(bottom=0, top=max(staleness.get_ylim()[1], 1.1))
    divergence.set_ylim(bottom=0)
    divergence.ticklabel_format(axis="y", scilimits=(-3, 3))
    speed.set_ylim(bottom=0)
    idle.set_ylim(0, 1)
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        if len(handles) > 1 or (handles and panel is learning):
            panel.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(labels), fontsize=8.5)
        panel.xaxis.get_major_locator().set_params(integer=True)
    for panel in (speed, idle):
        panel.set_xlabel("training step")
