"""A run that ends by itself is started again until it is done, or until a person has to decide."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll_flash.processes.keep_alive import (
    FIRST_PAUSE_S,
    MAX_REFUSED,
    MAX_WITHOUT_PROGRESS,
    PAUSE_AFTER_PROGRESS_S,
    keep_alive,
    own_command,
)

ENDS = """
import os, signal, sys
from pathlib import Path
count = Path(sys.argv[1])
count.write_text(str(int(count.read_text() or 0) + 1) if count.exists() else "1")
how = sys.argv[2:][int(count.read_text()) - 1]
os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(int(how))
"""


def starts(count: Path) -> int:
    return int(count.read_text())


def ending(count: Path, *how: str) -> list[str]:
    return [sys.executable, "-c", ENDS, str(count), *how]


@pytest.mark.parametrize(
    ("how", "code", "tries"),
    [(["killed", "1", "0"], 0, 3), (["1", "130"], 130, 2), (["2"], 2, 1), (["killed", "2", "0"], 0, 3)],
)
def test_it_is_started_again_until_it_is_done_or_stopped_or_refused(
    how: list[str], code: int, tries: int, tmp_path: Path
) -> None:
    command = ending(tmp_path / "count", *how)
    assert keep_alive(lambda: command, lambda: 0, first_pause_s=0.01) == code
    assert starts(tmp_path / "count") == tries


def test_a_run_without_a_new_step_is_given_up_and_one_that_goes_on_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ending(tmp_path / "stuck", *["1"] * 20)
    assert keep_alive(lambda: command, lambda: 7, first_pause_s=0.01) == 1
    assert starts(tmp_path / "stuck") == MAX_WITHOUT_PROGRESS
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "the run ended with exit code 1 after step 7; starting it again in 0.01 s"
    assert said[1].endswith("starting it again in 0.02 s")
    assert said[-1].endswith("4 times without a new step: it is not started again")
    command = ending(tmp_path / "goes on", *["1"] * 9, "0")
    steps = iter(range(1000))
    assert keep_alive(lambda: command, lambda: next(steps), first_pause_s=0.01) == 0


def test_a_run_that_went_on_is_not_given_up_while_its_store_or_docker_is_away(tmp_path: Path) -> None:
    command = ending(tmp_path / "back", *["1"] * 3, *["2"] * (MAX_REFUSED - 1), "0")
    assert keep_alive(lambda: command, lambda: 7, first_pause_s=0.0001) == 0
    command = ending(tmp_path / "away", "1", *["2"] * 40)
    assert keep_alive(lambda: command, lambda: 7, first_pause_s=0.0001) == 2
    assert starts(tmp_path / "away") == 1 + MAX_REFUSED


def test_a_start_for_which_the_machine_has_no_process_is_tried_again(tmp_path: Path) -> None:
    commands = iter([[str(tmp_path / "no such program")], ending(tmp_path / "count", "0")])
    assert keep_alive(lambda: next(commands), lambda: 7, first_pause_s=0.01) == 0


def test_a_start_with_a_new_step_is_not_counted_among_those_without(tmp_path: Path) -> None:
    command = ending(tmp_path / "count", *["1"] * 20)
    steps = iter([0, 1, 1, *[1] * 20])  # `progress` before and after the first start, and then no more
    assert keep_alive(lambda: command, lambda: next(steps), first_pause_s=0.001) == 1
    assert starts(tmp_path / "count") == 1 + MAX_WITHOUT_PROGRESS


def test_it_waits_less_after_a_new_step_than_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ending(tmp_path / "count", "1", "0")
    steps = iter(range(10))
    assert keep_alive(lambda: command, lambda: next(steps)) == 0
    assert capsys.readouterr().err.endswith(f"starting it again in {PAUSE_AFTER_PROGRESS_S:g} s\n")
    assert PAUSE_AFTER_PROGRESS_S < FIRST_PAUSE_S


PARENT = """
import sys
from roll_flash.processes.keep_alive import keep_alive
child = "import time\\nprint('ready', flush=True)\\ntime.sleep(600)"
sys.exit(keep_alive(lambda: [sys.executable, "-c", child], lambda: 0))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_its_run_ends_with_it(how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.send_signal(how)
    assert parent.wait(60) == (130 if how == signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    parent.stdout.close()


def test_under_nohup_it_outlives_its_terminal() -> None:
    nohup = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PARENT}"
    parent = subprocess.Popen([sys.executable, "-c", nohup], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.send_signal(signal.SIGHUP)
    os.kill(int(child), signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(1)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(60) == 130
    parent.stdout.close()


IGNORES_THE_END = """
import os, signal, sys
os.kill(os.getppid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.exit(1)
"""


def test_a_run_that_was_told_to_stop_is_not_started_again_however_it_ends() -> None:
    starts = iter(range(1))
    assert keep_alive(lambda: [sys.executable, "-c", IGNORES_THE_END, str(next(starts))], lambda: 0) == 130


def test_a_stop_between_two_starts_ends_it(tmp_path: Path) -> None:
    command = ending(tmp_path / "count", "1", "0")

    def progress() -> int:
        if (tmp_path / "count").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert keep_alive(lambda: command, progress, first_pause_s=600) == 130
    assert starts(tmp_path / "count") == 1


def test_a_refused_config_is_not_started_twice(tmp_path: Path) -> None:
    done = subprocess.run(
        own_command(["train", "configs/ci.yaml", "--keep-alive", "steps=0", f"runs={tmp_path}"]),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
