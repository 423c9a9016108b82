"""An actor that gets SIGTERM ends at once; Ray alone leaves one with coroutines that wait without ever answering."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest
import ray

from roll_flash.inference.servers.remote import ServerHost


@pytest.mark.ray
def test_calls_of_the_host_of_a_server_fail_when_it_gets_sigterm(
    ray_local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host(ServerHost):  # in a function, so that it is sent as a whole
        def __init__(self) -> None:
            with contextlib.suppress(AttributeError):  # it gets no folder, and starts no server
                super().__init__(0, *[None] * 5)  # type: ignore[arg-type]

        async def ended(self) -> None:
            await asyncio.Event().wait()

        async def process_id(self) -> int:
            return os.getpid()

    host: Any = ray.remote(Host).options(num_cpus=0, max_concurrency=16).remote()
    ended, pid = host.ended.remote(), ray.get(host.process_id.remote())
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ended, timeout=60)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(host.process_id.remote(), timeout=60)
