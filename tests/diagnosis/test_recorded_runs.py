"""Recorded runs with a planted fault are named rightly, and of sound runs nothing is said (`planted.py` makes them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_flash.diagnosis import diagnose
from tests.diagnosis.planted import ALL, FAULTY, SOUND, Planted, unpack


def names(folder: Path) -> list[str]:
    return [finding.name for finding in diagnose(folder)]


@pytest.mark.parametrize("planted", FAULTY, ids=lambda planted: planted.name)
def test_the_fault_of_a_run_is_named_first(planted: Planted, tmp_path: Path) -> None:
    found = names(unpack(planted.name, tmp_path))
    assert found[0] == planted.expected[0]
    assert set(planted.expected) <= set(found)


@pytest.mark.parametrize("planted", SOUND, ids=lambda planted: planted.name)
def test_nothing_is_said_of_a_sound_run(planted: Planted, tmp_path: Path) -> None:
    assert names(unpack(planted.name, tmp_path)) == []


@pytest.mark.parametrize("planted", ALL, ids=lambda planted: planted.name)
def test_a_finding_has_evidence_with_its_steps_and_one_line(planted: Planted, tmp_path: Path) -> None:
    for finding in diagnose(unpack(planted.name, tmp_path)):
        assert finding.evidence
        assert all(0 <= each.first <= each.last <= 30 for each in finding.evidence), finding
        assert "\n" not in finding.line
        assert finding.remedy
