"""What a run does is seen from another process: whole at any time, and honest about a run that was killed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_flash.cli.main import main
from roll_flash.errors import RunError
from roll_flash.monitor import status
from roll_flash.monitor.progress import Progress
from roll_flash.monitor.status import NEWS, RECENT_STEPS, RunStatus, Writer, new_status, read_status
from tests.monitor.test_progress import METRICS

EVIL = "said \x1b[2J\x07[bold]x[/bold] \u202eabc"


def a_status() -> RunStatus:
    return replace(new_status("maze", 10), state="running", step=3, staleness={0: 5, 1: 2}, episodes={"model": 4})


def dead_writer() -> Writer:
    """A process that ran and is gone."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return replace(new_status("maze", 1).writer, pid=ended.pid)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = a_status()
    status.write(tmp_path, written)
    assert read_status(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    written, is_over = replace(a_status(), step=0), threading.Event()
    status.write(tmp_path, written)

    def write() -> None:
        step = 0
        while not is_over.is_set():
            step += 1
            status.write(tmp_path, replace(written, step=step, waits_for="x" * (step % 5000)))

    thread = threading.Thread(target=write)
    thread.start()
    steps = [read_status(tmp_path).step for _ in range(300)]
    is_over.set()
    thread.join()
    assert steps == sorted(steps)


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    killed = replace(a_status(), writer=dead_writer())
    status.write(tmp_path, killed)
    assert read_status(tmp_path).state == "died"
    status.write(tmp_path, replace(killed, state="done"))
    assert read_status(tmp_path).state == "done"


def test_another_process_of_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    earlier = replace(a_status().writer, started_s=a_status().writer.started_s - 1000)
    status.write(tmp_path, replace(a_status(), writer=earlier))
    assert read_status(tmp_path).state == "died"


def test_a_run_in_a_container_with_the_name_of_this_host_is_not_dead_because_it_is_not_seen(tmp_path: Path) -> None:
    elsewhere = replace(dead_writer(), namespace=1)
    status.write(tmp_path, replace(a_status(), writer=elsewhere))
    assert read_status(tmp_path).state == "running"
    status.write(tmp_path, replace(a_status(), writer=elsewhere, written_s=time.time() - 7530))
    assert read_status(tmp_path).state == "silent"
    status.write(tmp_path, replace(a_status(), writer=replace(elsewhere, boot="another")))
    assert read_status(tmp_path).state == "died"


def test_a_clock_that_is_set_makes_no_running_run_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status.write(tmp_path, a_status())
    boot_s, began_s = psutil.boot_time(), psutil.Process().create_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_s + 3600)  # as /proc/stat has it then
    assert psutil.Process().create_time() == pytest.approx(began_s + 3600, abs=5)
    assert read_status(tmp_path).state == "running"


def test_a_process_of_the_boot_before_is_gone(tmp_path: Path) -> None:
    status.write(tmp_path, replace(a_status(), writer=replace(a_status().writer, boot="another")))
    assert read_status(tmp_path).state == "died"


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_a_run_that_writes_nothing_is_silent(tmp_path: Path, host: str) -> None:
    here = a_status().writer
    old = replace(a_status(), written_s=time.time() - 100, writer=replace(here, host=host or here.host))
    status.write(tmp_path, old)
    assert read_status(tmp_path).state == "silent"
    status.write(tmp_path, replace(old, written_s=time.time()))
    assert read_status(tmp_path).state == "running"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"name": "maze", "to',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"name": "\xff"}',
        b'{"name": 3, "total_steps": "x"}',
    ],
)
def test_a_damaged_status_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(RunError, match=r"status\.json: is damaged or of another version") as raised:
        read_status(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"news": [{"time_s": 1e300, "text": "x"}]},
        {"started_s": -1e300},
        {"state": "x" * 10_000},
        {"written_s": 1e300},
        {"staleness": {"0": 10**9, "1": 1 - 10**9}},
        {"books": {"dropped_stale": 10**400}},
    ],
    ids=str,
)
def test_what_no_run_writes_is_not_drawn(tmp_path: Path, change: dict[str, Any]) -> None:
    """A share of a thousand million is as many characters of a bar."""
    status.write(tmp_path, new_status("maze", 20))
    path = tmp_path / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=r"status\.json: is damaged or of another version") as said:
        read_status(tmp_path)
    assert len(str(said.value)) < 1000


def test_a_newer_version_may_say_more(tmp_path: Path) -> None:
    status.write(tmp_path, a_status())
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": [1, {"more": 2}]}))
    assert read_status(tmp_path).step == 3


def test_a_folder_without_a_status_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="an older version wrote this run, or it never began"):
        read_status(tmp_path)


# What a run keeps


