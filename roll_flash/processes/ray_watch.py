"""Detect within seconds that Ray has died: the raylet of this node, or the cluster's control store (GCS).

Ray's own driver notices only after up to a minute and then exits with Ray's message. Calls between existing processes
still work for some seconds, so that a checkpoint can be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roll_flash.errors import RollFlashError, RunError
from roll_flash.processes.background import background_task

EVERY_S = 1.0
CONNECT_TIMEOUT_S = 10.0


class RayDiedError(RunError):
    """An essential Ray process died."""


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A Ray process that listens on a port as long as it lives."""

    name: str
    host: str
    port: int

    async def check(self) -> None:
        """Raise RayDiedError if the port is closed. A busy machine gets CONNECT_TIMEOUT_S to answer."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self.host, self.port)
            writer.transport.abort()
        except ConnectionRefusedError:
            raise RayDiedError(
                f"{self.name} is gone (nobody listens at {self.host}:{self.port}): it was killed, or the machine ran "
                "out of memory"
            ) from None
        except (TimeoutError, OSError) as error:
            raise RayDiedError(
                f"{self.name} cannot be reached at {self.host}:{self.port}: {type(error).__name__} {error}"
            ) from None


def ray_processes() -> list[RayProcess]:
    """Ray processes that this driver needs. Ray must be initialised."""
    import ray

    context = ray.get_runtime_context()
    node = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    return [
        RayProcess("Ray's raylet on this node", node["NodeManagerAddress"], int(node["NodeManagerPort"])),
        RayProcess("Ray's control store (GCS)", host, int(port)),
    ]


@asynccontextmanager
async def watching_ray() -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """While the block runs, the death of Ray ends the run (`start_background`). If the block fails because of it, the
    block raises RayDiedError instead. Yields a function that returns true if Ray is alive."""
    processes = await asyncio.to_thread(ray_processes)

    async def is_alive() -> bool:
        try:
            await _check(processes)
        except RayDiedError:
            return False
        return True

    try:
        async with background_task(_watch(processes), "the watch over Ray"):
            yield is_alive
    except RayDiedError:
        raise
    except RollFlashError:
        await _check(processes)
        raise


async def _check(processes: list[RayProcess]) -> None:
    for process in processes:
        await process.check()


async def _watch(processes: list[RayProcess]) -> None:
    while True:
        await _check(processes)
        await asyncio.sleep(EVERY_S)
