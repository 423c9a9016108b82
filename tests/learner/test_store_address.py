"""Where the ranks of a learner meet, only the machine's own processes can come."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from roll_flash.config import LearnerConfig
from roll_flash.learner.rank import LearnerRank


def test_the_store_of_a_learner_on_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    rank = LearnerRank(tmp_path, LearnerConfig(ranks=2), rank=0, seed=0, temperature=1.0, run="r")
    port = rank.open_store("127.0.0.1")
    entries = psutil.Process(os.getpid()).net_connections("inet")
    listening = [entry.laddr.ip for entry in entries if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port]
    assert listening == ["127.0.0.1"]
    other = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    other.set("weights", "ready")
    assert other.get("weights") == b"ready"
