"""`roll-flash plan`: from a run folder, from a hardware file, from both; what it prints, refuses, finds and draws."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_calibration import SPEEDS, config_of, load, run_of

from roll_flash.cli.main import main
from roll_flash.config.tree import Config, load_config
from roll_flash.errors import ConfigError, PlacementError, RunError
from roll_flash.planner.machines.hardware import load_hardware
from roll_flash.planner.measured.calibration import Calibration
from roll_flash.planner.plan import plan_run
from roll_flash.planner.prediction import FIGURES, predict
from roll_flash.planner.report import report
from roll_flash.planner.search import cpu_splits, differing_words, gpu_splits, search

CONFIGS = Path(__file__).parents[2] / "configs"
H100 = CONFIGS / "hardware/h100-sxm-80gb.yaml"
SMALL = CONFIGS / "gpu/qwen3-0.6b-1x80gb.yaml"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("plan"), Calibration("made", replace(SPEEDS, cores=2.0), load()))


@pytest.fixture
def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings and shorter simulations."""
    for name, value in (
        ("ALPHAS", (0, 1)),
        ("FINALISTS", 3),
        ("FINE_SEEDS", 1),
        ("COARSE_STEPS", 4),
        ("FINE_STEPS", 8),
    ):
        monkeypatch.setattr(f"roll_flash.planner.search.{name}", value)


def everything_fits(_: Config) -> bool:
    return True


