"""Starts a run again when it ends by itself, until it is done or a person has to decide.

A run that ends with an error has saved what it can, and one that was killed has its journal: `--resume` goes on. What
a restart cannot mend (a config that is refused at the first start, Ctrl-C, an error that comes again before another
step) is left to a person. A later start that is refused has found the machine in another state, such as a Docker engine
or a store of checkpoints that does not answer: it is tried for half an hour.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Self

from roll_flash.processes.supervise import end_with_parent
from roll_flash.terminal import say

DONE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
PAUSE_AFTER_PROGRESS_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 5.0, 300.0
MAX_WITHOUT_PROGRESS = 4
"""Starts in a row without a new step, after which the run is given up."""
MAX_REFUSED = 12
"""The same for starts that were refused before they began: with the pauses between them half an hour."""
POLL_S = 0.25
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def keep_alive(
    command: Callable[[], Sequence[str]],
    progress: Callable[[], int],
    *,
    first_pause_s: float = FIRST_PAUSE_S,
) -> int:
    """Run `command()` again and again and return the last exit code. `progress`: number of the newest step.

    It starts again soon after an end with a new step; without one it waits `first_pause_s`, and twice as long each
    further time, up to LONGEST_PAUSE_S. A run that was told to stop is not started again, however it ended.
    """
    without_progress = refused = 0
    ends = {DONE, USAGE_ERROR, INTERRUPTED}
    with _Stops() as stops:
        while True:
            before = progress()
            code = stops.run(command())
            if code in ends:
                return code
            ends.discard(USAGE_ERROR)
            if stops.came:
                return INTERRUPTED
            refused = refused + 1 if code == USAGE_ERROR else 0
            if progress() > before:
                without_progress = 0
            elif not refused:
                without_progress += 1
            what = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            if without_progress == MAX_WITHOUT_PROGRESS or refused == MAX_REFUSED:
                times = refused or without_progress
                say(f"the run {what}, {times} times without a new step: it is not started again", error=True)
                return 1 if code < 0 else code
            if tries := refused or without_progress:
                pause_s = min(first_pause_s * 2 ** (tries - 1), LONGEST_PAUSE_S)
            else:
                pause_s = min(PAUSE_AFTER_PROGRESS_S, first_pause_s)
            say(f"the run {what} after step {progress()}; starting it again in {pause_s:g} s", error=True)
            if stops.come_within(pause_s):
                return INTERRUPTED


class _Stops:
    """Hands signals that mean "stop" on to the run, and remembers that one came."""

    def __init__(self) -> None:
        self.came: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Under nohup SIGHUP stays ignored, also by the run, which inherits that.
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
        numbers = [number for number in STOPS if number not in ignored]
        self._before = {number: signal.signal(number, self._hand_on) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hand_on(self, number: int, _: FrameType | None) -> None:
        self.came = number
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, command: Sequence[str]) -> int:
        # In a session of its own: Ctrl-C in a terminal reaches only this process, which hands it on.
        try:
            process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
        except OSError as error:  # such as no memory: the run may have been killed for that
            say(f"the run could not be started: {error.strerror or error}", error=True)
            return FAILED
        self._process = process
        if self.came is not None:  # while it was started
            process.send_signal(self.came)
        code = process.wait()
        self._process = None
        return code

    def come_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.came is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
        return self.came is not None


def own_command(words: Sequence[str]) -> list[str]:
    """Return the command of this program with other words."""
    return [sys.executable, "-m", "roll_flash", *words]
