"""The controller's side of its watchdog: starts it, reports requests to the engine, replaces it if it ends.

The watchdog is no child of the controller and holds none of its files, so it survives the end of the controller.
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
from roll_flash.sandboxes.owner import LABEL_OWNER, Owner

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
IMAGE = "-"
"""Value of `image` in `Guard.request_sent` if the request creates an image, not a container."""

_log = logging.getLogger("roll_flash.sandboxes")


class Guard:
    """Client of the watchdog. Call `start` first, `request_sent` before each request that creates an object in the
    engine, and `request_done` after it."""

    def __init__(self, snapshots: str, folders: str) -> None:
        """`snapshots`: repository of the images to remove; `folders`: glob pattern of the folders to remove."""
        self._snapshots = snapshots
        self._folders = folders
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[str, str] = {}
        self._stopped = False

    def start(self, host: str, version: str, certificates: str) -> None:
        """Start the watchdog and wait until it is ready. Raises SandboxUnavailable."""
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
            # Not inherited: a clean-up of the controller (by Ray) may kill processes that hold its log files open.
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.wait(timeout=START_TIMEOUT_S)  # the watchdog forks and continues in the child
            watches = _is_readable(process, START_TIMEOUT_S) and os.read(process.stdout.fileno(), len(READY)) == READY
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            watches = False
        if not watches:
            _close_pipes(process)
            raise SandboxUnavailable(f"the sandboxes' watchdog does not start; try `{' '.join(self._command[:4])}`")
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        for name, image in self._pending.items():
            self._send(f"+{name} {image}\n")

    def request_sent(self, name: str, image: str = IMAGE) -> None:
        """Record a request to the engine for a container with this name and image, or for an image with this name."""
        self._pending[name] = image
        self._send(f"+{name} {image}\n")

    def request_done(self, name: str) -> None:
        """Record the answer: the object exists and carries its owner's label, or will never exist."""
        if self._pending.pop(name, None) is not None:
            self._send(f"-{name}\n")

    @property
    def pending(self) -> frozenset[str]:
        """Names of objects that the engine may still create."""
        return frozenset(self._pending)

    def _send(self, line: str) -> None:
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
        """Tell the watchdog that only pending requests are left; it searches for those, then ends by itself."""
        process, self._process, self._stopped = self._process, None, True
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(process.stdin.fileno(), b"q\n")
        if not self._pending:
            _is_readable(process, END_TIMEOUT_S)  # readable at end-of-file
        _close_pipes(process)


def _is_readable(process: subprocess.Popen[bytes], within_s: float) -> bool:
    assert process.stdout is not None
    waiting = select.poll()  # not select(), which takes no descriptor above 1,023
    waiting.register(process.stdout, select.POLLIN)
    return bool(waiting.poll(within_s * 1000))


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