def test_a_run_keeps_its_status_until_its_end(tmp_path: Path) -> None:
    with Progress(4, run_folder=tmp_path) as progress:
        progress.note(f"warning: {EVIL}")
        progress.status("2 groups to go")
        progress.watch(lambda: ["the learner: micro-batch since 12 s"])
        progress.step(1, METRICS, {0: 10, 1: 5})
        deadline = time.monotonic() + 60
        while not (tmp_path / "status.json").exists() or read_status(tmp_path).step == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = read_status(tmp_path)
    assert (found.name, found.state, found.step, found.total_steps) == (tmp_path.name, "starting", 1, 4)
    assert found.now == ["the learner: micro-batch since 12 s"]
    assert found.recent["reward"] == [0.41]
    assert found.left_s == 72.0
    assert found.staleness == {0: 10, 1: 5}
    assert found.news[0].text == r"warning: said \x1b[2J\x07[bold]x[/bold] \u202eabc"
    ended = read_status(tmp_path)
    assert (ended.state, ended.now) == ("done", [])


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (KeyboardInterrupt(), "stopped", ""),
        (RunError(f"no {EVIL}"), "failed", r"no said \x1b[2J"),
        (OSError(), "failed", "OSError"),
    ],
)
def test_the_last_status_says_how_it_ended(tmp_path: Path, error: BaseException, state: str, text: str) -> None:
    with pytest.raises(type(error)), Progress(4, run_folder=tmp_path):
        raise error
    found = read_status(tmp_path)
    assert found.state == state
    assert found.error.startswith(text)


def test_a_status_does_not_grow_with_the_run(tmp_path: Path) -> None:
    with Progress(10_000, run_folder=tmp_path) as progress:
        for step in range(1, 500):
            progress.step(step, METRICS)
            progress.note("a very long line " * 1000)
    found = read_status(tmp_path)
    assert len(found.news) == NEWS
    assert {len(values) for values in found.recent.values()} == {RECENT_STEPS}
    assert (tmp_path / "status.json").stat().st_size < 30_000


def test_warnings_of_parts_are_news_and_are_still_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("roll_flash.inference.servers.engine")
    with Progress(4, run_folder=tmp_path):
        logger.warning("%s is back after %d s", "server 0", 12)
        logger.info("not this")
    logger.warning("after the end")
    assert [each.text for each in read_status(tmp_path).news] == ["server 0 is back after 12 s"]
    assert not logging.getLogger("roll_flash").handlers


def test_a_full_disk_is_said_once_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from roll_flash.monitor import status_writer

    refused = threading.Semaphore(0)

    def refuse(*_: object) -> None:
        refused.release()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status_writer, "write", refuse)
    monkeypatch.setattr(status_writer, "EVERY_S", 0.01)
    with Progress(4, run_folder=tmp_path):
        for _ in range(3):
            assert refused.acquire(timeout=60)
    assert capsys.readouterr().out == "status.json cannot be written: No space left on device\n"


# The commands


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("name: maze\n")
    return tmp_path


def test_status_tells_people_and_scripts(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, run_folder=run_folder) as progress:
        progress.step(1, METRICS, {0: 3, 1: 1})
        progress.note(EVIL)
    capsys.readouterr()
    assert main(["status", str(run_folder)]) == 0
    shown = capsys.readouterr().out
    assert "done  step 1/4" in shown
    assert "0: ████████ 75%" in shown
    assert r"said \x1b[2J\x07[bold]x[/bold]" in shown
    assert "\x1b" not in shown
    assert main(["status", str(run_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["staleness"] == {"0": 3, "1": 1}


def test_a_run_that_died_is_said_to_be_so(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = replace(a_status(), writer=dead_writer(), written_s=time.time() - 7530, now=["the learner: step since 1 s"])
    status.write(run_folder, gone)
    assert main(["status", str(run_folder)]) == 1
    shown = capsys.readouterr().out
    assert "died, last sign of life 2 h 05 min ago" in shown
    assert "the learner" not in shown
    assert main(["watch", str(run_folder)]) == 1
    assert "maze is over (died)" in capsys.readouterr().out


def test_watch_in_a_pipe_prints_the_lines_of_the_run_from_now_on(run_folder: Path) -> None:
    command = [sys.executable, "-u", "-m", "roll_flash", "watch", str(run_folder)]
    with Progress(2, run_folder=run_folder) as progress:
        progress.note("before")
        progress.step(1, METRICS)
        status.write(run_folder, progress._writer.status)  # type: ignore[union-attr]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert watching.stdout.readline() == f"{run_folder.name}: starting, step 1/2\n"
            progress.note("server 0 is back")
            progress.step(2, METRICS)
            progress.close()
            said = watching.stdout.read()
    assert watching.returncode == 0
    assert said.splitlines() == [
        "server 0 is back",
        "step 2/2  reward 0.410  staleness 0.60 (max 1)  1,840 tok/s  24.0 s",
        f"{run_folder.name} is over (done)",
    ]
