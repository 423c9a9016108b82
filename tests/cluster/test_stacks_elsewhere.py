"""Stacks of processes on other nodes; here the node is this one, which Ray reaches in the same way."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import ray

from roll_flash.watchdog import stacks_elsewhere as module
from roll_flash.watchdog.stacks import register_stacks
from roll_flash.watchdog.stacks_elsewhere import _stacks_on, stacks_elsewhere


@pytest.mark.ray
def test_a_node_describes_the_processes_of_the_run_and_a_lost_one_says_nothing(
    ray_local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part:  # in a function, so that it is sent as a whole: workers cannot import this file
        def register(self) -> int:
            register_stacks("run-of-tests", "rank 7")
            return os.getpid()

    part: Any = ray.remote(Part).remote()
    pid = ray.get(part.register.remote())
    node = ray.nodes()[0]
    lost = {**node, "NodeID": "ab" * 28, "NodeName": "lost"}
    [elsewhere] = asyncio.run(_stacks_on([lost], "run-of-tests"))
    monkeypatch.setattr(module, "ANSWER_S", 60.0)  # on a busy machine a process of Ray's takes seconds to start
    [here] = asyncio.run(_stacks_on([node], "run-of-tests"))
    assert f"== rank 7: process {pid}" in here
    assert elsewhere.startswith("==== node lost")
    assert "no answer" in elsewhere
    assert asyncio.run(stacks_elsewhere("run-of-tests")) == "", "there is no other node"
