"""The picture of a run is drawn from whatever was logged, and is a picture."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from roll_flash.errors import RunError
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.monitor.plot import plot_run

FULL = {
    **{"reward": 0.5, "success": 0.4, "staleness_mean": 0.5, "staleness_max": 1.0, "kl_k3": 1e-4},
    **{"tokens_per_s": 200.0, "idle/learner": 0.2, "idle/servers": 0.1},
}
HELD_OUT = {"eval/success": 0.03, "eval/success_low": 0.01, "eval/success_high": 0.11}


def draw(folder: Path, *rows: tuple[int, dict[str, float]]) -> tuple[int, int]:
    """Width and height of the PNG."""
    log = MetricsLog(folder, tensorboard=False)
    for step, metrics in rows:
        log.log(step, metrics)
    log.close()
    path = plot_run(folder)
    assert path == folder / "plots" / "reward.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(
    "rows",
    [
        [(0, HELD_OUT), (1, FULL), (2, FULL), (2, HELD_OUT)],
        [(0, HELD_OUT)],
        [(1, {"reward": 0.1})],
        [(1, {**FULL, "reward": math.nan, "success": math.inf})],
        [(1, FULL), (2, {"eval/success": 0.5})],
    ],
    ids=["whole run", "only before", "one metric", "not finite", "no interval"],
)
def test_whatever_was_logged_can_be_drawn(tmp_path: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    width, height = draw(tmp_path, *rows)
    assert width > 800
    assert height > 800


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no metrics to plot yet"):
        plot_run(tmp_path)


def test_drawing_again_after_more_steps_replaces_the_picture(tmp_path: Path) -> None:
    draw(tmp_path, (1, FULL))
    before = (tmp_path / "plots" / "reward.png").read_bytes()
    draw(tmp_path, (2, FULL))
    assert (tmp_path / "plots" / "reward.png").read_bytes() != before
