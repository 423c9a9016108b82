"""Detect within seconds that Ray has died: the raylet of this node, or the cluster's control store (GCS); and later
that one of them no longer answers, because it is stopped or hangs: the kernel still accepts connections then.

Ray's own driver notices only after up to a minute and then exits with Ray's message. Calls between existing processes
still work for some seconds, so that a checkpoint can be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from roll_flash.errors import RollFlashError, RunError
from roll_flash.processes.background import background_task

EVERY_S = 1.0
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0
"""Longer than a busy machine, or somebody who stops a process for a moment, keeps it from answering."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""First words of a gRPC client: the magic of HTTP/2 and empty settings (RFC 9113, 3.4). A server answers with its own
settings, or closes the connection if it wants TLS."""

Waiting = Callable[[str], AbstractContextManager[object]]


class RayDiedError(RunError):
    """An essential Ray process died."""


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A Ray process that listens on a port as long as it lives."""

    name: str
    host: str
    port: int

    async def check(self, answer_within_s: float) -> None:
        """Raise RayDiedError if the port is closed, or nobody answers there within `answer_within_s`. A busy machine
        gets CONNECT_TIMEOUT_S to accept the connection."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self.host, self.port)
            await self._await_answer(reader, writer, answer_within_s)
        except ConnectionRefusedError:
            raise RayDiedError(
                f"{self.name} is gone (nobody listens at {self.host}:{self.port}): it was killed, or the machine ran "
                "out of memory"
            ) from None
        except (TimeoutError, OSError) as error:
            raise RayDiedError(
                f"{self.name} cannot be reached at {self.host}:{self.port}: {type(error).__name__} {error}"
            ) from None

    async def _await_answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, within_s: float) -> None:
        try:
            writer.write(HTTP2_PREFACE)
            async with asyncio.timeout(within_s):
                await reader.read(1)
        except ConnectionResetError:  # also an answer; a process that is gone refuses the next connection
            pass
        except TimeoutError:
            raise RayDiedError(
                f"{self.name} accepts connections at {self.host}:{self.port}, but has not answered for "
                f"{within_s:g} s: it is stopped or hangs"
            ) from None
        finally:
            writer.transport.abort()


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
async def watching_ray(waiting: Waiting = nullcontext) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """While the block runs, the death of Ray ends the run (`start_background`). If the block fails because of it, the
    block raises RayDiedError instead. Yields a function that returns true if Ray is alive.

    `waiting` is entered with the name of a process while that is asked."""
    processes = await asyncio.to_thread(ray_processes)

    async def is_alive() -> bool:
        try:
            await _check(processes)
        except RayDiedError:
            return False
        return True

    try:
        async with background_task(_watch(processes, waiting), "the watch over Ray"):
            yield is_alive
    except RayDiedError:
        raise
    except RollFlashError:
        await _check(processes)
        raise


async def _check(processes: list[RayProcess]) -> None:
    for process in processes:
        await process.check(CONNECT_TIMEOUT_S)


async def _watch(processes: list[RayProcess], waiting: Waiting) -> None:
    while True:
        for process in processes:
            with waiting(process.name):
                await process.check(ANSWER_TIMEOUT_S)
        await asyncio.sleep(EVERY_S)
