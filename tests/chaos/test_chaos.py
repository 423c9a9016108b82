"""A run that is hit by one fault after the other goes on, and nothing is lost, doubled or left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS, PARTS, Case, Moment, draw_cases, read_cases

ROOT = Path(__file__).parents[2]
QUICK, REGRESSIONS = (Path(__file__).with_name(name) for name in ("quick.txt", "regressions.txt"))


@pytest.mark.nightly
@pytest.mark.docker
@pytest.mark.ray
@pytest.mark.timeout(4000)
def test_a_run_bears_faults_in_each_of_its_parts_and_moments() -> None:
    """A failure prints its case: `benchmarks/chaos.py --case CASE` repeats it."""
    done = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--quick", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cases = [*read_cases(QUICK), *read_cases(REGRESSIONS)]
    always = [case for case in cases if case.part in PARTS or case.part in ("sandbox", "answers")]
    assert sum(row["faults"] for row in found["rows"]) >= len(always) >= 20
    assert found["books"]["balance"]


def test_the_quick_faults_have_every_moment_but_the_long_ones() -> None:
    moments = {case.moment for case in read_cases(QUICK)}
    assert moments >= set(Moment) - {Moment.START, Moment.SHUTDOWN}


def test_a_seed_draws_the_same_cases_and_every_kind_before_any_comes_again() -> None:
    places = {part.partition(" ")[0] for part, _ in FAULTS if part not in PARTS}
    cases = draw_cases(7, 300, places)
    assert cases == draw_cases(7, 300, places)
    assert cases[:100] == draw_cases(7, 100, places)
    assert {(case.part, case.fault) for case in cases[: len(FAULTS)]} == set(FAULTS)
    assert [Case.parse(str(case)) for case in cases] == cases


def test_a_machine_without_a_place_has_no_faults_there() -> None:
    assert {case.part for case in draw_cases(7, 300, {"sandbox"})} == {*PARTS, "sandbox"}


@pytest.mark.parametrize("text", ["worker:kill -9:episode", "nobody:kill -9:episode:1", "worker:kill -9:never:1"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|no fault|Moment"):
        Case.parse(text)
