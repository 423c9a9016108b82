"""Prepares the other nodes of a run: checks them, and sends what they lack of model, user's code and sandbox images.

Everything goes through Ray's object store in pieces, to all nodes that lack it at the same time, and stays there for
later runs. The driver's node needs nothing: a run on one node starts no actor and calls none.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from roll_flash.cluster import node_needs, sent_files
from roll_flash.cluster.environment_files import code_root, environment_files, environment_modules
from roll_flash.cluster.node_needs import NodeFacts
from roll_flash.cluster.other_nodes import ARCHIVE, OtherNode, ThisNode, ask_all, blind_nodes, send_piece
from roll_flash.cluster.parts import Kind
from roll_flash.cluster.plan import Row
from roll_flash.cluster.reachability import Link, needed_links, shared_out
from roll_flash.cluster.sent_files import Compared, Piece, Wanted
from roll_flash.config.sections.learner import is_own
from roll_flash.config.tree import Config
from roll_flash.errors import PlacementError
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.sandboxes.images.build import build_name
from roll_flash.sandboxes.images.transfer import FoundImage, find_image, image_pieces
from roll_flash.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

CHECK_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class _ImageToSend:
    name: str
    source: FoundImage
    """Where the driver's node has it."""
    takers: Mapping[OtherNode, FoundImage]
    """The nodes that lack it, and the engine of each."""


