"""The controller's end of its watchdog: starts it, tells it what the engine is asked for, replaces it if it ends.

The watchdog is nobody's child and holds no file of the controller's, so that what ends a controller does not end it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
from pathlib import Path

from roll_flash.sandboxes.docker.watchdog import READY
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.sandboxes.identity import LABEL_OWNER, Owner

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
IMAGE = "-"
"""In place of a container's image: what is asked for is an image."""

_log = logging.getLogger("roll_flash.sandboxes")


class Guard:
    """`start` first; `asked` before each request that leaves something with the engine, `answered` after it."""

    def __init__(self, snapshots: str, folders: str) -> None:
        """`snapshots`: the repository of the images that it removes; `folders`: a glob pattern of folders."""
        self._snapshots = snapshots
        self._folders = folders
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._unanswered: dict[str, str] = {}
        self._stopped = False

    def start(self, host: str, version: str, certificates: str) -> None:
        """Returns when it watches. Raises SandboxUnavailable."""
        program = str(Path(__file__).with_name("watchdog.py"))
        label = f"{LABEL_OWNER}={Owner.current()}"
        self._command = [sys.executable, "-I", "-S", program, host, version, label, certificates]
        self._command += [self._folders, self._snapshots]
        self._launch()

    def _launch(self) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not the controller's own: whoever cleans up after it may end what holds its log files open (Ray's guard).
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.wait(timeout=START_TIMEOUT_S)  # it goes on as a process of its own
            watches = _answers(process, START_TIMEOUT_S) and os.read(process.stdout.fileno(), len(READY)) == READY
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            watches = False
        if not watches:
            _close_pipes(process)
            raise SandboxUnavailable(f"the sandboxes' watchdog does not start; try `{' '.join(self._command[:4])}`")
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        for name, image in self._unanswered.items():
            self._say(f"+{name} {image}\n")

    def asked(self, name: str, image: str = IMAGE) -> None:
        """The engine is now asked for a container of this name and image, or for an image of this name."""
        self._unanswered[name] = image
        self._say(f"+{name} {image}\n")

    def answered(self, name: str) -> None:
        """It is there and carries its owner's label, or it never will be."""
        if self._unanswered.pop(name, None) is not None:
            self._say(f"-{name}\n")

    @property
    def unanswered(self) -> frozenset[str]:
        """What the engine may still come up with."""
        return frozenset(self._unanswered)

    def _say(self, line: str) -> None:
        if self._stopped:
            return
        process = self._process
        if process is not None and process.stdin is not None:
            try:
                os.write(process.stdin.fileno(), line.encode())
                return
            except (BrokenPipeError, BlockingIOError):
                _log.warning("the sandboxes' watchdog was ended or does not answer; another takes its place")
                _close_pipes(process)
                self._process = None
        self._launch()

    def stop(self) -> None:
        """There is nothing left but what was not answered: it still looks for that, then ends by itself."""
        process, self._process, self._stopped = self._process, None, True
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(process.stdin.fileno(), b"q\n")
        if not self._unanswered:
            _answers(process, END_TIMEOUT_S)  # with an end of file
        _close_pipes(process)


def _answers(process: subprocess.Popen[bytes], within_s: float) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], within_s)[0])


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
