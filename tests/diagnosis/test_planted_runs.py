"""The planted runs made anew: the fault is there in the machinery of today, and is named; sound runs are sound."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from roll_flash.diagnosis import diagnose
from tests.diagnosis.planted import FAULTY, SOUND, Planted, make

QUICK = "broken-level"
"""So that what makes these runs follows each change."""


def cases() -> list[ParameterSet]:
    return [
        pytest.param(planted, marks=[] if planted.name == QUICK else [pytest.mark.nightly], id=planted.name)
        for planted in (*FAULTY, *SOUND)
    ]


@pytest.mark.ray
@pytest.mark.parametrize("planted", cases())
def test_a_new_run_with_a_planted_fault_is_told_from_a_sound_one(planted: Planted, tmp_path: Path) -> None:
    found = [finding.name for finding in diagnose(make(planted, tmp_path))]
    assert found[:1] == list(planted.expected[:1])
