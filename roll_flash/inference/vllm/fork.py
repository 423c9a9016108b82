"""Fork the engine of a vLLM server on CPU from its API process.

vLLM's API process imports everything that the engine needs. On CPU vLLM then starts a new interpreter for the engine,
which imports all of it again, because a forked process does not have OpenMP's threads. With one thread per server (the
default of `inference.threads`) there are none, and a fork is ready at once.
"""

from __future__ import annotations

import logging
import os
import signal
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

from roll_flash.inference.vllm.patches import install
from roll_flash.processes.supervise import end_with_guard
from roll_flash.watchdog.stacks import register_stacks

_log = logging.getLogger(__name__)
_FIRST_INHERITED = 3
_OF_EVENT_LOOPS = ("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")


class Forked(ForkProcess):
    def run(self) -> None:
        _leave_parent()
        super().run()


class Forks(ForkContext):
    Process = Forked


def patch_engine_start() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if not current_platform.is_cpu() or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    if not hasattr(utils, "get_mp_context"):
        _log.warning("this vLLM starts its engine in another way: a server on a CPU starts some seconds later")
        return
    install(utils, "get_mp_context", lambda: Forks())


def _leave_parent() -> None:
    """Give up what a forked process has of its parent's event loops, and start its own threads."""
    signal.set_wakeup_fd(-1)  # else signals are written to the parent's loop, or what gets that number next
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor >= _FIRST_INHERITED and _is_of_event_loop(entry):
            os.close(descriptor)
    end_with_guard()
    register_stacks(anew=True)


def _is_of_event_loop(entry: Path) -> bool:
    try:
        return os.readlink(entry).startswith(_OF_EVENT_LOOPS)
    except OSError:  # that of the listing itself
        return False
