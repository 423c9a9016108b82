"""Ports of this machine: free ones for servers, below those that the kernel gives to connections."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from roll_flash.errors import InferenceError

MIN_PORT, MAX_PORT_TRIES = 20_000, 100
"""Ray's processes listen below."""
CONNECT_S = 1.0


def server_ports() -> range:
    """Return the ports from which servers without `inference.port` get theirs; empty if the kernel gives them all to
    connections, so that a server gets one of those."""
    return range(MIN_PORT, connection_ports().start)


def connection_ports() -> range:
    """Return the ports that the kernel gives to connections, and to whoever asks for any port."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(first, last + 1)


def free_port(host: str) -> int:
    """Below those that the kernel gives to connections: a server is away from its port until it has loaded its model,
    and while it is started again."""
    choice, ports = random.SystemRandom(), server_ports()
    for _ in range(MAX_PORT_TRIES if ports else 0):
        port = choice.choice(ports)
        with contextlib.suppress(InferenceError):
            require_free_port(host, port, "")
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int, advice: str) -> None:
    """Raises InferenceError, which ends with `advice`, if the port cannot be used."""
    _bind(host, port, socket.SO_REUSEADDR, advice).close()


def keep_port(host: str, port: int, advice: str) -> socket.socket:
    """Keep a port until the socket is closed: meanwhile only this user's processes can listen there, with SO_REUSEPORT.
    A server names its port in its command line long before it listens, and all users can read that.

    Raises InferenceError, which ends with `advice`, if the port cannot be used.
    """
    require_free_port(host, port, advice)  # also of this user, who may share what is kept
    return _bind(host, port, socket.SO_REUSEPORT, advice)


def require_silent_port(host: str, port: int, advice: str) -> None:
    """Raises InferenceError, which ends with `advice`, if a process listens at a port that `keep_port` has."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except ConnectionRefusedError:
        return
    except OSError:  # its queue is full
        pass
    raise InferenceError(f"port {port} on {host} cannot be used: a process still listens there; {advice}")


def _bind(host: str, port: int, option: int, advice: str) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
            bound.bind(address)
            stack.pop_all()
            return bound
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InferenceError(f"port {port} on {host} cannot be used: {reason}; {advice}") from None
