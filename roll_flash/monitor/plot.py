"""Plots of runs: learning, staleness and utilization, with a band over the seeds of one setting; light or dark."""

from __future__ import annotations

import itertools
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
    """A metric of a panel. With several settings one is drawn: a `main` one if all have it."""

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


def _style(look: Look) -> Any:
    """Settings of matplotlib by their names."""
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
        if len(rows) == 1:
            panel.set_title(title)
            _draw_metrics(panel, lines, next(iter(rows.values())), look)
        else:
            panel.set_title(f"{title}: {_draw_settings(panel, lines, rows, look)}")
    for seeds, colour in zip(rows.values(), look.lines[2:3] if len(rows) == 1 else _colours(look), strict=False):
        _draw_held_out(panels[0], seeds, colour, is_alone=len(rows) == 1)
    _finish(panels, has_settings=len(rows) > 1)


def _draw_metrics(panel: Any, lines: Sequence[Line], seeds: Sequence[Rows], look: Look) -> None:
    """Draw the metrics of one setting, each in its colour."""
    known = [line for line in lines if _is_known(line, seeds)]
    for line, colour in zip(known, _colours(look), strict=False):
        _draw_line(panel, line.metric, line.style, seeds, colour, line.label)


def _draw_settings(panel: Any, lines: Sequence[Line], rows: Mapping[str, Sequence[Rows]], look: Look) -> str:
    """Draw one metric of several settings, each in its colour; return its label. It is the first that all have, `main`
    ones before others."""
    in_order = sorted(lines, key=lambda line: not line.main)
    line = next((line for line in in_order if all(_is_known(line, seeds) for seeds in rows.values())), in_order[0])
    for (name, seeds), colour in zip(rows.items(), _colours(look), strict=False):
        _draw_line(panel, line.metric, "-", seeds, colour, name)
    return line.label


def _is_known(line: Line, seeds: Sequence[Rows]) -> bool:
    return any(series(rows, line.metric)[0] for rows in seeds)


def _colours(look: Look) -> Iterator[str]:
    return itertools.cycle(look.lines)


def _draw_line(panel: Any, metric: str, style: str, seeds: Sequence[Rows], colour: str, label: str) -> None:
    steps, mean, low, high = _over_seeds(seeds, metric)
    marker = "o" if len(steps) < 2 else None  # one point makes no line
    panel.plot(steps, mean, style, color=colour, label=label, marker=marker, markersize=4)
    if len(seeds) > 1:
        panel.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)


def _over_seeds(seeds: Sequence[Rows], metric: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all seeds have which have the metric at all; its mean, minimum and maximum there."""
    found = [dict(zip(*series(rows, metric), strict=True)) for rows in seeds]
    found = [each for each in found if each]
    steps = sorted(set.intersection(*(set(each) for each in found))) if found else []
    values = [[each[step] for each in found] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _draw_held_out(panel: Any, seeds: Sequence[Rows], colour: str, *, is_alone: bool) -> None:
    """Draw the evaluations: with their 95 % intervals, or with the range over seeds. Several settings need no labels:
    each has its colour."""
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
    label = f"success (held out, {what})" if is_alone else None
    panel.errorbar(steps, values, yerr=errors, label=label, color=colour, fmt="D", markersize=6, capsize=4)
    ends = ((steps[0], values[0], 9, "left"), (steps[-1], values[-1], -9, "right"))
    for step, value, offset, side in ends[: len(steps) if is_alone else 0]:
        where = {"xytext": (offset, -11), "textcoords": "offset points", "ha": side}
        panel.annotate(f"{value:.2f}", (step, value), color=colour, fontweight="bold", **where)


def _finish(panels: Sequence[Any], *, has_settings: bool) -> None:
    learning, staleness, divergence, speed, idle = panels
    learning.set_ylim(min(learning.get_ylim()[0], 0.0), max(learning.get_ylim()[1], 1.0) * 1.06)
    staleness.set_ylim(bottom=0, top=max(staleness.get_ylim()[1], 1.1))
    divergence.set_ylim(bottom=0)
    divergence.ticklabel_format(axis="y", scilimits=(-3, 3))
    speed.set_ylim(bottom=0)
    idle.set_ylim(0, 1)
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        if handles and (panel is learning or (len(handles) > 1 and not has_settings)):
            panel.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(labels), fontsize=8.5)
        panel.xaxis.get_major_locator().set_params(integer=True)
    for panel in (speed, idle):
        panel.set_xlabel("training step")
