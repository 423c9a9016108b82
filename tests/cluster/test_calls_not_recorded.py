from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray]

CALLS = """
import asyncio, time
import ray
from roll_flash.config.tree import RayConfig
from roll_flash.processes.ray.local_ray import local_ray

async def call():
    async with local_ray(RayConfig(num_cpus=2)):
        actor = ray.remote(num_cpus=0)(type("Counted", (), {"answer": lambda self: 1})).remote()
        for _ in range(20):
            await actor.answer.remote()
        await asyncio.sleep(2.5)  # Ray reports calls once a second
        print("recorded", len(ray.timeline()))

asyncio.run(call())
"""


def recorded_calls(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("recorded ")[2])


def test_ray_keeps_no_record_of_each_call() -> None:
    """Its control process grew by 120 MB per 1,000 steps."""
    assert recorded_calls() == 0
    assert recorded_calls(RAY_task_events_report_interval_ms="500") >= 20, "this test could not fail"
