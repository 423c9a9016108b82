"""The picture of runs is drawn from whatever was logged, and is a picture: light or dark, PNG or SVG."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from roll_flash.cli.main import main
from roll_flash.errors import ConfigError, RunError
from roll_flash.monitor.metrics import MetricsLog
from roll_flash.monitor.plot import DARK, LIGHT, plot_run, plot_settings

FULL = {
    **{"reward": 0.5, "success": 0.4, "staleness_mean": 0.5, "staleness_max": 1.0, "kl_k3": 1e-4},
    **{"tokens_per_s": 200.0, "idle/learner": 0.2, "idle/servers": 0.1},
}
HELD_OUT = {"eval/success": 0.03, "eval/success_low": 0.01, "eval/success_high": 0.11}


def log_rows(folder: Path, *rows: tuple[int, dict[str, float]]) -> Path:
    folder.mkdir(exist_ok=True)
    log = MetricsLog(folder, tensorboard=False)
    for step, metrics in rows:
        log.log(step, metrics)
    log.close()
    return folder


def draw(folder: Path, *rows: tuple[int, dict[str, float]]) -> tuple[int, int]:
    """Width and height of the PNG."""
    path = plot_run(log_rows(folder, *rows))
    assert path == folder / "plots" / "reward.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def a_run(folder: Path, seed: int, **config: object) -> Path:
    steps = [(step, {**FULL, "success": (step + seed) / 20}) for step in range(1, 6)]
    log_rows(folder, (0, HELD_OUT), *steps, (5, {"eval/success": 0.2 + seed / 10}))
    (folder / "config.yaml").write_text(json.dumps({"name": folder.name, "seed": seed, **config}))
    return folder


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


@pytest.mark.parametrize(("look", "dark"), [(LIGHT, False), (DARK, True)])
def test_a_picture_has_the_colours_of_its_look_and_is_the_same_again(tmp_path: Path, look: object, dark: bool) -> None:
    run = a_run(tmp_path / "mine $x_1$", 0)
    pictures = []
    for name in ("a.svg", "b.svg"):
        plot_settings({run.name: [run]}, tmp_path / name, dark=dark)
        pictures.append((tmp_path / name).read_text())
    assert pictures[0] == pictures[1]
    other = LIGHT if dark else DARK
    assert look.paper in pictures[0]  # type: ignore[attr-defined]
    assert look.lines[0] in pictures[0]  # type: ignore[attr-defined]
    assert other.lines[0] not in pictures[0]


def test_seeds_of_a_setting_are_one_line_with_a_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [a_run(tmp_path / f"grpo{seed}", seed, learner={"advantage": "grpo"}) for seed in range(3)]
    other = a_run(tmp_path / "rloo", 0, learner={"advantage": "rloo"})
    file = tmp_path / "both.svg"
    assert main(["plot", *map(str, [*seeds, other]), "-o", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert found == {"grpo0": [str(seed) for seed in seeds], "rloo": [str(other)]}
    drawn = file.read_text()
    assert drawn.count("FillBetweenPolyCollection") == 5  # a band in each panel, of the one with several seeds


def test_a_single_run_is_drawn_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "mine", 0)
    (run / "plots").mkdir()
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'plots' / 'reward.png'}\n"
    assert (run / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["plots", "plots/reward.png"])
def test_a_plot_never_replaces_what_a_link_in_a_run_of_somebody_else_leads_to(name: str, tmp_path: Path) -> None:
    run, ours = a_run(tmp_path / "theirs", 0), tmp_path / "ours"
    ours.mkdir()
    (ours / "reward.png").write_text("ours")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(ours / "reward.png" if name.endswith("png") else ours)
    assert main(["plot", str(run)]) == 0
    assert (ours / "reward.png").read_text() == "ours"
    assert (run / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "mine", 0)
    assert main(["plot", str(run), str(run)]) == 2
    assert "needs a file: -o FILE.png" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"ends with \.png or \.svg"):
        plot_settings({"mine": [run]}, tmp_path / "a.jpeg")
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        plot_settings({"mine": [run]}, tmp_path / "no" / "a.png")
    for line in ('{"step": "x", "reward": 1}', '{"step": 4, "reward": "high"}', '{"reward": 1}', "no JSON"):
        (run / "metrics.jsonl").write_text(f"{line}\n")
        assert main(["plot", str(run)]) == 2
        assert f"metrics.jsonl of {run} is not as a run writes it: " in capsys.readouterr().err
