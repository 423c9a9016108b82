"""Where the ranks of a learner meet, only their own user's processes can come."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import psutil
import torch.distributed as dist

from roll_flash.learner.ranks.rendezvous import join_rendezvous, open_rendezvous

TIMEOUT = timedelta(seconds=60)
OTHER_RANK = """
import sys
from datetime import timedelta
from roll_flash.learner.ranks.rendezvous import join_rendezvous
store = join_rendezvous(sys.argv[1], 2, timedelta(seconds=60))
store.set("weights", "ready")
assert store.get("first") == b"here"
"""


def _listening() -> set[int]:
    entries = psutil.Process(os.getpid()).net_connections("inet")
    return {entry.laddr.port for entry in entries if entry.status == psutil.CONN_LISTEN}


def test_ranks_on_one_machine_meet_without_a_port_and_in_a_file_that_their_user_alone_can_open() -> None:
    before = _listening()
    store, address = open_rendezvous(2, None, TIMEOUT)
    store.set("first", "here")
    subprocess.run([sys.executable, "-c", OTHER_RANK, address], check=True, timeout=120)
    assert store.get("weights") == b"ready"
    assert _listening() == before
    folder = os.path.dirname(address)
    assert os.stat(folder).st_mode & 0o777 == 0o500
    assert os.stat(folder).st_uid == os.geteuid()


def test_nothing_of_the_meeting_is_left_when_the_first_rank_is_killed() -> None:
    program = (
        "import os, signal; from datetime import timedelta\n"
        "from roll_flash.learner.ranks.rendezvous import open_rendezvous\n"
        "kept = open_rendezvous(2, None, timedelta(seconds=60)); print(kept[1], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert said.stdout.startswith("/proc/")
    assert not os.path.exists(said.stdout.strip())


def test_ranks_on_several_machines_meet_at_the_address_of_the_first_and_at_no_other() -> None:
    store, address = open_rendezvous(2, "127.0.0.1", TIMEOUT)
    assert address.startswith("tcp://127.0.0.1:")
    port = int(address.rpartition(":")[2])
    entries = psutil.Process(os.getpid()).net_connections("inet")
    hosts = [entry.laddr.ip for entry in entries if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port]
    assert hosts == ["127.0.0.1"]
    other = join_rendezvous(address, 2, TIMEOUT)
    assert isinstance(other, dist.TCPStore)
    other.set("weights", "ready")
    assert store.get("weights") == b"ready"
