"""What a person sees: whole lines in a log file, a live line on a terminal only, and an honest time left."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys

import pytest

from roll_flash.monitor.progress import Progress
from roll_flash.monitor.status_view import duration

METRICS = {"reward": 0.41, "staleness_mean": 0.6, "staleness_max": 1.0, "tokens_per_s": 1840.4, "step_s": 24.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_one_plain_line_per_step_and_no_control_characters() -> None:
    stream = io.StringIO()
    with Progress(20, stream=stream) as progress:
        progress.status("8 episodes running")
        progress.note("held-out success before: 0.03")
        progress.step(3, {**METRICS, "success": 0.25})
    assert stream.getvalue() == (
        "held-out success before: 0.03\n"
        "step  3/20  reward 0.410  success 0.25  staleness 0.60 (max 1)  1,840 tok/s  24.0 s  6 min 48 s left\n"
    )


def test_time_left_follows_the_recent_steps_and_counts_from_where_a_run_resumed() -> None:
    stream = io.StringIO()
    with Progress(100, stream=stream) as progress:
        progress.step(51, {**METRICS, "step_s": 1000.0})
        for step in range(52, 60):
            progress.step(step, {**METRICS, "step_s": 10.0})
    assert stream.getvalue().splitlines()[-1].endswith("  10.0 s  6 min 50 s left")


def test_the_last_step_has_no_time_left() -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.step(2, {**METRICS, "step_s": 1.0})
    assert stream.getvalue().endswith("  1,840 tok/s  1.0 s\n")


def test_values_that_are_missing_or_not_finite_do_not_stop_a_run() -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.step(
            1,
            {**METRICS, "reward": float("nan"), "staleness_max": float("inf"), "success": None},
        )
    assert "reward nan" in stream.getvalue()


def test_square_brackets_in_a_note_are_printed_as_they_are() -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream) as progress:
        progress.note("success 0.5 [0.4, 0.6] [bold]")
    assert stream.getvalue() == "success 0.5 [0.4, 0.6] [bold]\n"


def test_a_terminal_gets_the_live_status_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(20, stream=stream) as progress:
        progress.status("8 episodes running")
        progress.step(1, METRICS)
    assert "8 episodes running" in stream.getvalue()
    assert "reward 0.410" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (408, "6 min 48 s"), (7500, "2 h 05 min")]
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_is_in_a_pipe_before_what_it_announces() -> None:
    program = (
        "import sys; from roll_flash.monitor.progress import Progress\n"
        "with Progress(1) as progress: progress.note('starting'); sys.stdin.readline()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        readable, _, _ = select.select([child.stdout], [], [], 60)  # it still waits for its input
        assert readable
        assert child.communicate("\n", timeout=60)[0] == "starting\n"