@pytest.mark.usefixtures("small_search")
def test_a_plan_from_a_run_prints_figures_and_better_settings(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, chart = tmp_path / "config.yaml", tmp_path / "gantt.png"
    config.write_text(config_of(steps=8).to_yaml())
    assert main(["plan", str(config), "--from", str(run), "--gantt", str(chart)]) == 0
    printed = capsys.readouterr().out
    assert f"measured in {run}: " in printed
    assert "a simulation of the run itself takes" in printed
    for words in ("step  ", "learner idle", "sampled tokens not trained", "each server about", "Best of the settings"):
        assert words in printed, words
    assert chart.read_bytes().startswith(PNG)


def test_the_json_of_a_plan_has_an_interval_for_each_figure(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_of(steps=8).to_yaml())
    assert main(["plan", str(config), "--from", str(run), "--no-search", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found["prediction"]) == set(FIGURES)
    for name, figure in found["prediction"].items():
        assert figure["low"] <= figure["value"] <= figure["high"], name
    assert found["best"] == []
    assert found["price_per_hour"] is None


def test_words_on_the_command_line_change_what_is_predicted(run: Path) -> None:
    synchronous = plan_run(config_of(steps=8, scheduler=_scheduler(0)), run=run, searches=False)
    asynchronous = plan_run(config_of(steps=8, scheduler=_scheduler(2)), run=run, searches=False)
    assert synchronous.prediction["staleness_mean"].value == 0
    assert asynchronous.prediction["staleness_mean"].value > 0
    assert asynchronous.prediction["step_s"].value < synchronous.prediction["step_s"].value


def test_a_plan_for_a_gpu_says_that_its_speeds_are_arithmetic_and_what_a_run_costs() -> None:
    config = load_config(SMALL, ["steps=6"])
    hardware = load_hardware(H100).model_copy(update={"price_per_hour": 3.0})
    plan = plan_run(config, hardware=hardware, searches=False)
    text = report(plan)
    assert "speeds arithmetic, not measurements" in text
    assert "states 8.9" in text
    assert plan.cost(3600.0) == 3.0
    assert "cost of the run" in text
    step = plan.prediction["step_s"]
    assert step.low < step.value < step.high


def test_episodes_of_a_run_are_planned_on_other_machines(run: Path) -> None:
    config = config_of(steps=8, model={"path": "tiny"})
    on_gpu = plan_run(config, run=run, hardware=load_hardware(H100), searches=False)
    assert "episodes measured in" in on_gpu.calibration.source
    on_cpu = plan_run(config, run=run, searches=False)
    assert on_gpu.calibration.load.effects == on_cpu.calibration.load.effects
    assert on_gpu.prediction["step_s"].value < on_cpu.prediction["step_s"].value


def test_a_config_that_does_not_fit_on_the_machines_is_refused() -> None:
    config = load_config(CONFIGS / "gpu/qwen3-8b-8x80gb.yaml")
    with pytest.raises(PlacementError):
        plan_run(config, hardware=load_hardware(H100))


def test_a_plan_without_speeds_says_where_to_get_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--from RUN measures them"):
        plan_run(config_of())
    assert main(["plan"]) != 0
    assert "plan needs a CONFIG file" in capsys.readouterr().err


def test_a_mistake_in_a_hardware_file_is_one_line_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {H100}\nprice_per_hours: 2\n")
    with pytest.raises(ConfigError, match="price_per_hour") as raised:
        load_hardware(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_run_that_would_end_early_is_said_in_the_place_of_figures() -> None:
    failing = replace(load(), failure_rate=1.0)
    prediction = predict(config_of(steps=4), Calibration("made", SPEEDS, failing))
    assert prediction.problem
    assert prediction.figures == {}


def test_the_search_finds_a_setting_at_least_as_fast_as_the_one_given() -> None:
    config = config_of(steps=8, scheduler=_scheduler(0), rollout={"max_concurrent": 8, "max_new_tokens": 40})
    truth = Calibration("made", SPEEDS, load())
    best = search(config, lambda _: truth, everything_fits, [()])
    assert predict(best[0].config, truth)["step_s"].value < 0.9 * predict(config, truth)["step_s"].value
    assert set(differing_words(config, best[0])) <= set(best[0].words)
    speeds = [candidate.speed for candidate in best]
    assert speeds[0] >= 0.98 * max(speeds), "only settings that are alike in speed go before faster ones"


@pytest.mark.usefixtures("small_search")
def test_the_search_proposes_only_what_fits() -> None:
    truth = Calibration("made", SPEEDS, load())
    best = search(config_of(), lambda _: truth, lambda config: config.scheduler.async_ratio == 1, [()])
    assert best
    assert {candidate.config.scheduler.async_ratio for candidate in best} == {1}
    assert search(config_of(), lambda _: truth, lambda _: False, [()]) == []


@pytest.mark.usefixtures("small_search")
def test_a_setting_whose_run_would_end_early_is_not_proposed() -> None:
    failing = Calibration("made", SPEEDS, replace(load(), failure_rate=1.0))
    assert search(config_of(), lambda _: failing, everything_fits, [()]) == []


def test_gpus_are_split_between_ranks_and_servers() -> None:
    assert gpu_splits(config_of(), 1) == [("learner.ranks=1", "inference.servers=1")]
    of_eight = gpu_splits(config_of(inference={"tensor_parallel_size": 2}), 8)
    assert ("learner.ranks=4", "inference.servers=2") in of_eight
    assert all(_gpus(words, size=2) == 8 for words in of_eight)
    assert cpu_splits(config_of(inference={"threads": 1}), 2) == [("inference.servers=1",), ("inference.servers=2",)]


def test_a_chart_of_a_run_that_would_end_early_is_refused(run: Path, tmp_path: Path) -> None:
    plan = plan_run(config_of(steps=8), run=run, searches=False)
    failing = replace(plan.calibration, load=replace(plan.calibration.load, failure_rate=1.0))
    with pytest.raises(RunError):
        replace(plan, calibration=failing).draw(tmp_path / "gantt.png")


def test_a_chart_that_cannot_be_written_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_of(steps=8).to_yaml())
    words = ["plan", str(config), "--from", str(run), "--no-search", "--gantt"]
    assert main([*words, "gantt.pdf"]) == 2
    assert capsys.readouterr().err == "roll-flash: --gantt gantt.pdf: give a file that ends with .png or .svg\n"
    assert main([*words, str(tmp_path / "nowhere" / "gantt.png")]) == 2
    assert "gantt.png: cannot be written: No such file or directory; give another file" in capsys.readouterr().err


def _scheduler(alpha: int) -> dict[str, Any]:
    return {"groups_per_step": 8, "group_size": 6, "async_ratio": alpha}


def _gpus(words: tuple[str, ...], size: int) -> int:
    ranks, servers = (int(word.partition("=")[2]) for word in words)
    return ranks + servers * size
