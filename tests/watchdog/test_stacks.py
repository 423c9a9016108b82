"""What is read of other processes of a run, without their help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from roll_flash.watchdog.stacks import Process, processes_of, stacks_of

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
