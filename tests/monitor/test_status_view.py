"""What a run does is readable on any terminal, and what a model wrote stays text."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from roll_flash.monitor.progress import Progress
from roll_flash.monitor.status import News, RunStatus, new_status
from roll_flash.monitor.status_view import HEIGHTS, StatusView, sparkline
from tests.monitor.test_progress import METRICS, Terminal

NOW_S = 1_000_000.0
BUSY = replace(
    new_status("quickstart", 60),
    state="running",
    started_s=NOW_S - 500,
    step=12,
    left_s=408.0,
    recent={"reward": [0.1, None, 0.4], "tokens_per_s": [1840.4], "step_s": [24.0], "weights/total_s": [0.81]},
    staleness={0: 800, 1: 200},
    episodes={"queued": 12, "model": 20, "sandbox": 4, "scoring": 0},
    books={"produced": 100, "dropped_stale": 3, "failed_env_error": 2, "failed_stale": 0},
    busy={"learner": 0.78, "servers": 0.95},
    servers=[{"up": 1.0, "requests_running": 12.0, "requests_waiting": 3.0, "kv_cache_usage": 0.4}, {"up": 0.0}],
    versions={"learner": 12, "servers": 11},
    waits_for="3 groups to go",
    now=["the learner: micro-batch since 12 s"],
)


class Ascii(io.StringIO):
    encoding = "ascii"


def drawn(status: RunStatus, width: int = 100, file: io.StringIO | None = None) -> str:
    stream = file or io.StringIO()
    Console(file=stream, width=width, highlight=False).print(StatusView(status, news=True, now_s=NOW_S))
    return stream.getvalue()


def test_each_thing_has_its_row() -> None:
    lines = [line.rstrip() for line in drawn(BUSY).splitlines()]
    assert lines[0] == "quickstart  running  step 12/60  8 min 20 s  6 min 48 s left"
    assert lines[1] == "█" * 16 + "░" * 64
    assert lines[2:] == [
        "reward     0.400  ▁ █",
        "episodes   12 queued  20 waiting for the model  4 in a sandbox",
        "staleness  0: ████████ 80%  1: ██ 20%",
        "busy       learner ████████░░  78%  servers ██████████  95%",
        "server 0   12 running, 3 waiting, cache 40% full",
        "server 1   is not there: it starts again, or its node is lost",
        "speed      1,840 tok/s  24.0 s a step",
        "weights    version 11 on the servers, version 12 on its way, the last update took 0.8 s",
        "lost       3 dropped (stale 3)  2 failed (env_error 2)",
        "now        3 groups to go",
        "           the learner: micro-batch since 12 s",
    ]


def test_in_a_run_that_is_done_nothing_plays_or_serves_any_more() -> None:
    lines = drawn(replace(BUSY, state="done", now=[])).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["reward", "staleness", "speed", "weights", "lost"]


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_no_line_is_longer_than_the_terminal_and_nothing_is_lost(width: int) -> None:
    lines = drawn(BUSY, width).splitlines()
    assert max(map(len, lines)) <= width
    said = re.sub(r"\s+", "", "".join(line[9:] for line in lines))
    assert "20waitingforthemodel" in said
    assert "micro-batchsince12s" in said


def test_a_terminal_without_unicode_gets_none() -> None:
    shown = drawn(BUSY, file=Ascii())
    assert shown.isascii()
    assert "0: ######## 80%" in shown


def test_a_run_that_has_just_begun_can_be_drawn() -> None:
    assert "starting  step 0/60" in drawn(new_status("quickstart", 60))
    assert "step 0/0" in drawn(new_status("quickstart", 0))


def test_what_a_model_or_an_endpoint_wrote_is_text() -> None:
    evil = "\x1b[2J\x07[bold]x[/bold]\n\u202eabc"
    status = replace(BUSY, news=[News(time_s=0.0, text=evil)], now=[evil], waits_for=evil, name=evil, error=evil)
    status = replace(status, books={f"dropped_{evil}": 1}, busy={evil: 0.5})  # a run's folder may be of others
    for shown in (drawn(status), drawn(status, file=Terminal())):
        assert r"\x1b[2J\x07[bold]x[/bold] \u202eabc" in shown
        assert "\x1b[2J" not in shown
        assert "\x07" not in shown
        assert "\u202e" not in shown


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\d", drawn(BUSY, file=Terminal()))
    monkeypatch.delenv("NO_COLOR")
    assert re.search(r"\x1b\[[0-9;]*3\d", drawn(BUSY, file=Terminal()))


def test_many_servers_are_counted_and_those_that_are_down_are_shown() -> None:
    up = {"up": 1.0, "requests_running": 1.0}
    shown = drawn(replace(BUSY, servers=[*[up] * 20, {"up": 0.0}]))
    assert "server 20  is not there" in shown
    assert "and 13 more servers" in shown


@given(st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=100))
def test_any_values_make_a_line(values: list[float | None]) -> None:
    line = sparkline(values)
    assert len(line) == min(40, len(values))
    assert set(line) <= {" ", *HEIGHTS}
    known = [value is not None and math.isfinite(value) for value in values[-40:]]
    assert [character != " " for character in line] == known


def test_the_live_view_leaves_the_lines_and_the_cursor(tmp_path: Path) -> None:
    """On a terminal of 40 columns that the program believes in."""
    program = (
        "import sys, time; from pathlib import Path; from roll_flash.monitor.progress import Progress\n"
        "with Progress(3, run_folder=Path(sys.argv[1])) as progress:\n"
        "    progress.note('starting ' + 'x' * 60)\n"
        f"    progress.step(1, {METRICS})\n"
        "    print('printed meanwhile'); print('an error', file=sys.stderr)\n"
        "    time.sleep(1.5)\n"
    )
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "40", "LINES": "24"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as child:
        os.close(terminal)
        shown = b""
        while True:
            try:
                chunk = os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
            shown += chunk
        assert child.wait(60) == 0
    os.close(controller)
    text = shown.decode()
    assert f"{tmp_path.name}" in text
    assert "printed meanwhile" in text
    assert "an error" in text
    assert "x" * 60 in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_pipe_gets_the_same_lines_with_a_status_as_without(tmp_path: Path) -> None:
    said = []
    for folder in (None, tmp_path):
        stream = io.StringIO()
        with Progress(20, stream=stream, run_folder=folder) as progress:
            progress.status("8 episodes running")
            progress.note("[bold] note")
            progress.step(3, METRICS)
        said.append(stream.getvalue())
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 2
