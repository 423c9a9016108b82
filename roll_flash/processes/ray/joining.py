"""Before a driver joins a Ray cluster: find what would fail, and say it in one line within `CHECK_LIMIT_S`.

Ray itself tries for up to a minute, and then prints its own text or ends the process. Each check has a time limit that
holds when what it calls hangs: names and connections in a thread, Ray in a process (`cluster_probe.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from roll_flash.config.addresses import AUTO, split_address
from roll_flash.errors import RunError
from roll_flash.processes.background import DaemonThreads
from roll_flash.processes.ray.cluster_probe import ANSWER_S, other_ports

T = TypeVar("T")

CHECK_LIMIT_S = 20.0
"""Time of all checks. Importing Ray does not count."""
CONNECT_LIMIT_S = 5.0
"""Time to find the address of a name and to connect."""
INIT_LIMIT_S = 60.0
"""Time of `ray.init` when all parts of Ray have just answered; a busy machine may need more than the checks have."""


def join_cluster(address: str, init: Callable[[], object]) -> None:
    """Call `init` (`ray.init` with this `ray.address`) if the driver can join the cluster.

    Raises RunError if it cannot.
    """
    ends = time.monotonic() + CHECK_LIMIT_S
    where = _host_and_port(address)
    cannot = f"cannot join the Ray cluster at {where} (ray.address{'' if address == where else f': {address}'})"
    _connect(where, cannot)
    _ask(address, where, cannot, ends - time.monotonic())
    try:
        _within(init, INIT_LIMIT_S)
    except TimeoutError:
        raise RunError(
            f"{cannot}: Ray on this machine did not let the driver in within {INIT_LIMIT_S:g} s; it hangs, or the "
            "machine is too busy. If this happens again, run `ray stop` and `ray start` here"
        ) from None
    except Exception as error:  # Ray raises bare Exceptions here too
        raise RunError(f"{cannot}: {' '.join(str(error).split())}") from None


def _host_and_port(address: str) -> str:
    """Return what `address` stands for, in Ray's own way: RAY_ADDRESS, else the Ray of this machine."""
    from ray._private import services

    found, source = address, "ray.address"
    if address == AUTO and os.environ.get("RAY_ADDRESS"):
        found, source = os.environ["RAY_ADDRESS"], "RAY_ADDRESS"
    local_clusters: Any = services.find_gcs_addresses  # an attribute of this function forgets what it found earlier
    local_clusters.cache_clear()
    try:
        if found != AUTO:
            split_address(found)
        where: str | None = services.canonicalize_bootstrap_address(found)
    except ConnectionError:
        raise RunError(
            "no Ray runs on this machine, so there is no cluster to join (ray.address: auto): run "
            "`ray start --address=HEAD:6379` here, or `ray start --head` for a new cluster; without ray.address the "
            "run starts a Ray of its own"
        ) from None
    except ValueError as error:
        raise RunError(f"{source}: {error}") from None
    assert where is not None, "Ray starts a cluster of its own only without an address"
    return where


def _connect(where: str, cannot: str) -> None:
    """Open a TCP connection and close it."""
    host, port = split_address(where)
    ends = time.monotonic() + CONNECT_LIMIT_S
    silent = f"no answer within {CONNECT_LIMIT_S:g} s"
    try:
        found = _within(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), CONNECT_LIMIT_S)
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
        why = silent if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"{cannot}: the name {host} does not resolve ({why}); check its spelling and /etc/hosts, or give the IP "
            "address that `ray start --head` printed"
        ) from None
    left_s = max(1.0, ends - time.monotonic())
    try:
        _within(lambda: socket.create_connection((host, port), timeout=left_s).close(), left_s)
    except ConnectionRefusedError:
        raise RunError(f"{cannot}: nothing listens there; {_where_to_look(host, str(found[0][4][0]))}") from None
    except OSError as error:
        why = silent if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise RunError(
            f"{cannot}: {host} cannot be reached ({why}); the machine is off, the address is wrong, or a firewall "
            "drops the packets: nodes of a cluster need open ports between each other"
        ) from None


def _where_to_look(host: str, numeric: str) -> str:
    if numeric.startswith("127.") or numeric == "::1":
        return (
            f"here {host} means this machine itself ({numeric}). If the head node is another machine, correct "
            "/etc/hosts or give the IP address that `ray start --head` printed"
        )
    return (
        "start the head node with `ray start --head --port=6379`, or give the address that it printed; if that is "
        f"127.0.0.1, start it with --node-ip-address={numeric}, since other machines cannot reach 127.0.0.1"
    )


def _ask(address: str, where: str, cannot: str, limit_s: float) -> None:
    """Ask the cluster, in a process of its own. Raises RunError with its answer."""
    command = [sys.executable, "-m", "roll_flash.processes.ray.cluster_probe", address, where]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{cannot}: the check took longer than {limit_s:.0f} s, of which the cluster has {ANSWER_S:g} s; this "
            "machine is too busy, try again"
        ) from None
    if done.returncode == -signal.SIGALRM:
        raise RunError(f"{cannot}: no answer of a cluster's head within {ANSWER_S:g} s; {other_ports()}")
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"status {done.returncode}")
        raise RunError(f"{cannot}: the check failed: {last}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["problem"]:
        raise RunError(f"{cannot}: {answer['problem']}; {answer['remedy']}")


def _within(call: Callable[[], T], limit_s: float) -> T:
    """Return what `call` returns. Raises TimeoutError if it takes longer; its thread is then abandoned."""
    result: T = DaemonThreads().submit(call).result(limit_s)
    return result
