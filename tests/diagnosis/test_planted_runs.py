"""The planted runs made anew: the fault is there in the machinery of today, and is named; sound runs are sound."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from roll_flash.diagnosis import diagnose
from tests.diagnosis.catalogue import FAULTY, SOUND, Planted
from tests.diagnosis.planted import make

QUICK = ("broken-level", "nothing-to-win")
"""So that what makes these runs follows each change."""
OF_THE_MACHINE = ("kept-memory", "kept-files")
"""Other processes change free memory and disk more than these do; only their recorded runs are tested."""


def cases() -> list[ParameterSet]:
    return [
        pytest.param(planted, marks=[] if planted.name in QUICK else [pytest.mark.nightly], id=planted.name)
        for planted in (*FAULTY, *SOUND)
        if planted.name not in OF_THE_MACHINE
    ]


ATTEMPTS = 3
"""A fault that the model has to learn first, such as a trick, does not show in every short run. A wrong name is never
given, and a sound run is trained once."""


@pytest.mark.ray
@pytest.mark.parametrize("planted", cases())
def test_a_new_run_with_a_planted_fault_is_told_from_a_sound_one(planted: Planted, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        folder, shown = make(planted, tmp_path / str(attempt))
        found = diagnose(folder)
        if found or not planted.expected:
            break
    assert [finding.name for finding in found[:1]] == list(planted.expected[:1])
    if planted.name in QUICK:
        assert f"{found[0].severity}: {found[0].name}: " in shown, "the terminal says it while the run trains"
