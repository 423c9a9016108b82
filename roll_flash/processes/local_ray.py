"""Ray for one run: joins a cluster, or starts one on this machine that ends with the run.

One that is started here answers its run only: its token is made for it and is in no file, and what it writes, its
sockets included, lies in a folder that nobody else may enter.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from roll_flash.config.tree import RayConfig
from roll_flash.errors import RunError
from roll_flash.processes.background import in_thread
from roll_flash.processes.keys import new_key
from roll_flash.processes.ray_guard import RayGuard
from roll_flash.sandboxes.scratch import make_short_folder

OBJECT_STORE_BYTES = 256 << 20
"""Trajectories are small, and weights do not travel through Ray."""
ATTEMPTS = 3
NO_PORT = "-1"
QUIET: dict[str, Any] = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}

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
    # In a thread: it takes seconds, in which Ctrl-C must be answered.
    given_up = threading.Event()
    async with in_thread(_cluster(config, given_up), give_up=given_up.set):
        _take_sigterm_back()
        yield


def _take_sigterm_back() -> None:
    """Ray's core puts a handler over the one that is there, which prints a stack before it calls that one."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


@contextmanager
def _cluster(config: RayConfig, given_up: threading.Event) -> Iterator[None]:
    if config.address is not None:
        with _initialised({"address": config.address}, config, given_up):
            yield
        return
    with _token_of_our_own():
        folder = make_short_folder("ray")
        guard = RayGuard(folder)
        try:
            with _initialised(_options_of_our_own(folder, config), config, given_up):
                yield
        finally:
            guard.stop()


@contextmanager
def _initialised(options: dict[str, Any], config: RayConfig, given_up: threading.Event) -> Iterator[None]:
    import ray
    from ray._private import worker

    # That it leaves SIGTERM alone, as it was started in a thread, is what we want.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    try:
        _init(options, config, given_up)
        # A raylet that dies would otherwise print its whole log, also with log_to_driver off.
        worker.print_to_stdstream = _log_what_ray_prints
        yield
    finally:
        ray.shutdown()


def _log_what_ray_prints(data: Mapping[str, Any], *_: object, **__: object) -> None:
    _log.info("ray: %s", "; ".join(data["lines"])[:2000])


def _options_of_our_own(folder: Path, config: RayConfig) -> dict[str, Any]:
    # A new cluster asks for a token by Ray's own default; that it says so is no news to whoever trains.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # Ray's autoscaler tells its metrics to everybody, on every address. There is nothing to scale here.
    os.environ.setdefault("AUTOSCALER_METRIC_PORT", NO_PORT)
    return {
        "_temp_dir": str(folder / "ray"),  # which Ray opens for everybody
        "address": "local",  # else Ray would join a cluster of somebody else's that runs on this machine
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "num_cpus": config.num_cpus,
    }


@contextmanager
def _token_of_our_own() -> Iterator[None]:
    """Ray asks for a token in a new cluster unless its mode is set, by default for one that lies in the home folder.

    The processes that Ray starts get it from their environment.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    before = {name: os.environ.pop(name, None) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    os.environ["RAY_AUTH_TOKEN"] = new_key()
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        AuthenticationTokenLoader.instance().reset_cache()


def _init(options: dict[str, Any], config: RayConfig, given_up: threading.Event) -> None:
    """`ray.init`, tried again when this machine was too busy: Ray gives its own processes 30 seconds to come up. Not
    once somebody has `given_up` waiting for it."""
    import ray

    for attempt in range(ATTEMPTS):
        try:
            ray.init(**QUIET, **options)
            return
        except Exception as error:  # Ray raises bare Exceptions here too
            ray.shutdown()
            may_try_again = config.address is None and attempt + 1 < ATTEMPTS and not given_up.is_set()
            if may_try_again and "timed out" in str(error):
                continue
            where = f"the Ray cluster at {config.address}" if config.address else "Ray on this machine"
            raise RunError(f"{where} is not available: {' '.join(str(error).split())} (ray.address)") from None
    raise AssertionError("the loop returns or raises")
