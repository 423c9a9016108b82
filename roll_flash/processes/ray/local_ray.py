"""Ray for one run: join a cluster, or start one on this machine that ends with the run.

A local Ray serves only its run: its token is new and in no file, and its files, including sockets, are in a folder that
other users cannot enter.
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
from roll_flash.monitor.limits import usable_cores
from roll_flash.processes.background import in_thread
from roll_flash.processes.gpus import CPU_BUILDS, is_cpu_installation, visible_gpus
from roll_flash.processes.keys import new_key
from roll_flash.processes.nvml import read_driver
from roll_flash.processes.ray.guard import RayGuard
from roll_flash.processes.ray.joining import join_cluster
from roll_flash.sandboxes.scratch import make_short_folder

OBJECT_STORE_BYTES = 256 << 20
"""What does not fit is spilled to disk. Trajectories are small, and weights do not travel through Ray."""
CPUS_PER_CORE = 4
"""CPUs that a run's own Ray declares per core: servers, ranks and workers of a small run share the cores, while Ray
still refuses what would only get in each other's way."""
ATTEMPTS = 3
LOOPBACK = "127.0.0.1"
UNUSED = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's node that start processes for scaling, its dashboard and logs on the terminal. No option leaves them
out; each takes half a second or more of processor time, one is waited for, and one would listen on every address."""
QUIET: dict[str, Any] = {"logging_level": "error", "log_to_driver": False, "configure_logging": False}

_log = logging.getLogger(__name__)


@asynccontextmanager
async def local_ray(config: RayConfig) -> AsyncIterator[None]:
    """Initialise Ray, and shut it down. Raises RunError if it does not start or the cluster cannot be reached."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the learner must not yield to the servers
    # Nobody reads what Ray keeps of each call: 120 MB per 1,000 steps of the tiny model.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    # In a thread: it takes seconds, during which Ctrl-C must be answered.
    cancelled = threading.Event()
    async with in_thread(_cluster(config, cancelled), cancel=cancelled.set):
        _restore_sigterm_handler()
        yield


def _restore_sigterm_handler() -> None:
    """Restore our SIGTERM handler: Ray's core wraps it in one that prints a stack first."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


@contextmanager
def _cluster(config: RayConfig, cancelled: threading.Event) -> Iterator[None]:
    if config.address is not None:
        with _initialised({"address": config.address}, config, cancelled):
            yield
        return
    with _new_token():
        try:
            folder = make_short_folder("ray")
        except OSError as error:
            raise RunError(
                f"there is no folder for Ray's sockets: {error}; set TMPDIR to one with a short path"
            ) from None
        guard = RayGuard(folder)
        try:
            options = _local_options(folder, config)
            with _without_unused_parts(), _on_loopback(), _initialised(options, config, cancelled):
                yield
        finally:
            guard.stop()


@contextmanager
def _initialised(options: dict[str, Any], config: RayConfig, cancelled: threading.Event) -> Iterator[None]:
    import ray
    from ray._private import worker

    # Hide Ray's warning that it does not handle SIGTERM in a thread, which is intended.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    try:
        _init(options, config, cancelled)
        # Otherwise a raylet that dies prints its whole log, even with log_to_driver off.
        worker.print_to_stdstream = _log_what_ray_prints
        yield
    finally:
        ray.shutdown()


def _log_what_ray_prints(data: Mapping[str, Any], *_: object, **__: object) -> None:
    _log.info("ray: %s", "; ".join(data["lines"])[:2000])


def own_resources(config: RayConfig, gpus: Mapping[str, int]) -> dict[str, float]:
    """Return the CPUs and GPUs that the run's own Ray has on this machine."""
    return {"CPU": float(_own_cpus(config)), **({"GPU": float(len(gpus))} if gpus else {})}


def own_gpus(config: RayConfig) -> dict[str, int]:
    """Return the bytes of memory of the GPUs that the run's own Ray gives out, by id.

    None on a cluster, and none with CPU builds of torch and vLLM (`unused_gpus`). Ray by itself would count GPUs, but
    not their MIG slices.
    """
    return {} if config.address is not None or is_cpu_installation() else visible_gpus(read_driver())


def unused_gpus(config: RayConfig) -> str:
    """Return a note if this machine has GPUs that the packages of the run cannot use; else an empty text."""
    is_unable = config.address is None and is_cpu_installation()
    count = len(visible_gpus(read_driver())) if is_unable else 0
    return f"{count} GPU(s) of this machine stay unused: {CPU_BUILDS}" if count else ""


def _own_cpus(config: RayConfig) -> int:
    return config.num_cpus or CPUS_PER_CORE * usable_cores()


def _local_options(folder: Path, config: RayConfig) -> dict[str, Any]:
    # Ray logs that a new cluster requires a token, which is its default and no news for users.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    return {
        "_temp_dir": str(folder / "ray"),  # Ray makes this folder readable for everyone
        "_node_ip_address": LOOPBACK,
        "address": "local",  # else Ray would join another user's cluster on this machine
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "num_cpus": _own_cpus(config),
        "num_gpus": len(own_gpus(config)),
    }


@contextmanager
def _without_unused_parts() -> Iterator[None]:
    """Let Ray start no process of `UNUSED`."""
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in UNUSED}
    for name in UNUSED:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray keep LOOPBACK as the address of this node, with which it listens nowhere else. It would replace it by an
    address for other nodes, and listen on all: the token does not keep anybody from taking all file descriptors of the
    run by silent connections."""
    from ray._private import services

    before = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = before


@contextmanager
def _new_token() -> Iterator[None]:
    """Set a new token: a new cluster requires one unless the mode is set, by default the one in the home folder.

    Processes that Ray starts get it from their environment.
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


def _init(options: dict[str, Any], config: RayConfig, cancelled: threading.Event) -> None:
    """Join the cluster, or start Ray and retry if this machine was too busy (Ray gives its processes 30 seconds to
    start). No retry after `cancelled` is set."""
    import ray

    if config.address is not None:
        join_cluster(config.address, lambda: ray.init(**QUIET, **options))
        return
    for attempt in range(ATTEMPTS):
        try:
            ray.init(**QUIET, **options)
            return
        except Exception as error:  # Ray raises bare Exceptions here too
            ray.shutdown()
            may_try_again = attempt + 1 < ATTEMPTS and not cancelled.is_set()
            if may_try_again and "timed out" in str(error):
                continue
            raise RunError(f"Ray on this machine is not available: {' '.join(str(error).split())}") from None
    raise AssertionError("the loop returns or raises")
