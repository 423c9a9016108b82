"""Waiting for code of the user when a run starts: it is said what for, and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from roll_flash.errors import ConfigError
from roll_flash.processes.background import DaemonThreads
from roll_flash.terminal import say

T = TypeVar("T")

FIRST_SAID_S = 2.0
SAID_EVERY_S = 30.0


def call_in_time(call: Callable[[], T], what: str, limit_s: float, rows: Callable[[], int] = lambda: 0) -> T:
    """Return the result of `call`, which runs in a thread, because code of the user may never return.

    `what` it waits for is said after 2 s and then more and more rarely, with the `rows` that came so far. Raises
    ConfigError if no row has come for `limit_s` seconds, and what the call raises.
    """
    work = DaemonThreads().submit(call)
    came, since, pause_s = rows(), time.monotonic(), min(FIRST_SAID_S, limit_s)
    while not _is_done(work, pause_s):
        so_far = f" after {rows():,} rows" if rows() else ""
        if rows() != came:
            came, since = rows(), time.monotonic()
        elif time.monotonic() - since >= limit_s:
            raise ConfigError(f"{what}: nothing came for {limit_s:g} s{so_far}; does it wait for something?")
        say(f"waiting for {what}{so_far} (at most {limit_s:g} s)", error=True)
        pause_s = min(2 * pause_s, SAID_EVERY_S, limit_s)
    result: T = work.result()
    return result


def _is_done(work: Future[T], seconds: float) -> bool:
    return bool(wait([work], seconds).done)
