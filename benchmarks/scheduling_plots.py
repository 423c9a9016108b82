"""The pictures of docs/scheduling.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from scheduling_claims import Row, knee, servers, simulate
from scheduling_seeds import Result
from synthetic_load import SyntheticLoad

from roll_flash.planner.gantt import ENVIRONMENT, GENERATE, LEARNER, draw_run, legend_handles
from roll_flash.planner.simulation.load import LogNormal
from roll_flash.planner.simulation.settings import LearnerSpec

SLOTS = 16
STEPS = 4

PANELS: list[tuple[str, dict[str, Any]]] = [
    ("batch rollout, environments in lockstep, synchronous", {"mode": "batch", "lockstep": True}),
    ("each environment on its own, synchronous", {"mode": "batch"}),
    ("queue scheduling + 2 extra groups, first 4 train (alpha 0)", {"extra": 2, "surplus": "cancel"}),
    ("asynchronous, alpha 1, stale groups evicted", {"alpha": 1}),
    ("asynchronous, alpha 1, in order of submission", {"alpha": 1, "in_order": True}),
]


def draw_gantt(path: Path) -> None:
    """The same load under each policy: one line for each slot, the learner below."""
    load = SyntheticLoad(LogNormal(110, 0.7), LogNormal(3, 0.8), turns=3, slow_share=0.03, seed=11)
    learner = LearnerSpec(group_s=1.2, step_s=1.5, publish_s=0.6)
    results = [
        simulate(
            load, groups=4, size=4, slots=SLOTS, on=servers(2, 16), learner=learner, steps=STEPS, record=True, **how
        )
        for _, how in PANELS
    ]
    end_s = max(result.step_ends_s[-1] for result in results)
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(11, 13.5), sharex=True, layout="constrained")
    for axis, (title, _), result in zip(axes, PANELS, results, strict=True):
        draw_run(axis, result, end_s, SLOTS)
        axis.set_title(
            f"{title}: {STEPS} steps in {result.step_ends_s[-1]:.0f} s", loc="left", fontsize=11, fontweight="bold"
        )
    axes[-1].set_xlabel("virtual seconds")
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_alpha(results: list[Result], path: Path) -> None:
    """Throughput, staleness, waste and bias over alpha."""
    evict, wait = (next(one.means() for one in results if one.name.endswith(f"({name})")) for name in ("evict", "wait"))
    figure, (speed, age, price) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    _line(speed, evict, "samples/s", GENERATE, "evict", "o-")
    _line(speed, wait, "samples/s", LEARNER, "wait", "s-")
    best = max(row["samples/s"] for row in evict)
    bend = knee(evict)
    speed.annotate(
        f"knee: alpha {bend['alpha']},\n{bend['speed-up']:.0f}x synchronous",
        (float(bend["alpha"]), bend["samples/s"]),
        xytext=(float(bend["alpha"]) + 1.2, 0.6 * best),
        arrowprops={"arrowstyle": "->"},
    )
    speed.set(title="Throughput (samples/s)", ylim=(0, None))
    _line(age, evict, "staleness max", GENERATE, "oldest token", "o-")
    _line(age, evict, "staleness mean", ENVIRONMENT, "mean of all tokens", "o-")
    age.set(title="Age of trained tokens (steps), evict")
    _line(price, evict, "discarded", "#888888", "tokens sampled for nothing", "o-")
    _line(price, evict, "latency of trained/submitted", GENERATE, "mean latency, trained / submitted", "o-")
    _line(price, evict, "length of trained/submitted", ENVIRONMENT, "mean length, trained / submitted", "o-")
    price.axhline(1, color="black", linewidth=0.6)
    price.set(title="The price of evicting", ylim=(0, 1.1))
    for axis in (speed, age, price):
        axis.set_xlabel("alpha (async_ratio)")
        axis.legend(frameon=False, loc="center right" if axis is not age else "upper left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _line(axis: Axes, rows: list[Row], column: str, colour: str, label: str, style: str) -> None:
    axis.plot([float(row["alpha"]) for row in rows], [row[column] for row in rows], style, color=colour, label=label)
