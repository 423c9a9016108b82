"""Sandboxes, agents and controllers are killed at random; nothing is left.

ROLL_FLASH_SOAK_LEASES=500 for the long form; benchmarks/results/sandbox_soak.md has its result.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from soak import soak

LEASES = int(os.environ.get("ROLL_FLASH_SOAK_LEASES", "24"))


@pytest.mark.docker
def test_leases_with_random_kills_of_sandboxes_agents_and_controllers_leave_nothing(docker: str) -> None:
    report = asyncio.run(soak(LEASES, sockets=LEASES >= 500))
    assert report.leases >= LEASES
    assert report.controllers_killed >= 2
    assert set(report.outcomes) <= {"fine", "killed", "agent", "closed"}, report
    assert report.outcomes["fine"] > report.leases // 4
    assert report.ok, report
    print(report)