class NodePreparation:
    """Prepares each node of a run once for each kind of part."""

    def __init__(
        self, config: Config, model_folder: Path | None, sandboxes: Collection[SandboxSpec], note: Callable[[str], None]
    ) -> None:
        """`sandboxes`: those that environments request; `note` gets a line for each thing that is sent or odd."""
        self._config = config
        self.sandboxes = sandboxes
        self._model_folder = model_folder
        in_docker = config.sandbox.provider in ("docker", "auto")
        images = {spec.image or DEFAULT_IMAGE for spec in sandboxes if spec.dockerfile is None}
        self._images = sorted(images) if in_docker else []
        self._builds = sorted(
            {build_name(spec) for spec in sandboxes if spec.dockerfile is not None} if in_docker else ()
        )
        self._note = note
        self._prepared: set[tuple[str, Kind]] = set()

    async def prepare(self, rows: Sequence[Row]) -> None:
        """Prepare the nodes of these parts, all at the same time. Raises PlacementError for the first problem."""
        here = ray.get_runtime_context().get_node_id()
        new = [row for row in rows if row.node.node_id != here]
        new = [row for row in new if (row.node.node_id, row.part.kind) not in self._prepared]
        if not new:
            return
        if problem := node_needs.address_problem([row.node for row in new], ray.util.get_node_ip_address()):
            raise PlacementError(problem)
        nodes: list[OtherNode] = []
        try:
            for node_id, node in {row.node.node_id: row.node for row in new}.items():
                nodes.append(OtherNode(node, {row.part.kind for row in new if row.node.node_id == node_id}))
            await self._check_all(nodes)
            await self._try_links(rows, nodes, here)
            await self._provide_all(nodes)
        finally:
            for opened in nodes:
                opened.close()
        self._prepared |= {(row.node.node_id, row.part.kind) for row in new}

    async def _check_all(self, nodes: Sequence[OtherNode]) -> None:
        ours = await asyncio.to_thread(node_needs.node_facts)
        await asyncio.gather(*(self._check(node, ours) for node in nodes))

    async def _try_links(self, rows: Sequence[Row], nodes: Sequence[OtherNode], here: str) -> None:
        """Raises PlacementError for the first port between these nodes and the driver's that is closed."""
        with closing(ThisNode()) as this_node:
            at: dict[str, OtherNode | ThisNode] = {here: this_node, **{node.node_id: node for node in nodes}}
            wanted = [link for link in needed_links(self._config, rows, here) if link.target.node_id in at]
            listening = (at[link.target.node_id].ask("listen", link.target.address, link.ports) for link in wanted)
            found = await asyncio.gather(*listening)
            links = [replace(link, ports=ports) for link, ports in zip(wanted, found, strict=True)]
            shares = [(at[source], its) for source, its in shared_out(links).items() if source in at]
            await asyncio.gather(*(_try(source, its) for source, its in shares))
            await asyncio.gather(*(node.ask("stop_listening") for node in at.values()))

    async def _provide_all(self, nodes: Sequence[OtherNode]) -> None:
        """What takes longest is sent last: a node that lacks an engine or a module must be said before."""
        with_workers = [node for node in nodes if "worker" in node.kinds]
        images: list[_ImageToSend | None] = []
        if with_workers:
            images += [await self._missing_image(name, with_workers, self._find_source) for name in self._images]
            images += [await self._missing_image(name, with_workers, self._find_build) for name in self._builds]
            await self._provide_code(with_workers)
        await self._provide_models(nodes)
        for image in filter(None, images):
            await self._send_image(image)

    async def _provide_models(self, nodes: Sequence[OtherNode]) -> None:
        """Workers tokenize only, so a node with nothing else gets no weights."""
        with_models = [node for node in nodes if node.kinds != {"worker"}]
        if (folder := self._model_folder) is not None:
            model = await asyncio.to_thread(sent_files.whole, f"the model {folder.name}", folder)
            await self._provide(model, with_models)
            with_workers = [node for node in nodes if node not in with_models]
            await self._provide(model.without_weights(f"the tokenizer of {folder.name}"), with_workers)
        kl, loss = self._config.learner.kl, self._config.learner.loss.name
        with_ranks = [node for node in nodes if "rank" in node.kinds]
        if with_ranks and is_own(loss) and (root := await asyncio.to_thread(code_root, loss.rpartition(":")[0])):
            await self._provide_path(root, with_ranks)
        if with_ranks and kl.coefficient and kl.reference is not None:
            folder = await asyncio.to_thread(Path(kl.reference).resolve)
            reference = await asyncio.to_thread(sent_files.whole, f"the reference {folder.name}", folder)
            await self._provide(reference, with_ranks)

    async def _check(self, node: OtherNode, ours: NodeFacts) -> None:
        deadline = time.monotonic() + CHECK_TIMEOUT_S
        facts = await node.ask("facts", timeout_s=CHECK_TIMEOUT_S)
        problem = node_needs.software_problem(facts, ours, node_needs.needed_packages(self._config, node.kinds))
        if not problem and self.sandboxes and "worker" in node.kinds:
            problem = node_needs.disk_problem(facts)
        if problem:
            raise node.error(problem)
        sent_s = time.time()
        theirs_s = await node.ask("time_s", timeout_s=max(1.0, deadline - time.monotonic()))
        difference_s = node_needs.clock_difference_s(sent_s, theirs_s, time.time())
        if warning := node_needs.clock_warning(difference_s):
            self._note(f"warning: {node.label} {warning}")

    async def _provide_code(self, nodes: Sequence[OtherNode]) -> None:
        files = await asyncio.to_thread(environment_files, self._config)
        for path in files.needed:
            await self._provide_path(path, nodes)
        for path in files.perhaps:
            try:
                await self._provide_path(path, nodes)
            except PlacementError as error:
                self._note(f"warning: {error}")
        modules = await asyncio.to_thread(environment_modules, self._config)
        for node, missing in zip(nodes, await ask_all(nodes, "missing_modules", modules), strict=True):
            if missing:
                raise node.error(f"cannot import {missing[0]}; install it there, or start the run in its folder")

    async def _provide_path(self, path: Path, nodes: Sequence[OtherNode]) -> None:
        """Send a file or a folder of limited size to the nodes that do not see the driver's disk."""
        is_folder = await asyncio.to_thread(path.is_dir)
        blind = await blind_nodes(path if is_folder else path.parent, nodes)
        if not blind:
            return
        wanted = await asyncio.to_thread(sent_files.limited, path)
        compared = await ask_all(blind, "compare", wanted.code if wanted.too_large else wanted)
        code = wanted.code.files.keys()
        pairs = list(zip(blind, compared, strict=True))
        lacking = [node for node, found in pairs if found.missing or code & set(found.different)]
        if lacking and wanted.too_large:
            raise lacking[0].error(
                f"lacks {wanted.what}, which is too large to be sent (more than 100 MiB or 20,000 files); put it "
                "there at the same path, or start the run in a smaller folder"
            )
        await self._provide(wanted, lacking, code)

    async def _provide(self, wanted: Wanted, nodes: Sequence[OtherNode], same: Collection[str] | None = None) -> None:
        """Send the files that nodes lack, to the same path. Raises PlacementError if nodes have others at that path;
        with `same`, only these must not differ."""
        found: list[Compared] = await ask_all(nodes, "compare", wanted)
        for node, compared in zip(nodes, found, strict=True):
            if different := [name for name in compared.different if same is None or name in same]:
                raise node.error(
                    f"has another {wanted.path / different[0]} than the driver; remove {wanted.path} there, "
                    "so that it is sent, or make both the same"
                )
        takers = {node: compared.missing for node, compared in zip(nodes, found, strict=True) if compared.missing}
        for node, names in takers.items():
            size = sum(wanted.files[name].size for name in names)
            await _check_room(node, wanted.what, size, wanted.path)
            self._say_sending(node, wanted.what, size)
        token = secrets.token_hex(4)
        if takers:
            of_any = sorted(set().union(*takers.values()))
            async for piece in _in_thread(sent_files.pieces(wanted, of_any)):
                await send_piece(list(takers), [wanted.path] * len(takers), token, piece)
        await asyncio.gather(*(node.ask("put_in_place", wanted, token, names) for node, names in takers.items()))

    async def _missing_image(
        self, image: str, nodes: Sequence[OtherNode], find: Callable[[str, OtherNode], Awaitable[FoundImage | None]]
    ) -> _ImageToSend | None:
        """Return which nodes lack an image that the driver's node has; None if none does. Raises PlacementError for a
        node that cannot take it."""
        found = await asyncio.gather(*(self._find_image(node, image) for node in nodes))
        takers = {node: at for node, at in zip(nodes, found, strict=True) if at is not None and not at.size}
        source = await find(image, next(iter(takers))) if takers else None
        if source is None:
            return None
        for node in takers:
            await _check_room(node, f"the image {image}", source.size, None)
        return _ImageToSend(image, source, takers)

    async def _send_image(self, image: _ImageToSend) -> None:
        nodes = list(image.takers)
        for node in nodes:
            self._say_sending(node, f"the image {image.name}", image.source.size)
        folders = await ask_all(nodes, "open_folder")
        token, offset = secrets.token_hex(4), 0
        async for data in image_pieces(image.source.engine, image.name, sent_files.PIECE_BYTES):
            await send_piece(nodes, folders, token, [(ARCHIVE, offset, data)])
            offset += len(data)
        loads = zip(image.takers.items(), folders, strict=True)
        await asyncio.gather(*(node.ask("load_image", at.engine, folder, token) for (node, at), folder in loads))

    async def _find_source(self, image: str, taker: OtherNode) -> FoundImage | None:
        """Return where the driver's node has an image that `taker` lacks; None if another sandbox may be used."""
        try:
            source = await find_image(self._config.sandbox.engines, image)
            why = "" if source.size else "nor has the driver's node; build it on one of them"
        except SandboxUnavailable as error:
            source, why = None, f"and the driver's node cannot send it: {error}"
        if not why:
            return source
        if self._config.sandbox.provider == "docker":
            raise taker.error(f"has no image {image}, {why}")
        self._note(f"warning: {taker.label} has no image {image}, {why}")
        return None

    async def _find_build(self, image: str, _: OtherNode) -> FoundImage | None:
        """Return where the driver's node has what it built from a Dockerfile; None if each node has to build it."""
        try:
            source = await find_image(self._config.sandbox.engines, image)
        except SandboxUnavailable:
            return None
        return source if source.size else None

    async def _find_image(self, node: OtherNode, image: str) -> FoundImage | None:
        try:
            engines = self._config.sandbox.engines
            found: FoundImage = await node.ask("find_image", engines, image, timeout_s=CHECK_TIMEOUT_S)
            return found
        except SandboxUnavailable as error:
            if self._config.sandbox.provider == "docker":
                raise node.error(f"has no usable Docker engine: {error}") from None
            self._note(f"warning: {node.label} uses the weaker `local` sandbox: {error}")
            return None

    def _say_sending(self, node: OtherNode, what: str, size: int) -> None:
        self._note(f"{node.label} lacks {what} ({size / 2**20:.3g} MiB): sending it from {socket.gethostname()}")


async def _check_room(node: OtherNode, what: str, size: int, path: Path | None) -> None:
    """Raises PlacementError if a node has no room for what is to be sent to `path` (None: into a temporary file)."""
    there, free_bytes = await node.ask("room", path)
    if problem := node_needs.room_problem(what, size, there, free_bytes):
        raise node.error(problem)


async def _try(source: OtherNode | ThisNode, links: Sequence[Link]) -> None:
    """Raises PlacementError if a port cannot be reached from this node."""
    tried = [(link, port) for link in links for port in link.ports]
    answers = await source.ask("unreachable", [(link.target.address, port) for link, port in tried])
    for (link, port), why in zip(tried, answers, strict=True):
        if why:
            raise PlacementError(link.problem(port, source.label, why))


async def _in_thread(pieces: Iterator[Piece]) -> AsyncIterator[Piece]:
    """Iterate in a thread, as files are read."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
