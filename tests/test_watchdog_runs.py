"""Parts of whole runs stand still: within half a minute a line names the part, and a file has its stack."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_training_runs import QUICK, start, wait_for_step

from roll_flash.processes.supervise import descendants

WAIT_S = 400


class Run:
    """A run or an evaluation whose environment holds up its worker as long as `self.block` is there."""

    def __init__(self, runs: Path, *words: str) -> None:
        self.block = runs / "block"
        self.said: list[str] = []
        arguments = ["configs/ci.yaml", "name=stands", f"runs={runs}", *QUICK]
        arguments += ["envs.0.id=tests.stuck:HeldUp-v0", f"envs.0.kwargs={{file: {self.block}}}"]
        self.process: subprocess.Popen[str] = start(words[0], *arguments, *words[1:])
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(iter(self.process.stdout.readline, ""))

    def line(self, text: str, after: int = 0) -> str:
        """Wait for a line of the watchdog that begins so; `after`: number of lines before it."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for line in self.said[after:]:
                if line.startswith(f"watchdog: {text}"):
                    return line.strip()
            assert self.process.poll() is None, self.said
            time.sleep(0.2)
        raise AssertionError("".join(self.said))

    def pid(self, command: str) -> int:
        found = [pid for pid in descendants(self.process.pid) if command in _command(pid)]
        return min(found, key=lambda pid: "supervise" in _command(pid))

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started = Run(tmp_path, "train", "steps=4000")
    wait_for_step(tmp_path / "stands", 1, started.process)
    yield started
    started.end()


def report(line: str) -> str:
    """The file that a line names, once it is written."""
    file, deadline = Path(line.rpartition("; stacks: ")[2]), time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if file.exists() and "\n== raylet: " in (text := file.read_text()):
            time.sleep(1.0)
            return text
        time.sleep(0.1)
    raise AssertionError(f"{file} was not written")


def seconds(line: str) -> int:
    found = re.search(r" since (\d+) s ", line)
    assert found is not None, line
    return int(found[1])


@pytest.mark.ray
def test_an_environment_that_blocks_its_worker_is_found_with_its_line_of_code(run: Run) -> None:
    run.block.touch()
    line = run.line("rollout worker 0 stands still")
    text = report(line)
    run.block.unlink()
    assert seconds(line) <= 30
    assert "it is replaced after 32 s (rollout.heartbeat_timeout_s)" in line
    run.line("rollout worker 0 goes on")
    _, _, worker = text.partition("== rollout worker 0: process ")
    assert "stuck.py" in worker.partition("\n== ")[0]
    assert "in step" in worker.partition("\n== ")[0]
    run.end()
    assert run.process.returncode == 130, run.said


@pytest.mark.nightly
@pytest.mark.ray
def test_a_stopped_process_is_named_whichever_part_it_is_and_the_run_goes_on_with_it(run: Run) -> None:
    for name, command, parts in (
        ("rank 0", "ray::RankActor", ("the learner", "the publication", "the checkpoint")),
        ("server 0", "inference.transformers.server", ("server 0", "the publication")),
        ("rollout worker 0", "ray::WorkerActor", ("rollout worker 0",)),
        ("raylet", "raylet/raylet ", ("Ray's raylet on this node",)),
        ("gcs_server", "gcs/gcs_server ", ("Ray's control store (GCS)",)),
    ):
        pid, before = run.pid(command), len(run.said)
        os.kill(pid, signal.SIGSTOP)
        line = next_standstill(run, parts, before)
        text = report(line)
        os.kill(pid, signal.SIGCONT)
        assert f"{name} (process {pid}) is stopped by a signal: `kill -CONT {pid}` lets it go on" in line
        assert seconds(line) <= 30
        assert f"== {name}: process {pid}, state T (stopped by a signal)" in text
        run.line(f"{line.removeprefix('watchdog: ').partition(' stands still')[0]} goes on", before)
    run.end()
    assert run.process.returncode == 130, run.said


@pytest.mark.nightly
@pytest.mark.ray
def test_an_evaluation_is_watched_too(tmp_path: Path) -> None:
    (tmp_path / "block").touch()
    run = Run(tmp_path, "eval", "--out", str(tmp_path / "scores"))
    try:
        line = run.line("rollout worker 0 stands still")
        assert "stuck.py" in report(line)
        assert str(tmp_path / "scores" / "logs") in line
        run.block.unlink()
        run.line("rollout worker 0 goes on")
        assert run.process.wait(WAIT_S) == 0, run.said
    finally:
        run.end()


def next_standstill(run: Run, parts: tuple[str, ...], before: int) -> str:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for line in run.said[before:]:
            if " stands still: " in line and line.removeprefix("watchdog: ").startswith(parts):
                return line.strip()
        time.sleep(0.2)
    raise AssertionError("".join(run.said))
