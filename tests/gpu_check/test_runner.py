"""Every check gets a result, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll_flash.gpu_check.check import Check, Group, Result
from roll_flash.gpu_check.report import Report
from roll_flash.gpu_check.runner import Runner, not_run
from roll_flash.gpu_check.settings import Settings

HERE = "tests.gpu_check.subjects"


def check(name: str, deadline_s: float = 60, **arguments: int) -> Check:
    return Check(name, f"{name} does what it does.", f"{HERE}:{name}", deadline_s, arguments)


def run(settings: Settings, *groups: Group) -> tuple[list[Result], list[str]]:
    said: list[str] = []
    return list(Runner(settings, said.append).run(groups)), said


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One group in which checks end in every way."""
    from roll_flash.gpu_check.settings import create_folder, make_settings

    names = ("passes", "fails", "raises", "cannot", "crashes", "leaves", "hangs", "passes_again")
    checks = [check(name, deadline_s=2 if name == "hangs" else 60) for name in names[:-1]]
    checks.append(Check("passes_again", "", f"{HERE}:passes", 60, {"value": 2}))
    settings = make_settings(tmp_path_factory.mktemp("checks") / "report", None, ())
    create_folder(settings.output)
    results, said = run(settings, Group("all ends", tuple(checks)))
    assert [result.name for result in results] == list(names)
    assert any("still" in line or "waiting for nothing" in line for line in said)
    return {result.name: result for result in results}


class TestEachEnd:
    def test_a_check_that_passes_keeps_its_figures_and_what_was_slow(self, ended: dict[str, Result]) -> None:
        assert ended["passes"].figures == {"value": 1}
        # A rehearsal says nothing about speed.
        assert (ended["passes"].status, ended["passes"].slow) == ("passed", [])

    def test_a_check_that_finds_something_says_what(self, ended: dict[str, Result]) -> None:
        assert (ended["fails"].status, ended["fails"].text) == ("failed", "two and two are five")
        assert ended["fails"].figures == {"before": 1}

    def test_an_error_is_a_failure_with_its_traceback(self, ended: dict[str, Result]) -> None:
        assert ended["raises"].text == "ZeroDivisionError: by the way"
        assert "subjects.py" in ended["raises"].log

    def test_what_is_not_possible_is_no_failure(self, ended: dict[str, Result]) -> None:
        assert (ended["cannot"].status, ended["cannot"].text) == ("not possible", "no such thing here")

    def test_a_crash_is_named_with_the_last_lines_and_the_figures_before_it(self, ended: dict[str, Result]) -> None:
        crashed = ended["crashes"]
        assert (crashed.status, crashed.text) == ("failed", "its process crashed: SIGSEGV")
        assert "the last words in the log" in crashed.log
        assert crashed.figures == {"reached": 7}

    def test_a_process_that_ends_in_the_middle_is_a_failure(self, ended: dict[str, Result]) -> None:
        assert (ended["leaves"].status, ended["leaves"].text) == ("failed", "its process ended with 0")

    def test_a_check_that_hangs_is_ended_and_says_what_it_waited_for(self, ended: dict[str, Result]) -> None:
        assert ended["hangs"].status == "failed"
        assert "did not end within 2 s, last: waiting for nothing" in ended["hangs"].text

    def test_the_rest_of_the_group_goes_on_after_all_of_them(self, ended: dict[str, Result]) -> None:
        assert ended["passes_again"].figures == {"value": 2}


def test_after_a_crash_what_the_checks_share_is_opened_again(settings: Settings) -> None:
    checks = (check("sees"), check("crashes_with"), Check("sees again", "", f"{HERE}:sees", 60))
    results, _ = run(settings, Group("shared", checks, opens=check("opened")))
    assert [result.status for result in results] == ["passed", "passed", "failed", "passed"]
    assert results[1].figures["process"] != results[3].figures["process"]


def test_checks_whose_subject_does_not_start_are_not_possible(settings: Settings) -> None:
    results, _ = run(settings, Group("shared", (check("sees"),), opens=check("not_opened")))
    assert [(result.status, result.text) for result in results] == [
        ("failed", "ConnectionError: nobody there"),
        ("not possible", "needs: not_opened"),
    ]


def test_what_does_not_stop_in_order_is_a_failure(settings: Settings) -> None:
    results, _ = run(settings, Group("shared", (check("sees"),), opens=check("does_not_close")))
    assert [result.status for result in results] == ["passed", "passed", "failed"]
    assert "cannot be stopped" in results[-1].log


def test_a_group_that_is_not_possible_starts_nothing(settings: Settings) -> None:
    began = time.monotonic()
    results, _ = run(settings, Group("none", (check("hangs"),), not_possible="no GPU"))
    assert [(result.status, result.text) for result in results] == [("not possible", "no GPU")]
    assert time.monotonic() - began < 5
    assert not list((settings.output / "logs").iterdir())


def test_one_failure_fails_the_report_and_its_page_names_it(settings: Settings) -> None:
    groups = [Group("two", (check("passes"), check("fails")))]
    results, _ = run(settings, *groups)
    report = Report(settings, results)
    page = report.write().read_text()
    tree = json.loads((settings.output / "report.json").read_text())
    assert not report.is_ok
    assert tree["ok"] is False
    assert tree["rehearsal"] is True
    assert "This is a rehearsal on a CPU" in page.split("##")[0]
    assert "two and two are five" in page
    assert report.line() in page
    assert "failed: fails" in report.line()
    assert Report(settings, results[:1]).is_ok


def test_checks_that_were_not_reached_are_in_the_report(settings: Settings) -> None:
    groups = [Group("two", (check("passes"), check("hangs")))]
    left = not_run(groups, [Result("passes", "two", "", "passed")])
    assert [(result.name, result.status) for result in left] == [("hangs", "not run")]
    assert not Report(settings, left, interrupted=True).is_ok


def test_ctrl_c_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    output = tmp_path / "report"
    process = subprocess.Popen(
        [sys.executable, "-m", "roll_flash", "gpu-check", "--output", str(output)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "attention" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    tree = json.loads((output / "report.json").read_text())
    assert process.returncode == 130
    assert "the report so far is" in said
    assert tree["interrupted"] is True
    statuses = {result["name"]: result["status"] for result in tree["results"]}
    assert statuses["doctor"] == "passed"
    assert statuses["log-probabilities of the model"] == "not run"
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if str(output) in " ".join(each.info["cmdline"] or ())
    ]
