"""Recorded runs with a planted fault are named rightly, and of sound runs nothing is said (`planted.py` makes them)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from roll_flash.cli.main import main
from roll_flash.dashboard.folders import Sources
from roll_flash.dashboard.server import Reports
from roll_flash.diagnosis import LiveDiagnosis, diagnose, find
from roll_flash.diagnosis.findings import PAGE
from roll_flash.diagnosis.reading import read_run
from roll_flash.summary import summarize
from tests.diagnosis.catalogue import ALL, FAULTY, SOUND, Planted
from tests.diagnosis.planted import ROOT, unpack


def names(folder: Path) -> list[str]:
    return [finding.name for finding in diagnose(folder)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All recorded runs, unpacked once."""
    folder = tmp_path_factory.mktemp("recorded")
    return {planted.name: unpack(planted.name, folder) for planted in ALL}


def test_each_finding_is_the_first_one_of_a_recorded_run() -> None:
    explained = set(re.findall(r"^### ([a-z-]+)$", (ROOT / PAGE).read_text(), re.MULTILINE))
    assert {planted.expected[0] for planted in FAULTY} == explained


@pytest.mark.parametrize("planted", FAULTY, ids=lambda planted: planted.name)
def test_the_fault_of_a_run_is_named_first(planted: Planted, recorded: dict[str, Path]) -> None:
    found = names(recorded[planted.name])
    assert found[0] == planted.expected[0]
    assert set(planted.expected) <= set(found)


@pytest.mark.parametrize("planted", SOUND, ids=lambda planted: planted.name)
def test_nothing_is_said_of_a_sound_run(planted: Planted, recorded: dict[str, Path]) -> None:
    assert names(recorded[planted.name]) == []


@pytest.mark.parametrize("planted", ALL, ids=lambda planted: planted.name)
def test_a_finding_has_evidence_with_its_steps_and_one_line(planted: Planted, recorded: dict[str, Path]) -> None:
    for finding in diagnose(recorded[planted.name]):
        assert finding.evidence
        assert all(0 <= each.first <= each.last <= 30 for each in finding.evidence), finding
        assert "\n" not in finding.line
        assert finding.remedy


@pytest.mark.parametrize("name", ["forgotten-head", "one-letter-for-all"])
def test_terminal_summary_dashboard_and_command_say_the_same(
    name: str, recorded: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal's findings are those of `LiveDiagnosis`, which is told each step as `Trainer` tells it."""
    folder = recorded[name]
    found = diagnose(folder)
    plain = [finding.as_dict() for finding in found]
    assert summarize(folder, before=None, after=None, books={})["findings"] == plain
    shown = [{**each.as_dict(), "evidence": list(map(str, each.evidence))} for each in found]
    assert Reports(Sources([str(folder)])).findings(name) == {"findings": shown}
    main(["diagnose", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out) == plain
    live = LiveDiagnosis(yaml.safe_load((folder / "config.yaml").read_text()))
    said: set[str] = set()
    for row in read_run(folder).recent.rows:
        said |= {finding.name for finding in live.step(int(row["step"]), row, ())}
    assert find(live.view) == found
    assert said >= {finding.name for finding in found}, "a finding of the terminal may be over at the end"
