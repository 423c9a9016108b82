"""Opens the rendezvous of the learner's ranks: a torch.distributed store, which has no authentication.

On one machine it is an in-memory file without a name in any file system, as for staged weights
(`learner/weights/staged.py`): only processes of the same user can open it, and the kernel frees it when the first rank
ends, even after a crash. Ranks on several machines use a port of the first one.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from roll_flash.errors import LearnerError

_PORT = "tcp://"


def open_rendezvous(ranks: int, host: str | None, timeout: timedelta) -> tuple[dist.Store, str]:
    """Open the store in the first rank; return it and the address for the other ranks. `host` is None if all ranks are
    on this machine. The store closes when this process ends."""
    if ranks == 1:
        return dist.HashStore(), ""
    if host is None:
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('roll-flash-learner')}"
        return _file_store(path, ranks, timeout), path
    # Bind the socket here, because TCPStore would listen on every address of the machine.
    listening = socket.create_server((host, 0), backlog=64)
    store = dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )
    return store, f"{_PORT}{host}:{store.port}"


def join_rendezvous(address: str, ranks: int, timeout: timedelta) -> dist.Store:
    """Join the store that `open_rendezvous` opened in another process."""
    if is_on_one_machine(address):
        return _file_store(address, ranks, timeout)
    host, _, port = address.removeprefix(_PORT).rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def is_on_one_machine(address: str) -> bool:
    return not address.startswith(_PORT)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address: torch would choose one by the host's name, which is
    loopback on many machines. Raises LearnerError if there is none."""
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    raise LearnerError(f"no network interface of {socket.gethostname()} has the address {address} of its Ray node")


def _file_store(path: str, ranks: int, timeout: timedelta) -> dist.Store:
    store = dist.FileStore(path, ranks)
    store.set_timeout(timeout)
    return store
