"""Ray for one run: joins a cluster, or starts one on this machine that ends with the run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from roll_flash.background import in_threads
from roll_flash.config import RayConfig
from roll_flash.errors import RunError
from roll_flash.ray_guard import RayGuard

OBJECT_STORE_BYTES = 256 << 20
"""Trajectories are small, and weights do not travel through Ray."""
ATTEMPTS = 3

_log = logging.getLogger(__name__)


@asynccontextmanager
async def local_ray(config: RayConfig) -> AsyncIterator[None]:
    """Initialise Ray, and shut it down. Raises RunError when it does not start or the cluster cannot be reached."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the learner must not yield to the servers
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}
    if config.address is None:
        # A new cluster asks for a token by Ray's own default; that it says so is no news to whoever trains.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        options |= {
            "address": "local",  # else Ray would join a cluster of somebody else's that runs on this machine
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": config.num_cpus,
        }
    else:
        options["address"] = config.address
    # In a thread: it takes seconds, in which Ctrl-C must be answered.
    async with in_threads(_initialised(options, config)):
        _take_sigterm_back()
        yield


def _take_sigterm_back() -> None:
    """Ray's core puts a handler over the one that is there, which prints a stack before it calls that one."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


@contextmanager
def _initialised(options: dict[str, Any], config: RayConfig) -> Iterator[None]:
    import ray
    from ray._private import worker

    # That it leaves SIGTERM alone, as it was started in a thread, is what we want.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    context = _init(options, config)
    # A raylet that dies would otherwise print its whole log, also with log_to_driver off.
    worker.print_to_stdstream = _log_what_ray_prints
    guard = RayGuard(Path(context.address_info["session_dir"])) if config.address is None else None
    try:
        yield
    finally:
        ray.shutdown()
        if guard is not None:
            guard.stop()


def _log_what_ray_prints(data: Mapping[str, Any], *_: object, **__: object) -> None:
    _log.info("ray: %s", "; ".join(data["lines"])[:2000])


def _init(options: dict[str, Any], config: RayConfig) -> Any:
    """`ray.init`, tried again when this machine was too busy: Ray gives its own processes 30 seconds to come up."""
    import ray

    for attempt in range(ATTEMPTS):
        try:
            return ray.init(**options)
        except Exception as error:  # Ray raises bare Exceptions here too
            ray.shutdown()
            if config.address is None and "timed out" in str(error) and attempt + 1 < ATTEMPTS:
                continue
            where = f"the Ray cluster at {config.address}" if config.address else "Ray on this machine"
            raise RunError(f"{where} is not available: {' '.join(str(error).split())} (ray.address)") from None
    raise AssertionError("the loop returns or raises")
