"""What is read of other processes of a run, without their help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from roll_flash.watchdog.stacks import MOST_BYTES, Process, processes_of, stacks_of

CHILD = """
import time
from roll_flash.watchdog.stacks import register_stacks
register_stacks("run-of-tests", "rank 0")
def stuck_here():
    print("ready", flush=True)
    {wait}
stuck_here()
"""
HOLDS_THE_LOCK = "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')"
"""Runs for ever in C, without ever releasing the interpreter's lock."""


ENDLESS = """
import os, signal, time
file = os.memfd_create("roll-flash-stacks:run-of-tests:rank 0")
signal.signal(signal.SIGUSR1, lambda *_: os.ftruncate(file, 1 << 40))
print("ready", flush=True)
time.sleep(600)
"""
"""What code in a sandbox of the same user can do: the file of stacks is one of a TB when it is asked for."""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    code = CHILD.format(wait=request.param)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def only(process: subprocess.Popen[str]) -> Process:
    (found,) = [each for each in processes_of("run-of-tests") if each.pid == process.pid]
    return found


@pytest.mark.parametrize("child", ["time.sleep(600)", HOLDS_THE_LOCK], indirect=True)
def test_a_process_of_ours_shows_its_stack_even_if_it_holds_the_interpreters_lock(child: subprocess.Popen[str]) -> None:
    for _ in range(2):
        text = stacks_of([only(child)])
        assert text.startswith(f"== rank 0: process {child.pid}, state ")
        assert "in stuck_here" in text
    assert child.poll() is None


@pytest.mark.parametrize("child", ["time.sleep(600)"], indirect=True)
def test_a_stopped_process_is_named_and_not_waited_for(child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    found = only(child)
    assert found.is_stopped
    assert str(found) == f"rank 0 (process {child.pid}) is stopped by a signal"
    assert "state T (stopped by a signal)" in stacks_of([found])


def test_a_process_that_is_not_ours_gets_no_signal() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        (found,) = [each for each in processes_of("run-of-tests") if each.pid == process.pid]
        assert found.file is None
        assert f"process {process.pid}" in stacks_of([found])
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_file_of_stacks_without_end_is_not_read_to_its_end() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(stacks_of([only(process)])) < 2 * MOST_BYTES
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files of other users' processes")
def test_a_process_of_another_user_is_not_taken_for_one_of_the_run() -> None:
    """Sandboxes of root run as users of their own; code there can give a file any name, and handle any signal."""
    code = ENDLESS.replace("file =", "os.setresuid(*3 * [0x78000000])\nfile =", 1)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert only(process).file is None
        finally:
            process.kill()
