"""Where the ranks of a learner meet: a store of torch.distributed, which asks nobody for a key.

On one machine it is a file in memory without a name in any file system, as weights on their way are (`weights.py`):
processes of the same user alone can open it, and the kernel frees it with the first rank, however that ends. Ranks on
several machines meet at a port of the first one.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

_PORT = "tcp://"


def open_meeting(ranks: int, host: str | None, timeout: timedelta) -> tuple[dist.Store, str]:
    """The first rank's store, and the address at which the others join it; `host` is None where all are on this
    machine. The process must keep living: its end closes the meeting."""
    if ranks == 1:
        return dist.HashStore(), ""
    if host is None:
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('roll-flash-learner')}"
        return _file_store(path, ranks, timeout), path
    # It would listen on every address of the machine by itself.
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


def join_meeting(address: str, ranks: int, timeout: timedelta) -> dist.Store:
    """The store that `open_meeting` opened in another process."""
    if is_on_one_machine(address):
        return _file_store(address, ranks, timeout)
    host, _, port = address.removeprefix(_PORT).rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def is_on_one_machine(address: str) -> bool:
    return not address.startswith(_PORT)


def _file_store(path: str, ranks: int, timeout: timedelta) -> dist.Store:
    store = dist.FileStore(path, ranks)
    store.set_timeout(timeout)
    return store
