"""Settings that a diagnosis takes from the plan are better ones: the plan says so, and a run with them is faster."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from roll_flash.cli.main import main
from roll_flash.cli.run_folder.diagnose import WORTH_SAYING
from roll_flash.config.tree import load_config
from roll_flash.monitor.metrics import read_metrics
from roll_flash.planner.plan import plan_run
from tests.diagnosis.catalogue import FAULTY, Planted
from tests.diagnosis.planted import make, unpack

ADVICE = re.compile(r"; plan would set (.+): ([\d.]+) times as many episodes per second$")
FIRST_STEPS = 2
"""Steps at the begin, in which servers and learner wait for each other as in no later one."""


def planted(name: str) -> Planted:
    return next(each for each in FAULTY if each.name == name)


def advice(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], float]:
    """What `roll-flash diagnose` would set, and how many times as fast that is."""
    capsys.readouterr()
    main(["diagnose", str(folder), "--json"])
    finding, *_ = json.loads(capsys.readouterr().out)
    found = ADVICE.search(finding["remedy"])
    assert found, finding["remedy"]
    return found[1].split(), float(found[2])


def predicted(folder: Path, words: list[str]) -> float:
    """Episodes per second of the run with these words, as `roll-flash plan CONFIG --from RUN words` predicts."""
    config = load_config(folder / "config.yaml", words)
    return plan_run(config, run=folder, searches=False).prediction["episodes_per_s"].value


def step_s(folder: Path) -> float:
    return fmean(float(row["step_s"]) for row in read_metrics(folder)[FIRST_STEPS:])


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("slow-steps", "rollout.max_concurrent="),
        pytest.param("slow-judge", "scheduler.async_ratio=", marks=pytest.mark.nightly),
    ],
)
def test_the_settings_of_an_advice_are_predicted_to_be_faster_and_are(
    name: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _ = make(planted(name), tmp_path)
    words, times = advice(before, capsys)
    assert any(word.startswith(key) for word in words)
    assert predicted(before, words) > WORTH_SAYING * predicted(before, [])
    advised = replace(planted(name), name="advised", words=[*planted(name).words, *words])
    after, _ = make(advised, tmp_path)
    assert step_s(before) / step_s(after) > 1 + (times - 1) / 4, "a quarter of what was said, beside other tests"


def test_a_run_without_tokens_cannot_be_planned_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["diagnose", str(unpack("slow-steps", tmp_path)), "--json"])
    finding, *_ = json.loads(capsys.readouterr().out)
    assert finding["name"] == "learner-starved"
    assert "; plan cannot say more (" in finding["remedy"]
