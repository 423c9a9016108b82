"""Another node of a run, seen from the driver: an actor there looks at it and writes files."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_flash.cluster import node_needs, reachability, sent_files
from roll_flash.cluster.environment_files import missing_modules
from roll_flash.cluster.node_needs import NodeFacts
from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Kind
from roll_flash.cluster.sent_files import Compared, Piece, Wanted
from roll_flash.errors import PlacementError, RollFlashError, RunError, first_line
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.sandboxes.images.transfer import FoundImage, find_image, load_image
from roll_flash.sandboxes.scratch import make_scratch_folder

CALL_TIMEOUT_S = 300.0
"""Time in seconds in which a node compares files, takes a piece, or loads an image."""
ARCHIVE = "image.tar"
PROBE = ".roll-flash-probe-"


class NodeSetup:
    """Ray actor that looks at its node and writes files there."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []

    def facts(self) -> NodeFacts:
        return node_needs.node_facts()

    def listen(self, address: str, ports: Sequence[int]) -> tuple[int, ...]:
        """See `reachability.listen`."""
        sockets, found = reachability.listen(address, ports)
        self._listening += sockets
        return found

    def stop_listening(self) -> None:
        for each in self._listening:
            each.close()

    def unreachable(self, targets: Sequence[tuple[str, int]]) -> list[str]:
        return asyncio.run(reachability.unreachable(targets))

    def time_s(self) -> float:
        return time.time()

    def sees(self, file: Path, text: str) -> bool:
        """Return true if this file is here, with this text."""
        try:
            return file.read_text() == text
        except OSError:
            return False

    def missing_modules(self, modules: Sequence[str]) -> list[str]:
        return missing_modules(modules)

    def compare(self, wanted: Wanted) -> Compared:
        return sent_files.compare(wanted)

    def write(self, folder: Path, token: str, piece: Piece, digest: str) -> None:
        sent_files.write_piece(folder, token, piece, digest)

    def put_in_place(self, wanted: Wanted, token: str, names: tuple[str, ...]) -> None:
        sent_files.put_in_place(wanted, token, names)

    def find_image(self, engines: Sequence[str], image: str) -> FoundImage:
        return asyncio.run(find_image(engines, image))

    def room(self, path: Path | None) -> tuple[Path, int]:
        """Return the folder that is or will hold `path` (None: that of temporary files), and the free bytes there."""
        wanted = Path(tempfile.gettempdir()) if path is None else path
        there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
        return there, shutil.disk_usage(there).free

    def open_folder(self) -> Path:
        return make_scratch_folder("image")

    def load_image(self, engine: str | None, folder: Path, token: str) -> None:
        """Load the image that was written into the folder, and remove the folder."""
        try:
            asyncio.run(load_image(engine, sent_files.part_of(folder, token, ARCHIVE)))
        finally:
            shutil.rmtree(folder)


class ThisNode:
    """The driver's node, asked as another one."""

    label = "the driver's node"

    def __init__(self) -> None:
        self._setup = NodeSetup()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Raises PlacementError."""
        try:
            return await asyncio.to_thread(getattr(self._setup, method), *arguments)
        except RunError as error:
            raise PlacementError(f"{self.label} {error}") from None

    def close(self) -> None:
        self._setup.stop_listening()


class OtherNode:
    """A node with its actor, and the kinds of parts that it gets."""

    def __init__(self, node: Node, kinds: Collection[Kind]) -> None:
        self.node_id = node.node_id
        self.label = f"node {node.name} ({node.address})"
        self.kinds = kinds
        actor: Any = ray.remote(NodeSetup)
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        self._actor = actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy).remote()

    async def ask(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call the actor. Raises PlacementError that names the node, SandboxUnavailable if it has no Docker engine."""
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self._actor, method).remote(*arguments)
        except TimeoutError:
            raise self.error(f"did not answer within {timeout_s:g} s; see the logs of Ray there") from None
        except RayTaskError as error:
            if isinstance(error.cause, SandboxUnavailable):
                raise error.cause from None
            what = first_line(error.cause)
            raise self.error(
                what if isinstance(error.cause, RollFlashError) else f"cannot be prepared: {what}"
            ) from None
        except RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise self.error(
                f"cannot be checked ({last}); it needs the same packages as the driver, and this roll_flash"
            ) from None

    def error(self, what: str) -> PlacementError:
        return PlacementError(f"{self.label} {what}")

    def close(self) -> None:
        ray.kill(self._actor)


async def ask_all(nodes: Sequence[OtherNode], method: str, *arguments: Any) -> list[Any]:
    """Call all nodes at the same time. Raises PlacementError."""
    return list(await asyncio.gather(*(node.ask(method, *arguments) for node in nodes)))


async def send_piece(nodes: Sequence[OtherNode], folders: Sequence[Path], token: str, piece: Piece) -> None:
    """Write a piece into one folder on each node. Raises PlacementError."""
    digest = await asyncio.to_thread(sent_files.digest_of, piece)
    reference = await asyncio.to_thread(ray.put, piece)
    writes = (node.ask("write", folder, token, reference, digest) for node, folder in zip(nodes, folders, strict=True))
    await asyncio.gather(*writes)


async def blind_nodes(folder: Path, nodes: Sequence[OtherNode]) -> list[OtherNode]:
    """Return the nodes that do not see this folder of the driver, found out by a new file in it; all of them if none
    can be made. Raises PlacementError."""
    word = secrets.token_hex(16)
    probe = folder / f"{PROBE}{word[:8]}"
    try:
        await asyncio.to_thread(probe.write_text, word)
    except OSError:
        return list(nodes)
    try:
        seen = await ask_all(nodes, "sees", probe, word)
    finally:
        await asyncio.to_thread(probe.unlink)
    return [node for node, sees in zip(nodes, seen, strict=True) if not sees]
