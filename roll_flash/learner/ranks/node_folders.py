"""Checkpoint folders for ranks on nodes that do not see the driver's disk: there the files travel through Ray.

Whether a node sees a folder is found out by a file of the driver in it, each time: a path that exists on every node
need not be the same disk. Ranks of a node that does not see it use a temporary folder of that node.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_flash.errors import CheckpointError, first_line
from roll_flash.sandboxes.scratch import make_scratch_folder

PROBE = ".probe"
PIECE_BYTES = 32 * 2**20

T = TypeVar("T")


class NodeFiles:
    """Ray actor that handles files on its node."""

    def sees(self, file: Path, text: str) -> bool:
        """Return true if this file is here, with this text."""
        try:
            return file.read_text() == text
        except OSError:
            return False

    def open_folder(self) -> Path:
        """Create a temporary folder."""
        return make_scratch_folder("checkpoint")

    def remove_folder(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def files_in(self, folder: Path) -> dict[str, int]:
        """Return the size in bytes of each file, by its path in the folder."""
        return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    def read_piece(self, path: Path, offset: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)

    def write_piece(self, path: Path, offset: int, piece: bytes) -> None:
        _write_piece(path, offset, piece)


class NodeFolders:
    """The folders that ranks use in place of folders of the driver."""

    def __init__(self, node_ids: Sequence[str], here: str) -> None:
        """`node_ids`: Ray's id of the node of each rank; `here`: that of this process."""
        self._node_ids = node_ids
        self._nodes = {node_id: _start_actor(node_id) for node_id in set(node_ids) - {here}}

    @property
    def are_all_here(self) -> bool:
        """True if all ranks are on the node of this process."""
        return not self._nodes

    @asynccontextmanager
    async def for_writing(self, folder: Path) -> AsyncIterator[list[Path]]:
        """Give each rank a folder to write into; at the end `folder` has all files. Raises CheckpointError."""
        word, probe = secrets.token_hex(16), folder / PROBE
        try:
            await asyncio.to_thread(probe.write_text, word)
            own = await self._open(probe, word)
            await asyncio.to_thread(probe.unlink)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}") from None
        try:
            yield self._of_ranks(folder, own)
            for node_id, there in own.items():
                await self._collect(node_id, there, folder)
        finally:
            await self._remove(own)

    @asynccontextmanager
    async def for_reading(self, folder: Path, known: str) -> AsyncIterator[list[Path]]:
        """Give each rank a folder to read from, with the files of `folder`; `known` names a file whose text is unique.
        Raises CheckpointError."""
        file = folder / known
        own = await self._open(file, await asyncio.to_thread(file.read_text))
        try:
            for node_id, there in own.items():
                await self._spread(node_id, there, folder)
            yield self._of_ranks(folder, own)
        finally:
            await self._remove(own)

    def close(self) -> None:
        for node in self._nodes.values():
            ray.kill(node)
        self._nodes.clear()

    def _of_ranks(self, folder: Path, own: dict[str, Path]) -> list[Path]:
        return [own.get(node_id, folder) for node_id in self._node_ids]

    async def _open(self, file: Path, text: str) -> dict[str, Path]:
        """Return a temporary folder for each node that does not see the file."""
        sees = await asyncio.gather(*(_answer(node.sees.remote(file, text)) for node in self._nodes.values()))
        blind = [node_id for node_id, seen in zip(self._nodes, sees, strict=True) if not seen]
        opened = await asyncio.gather(*(_answer(self._nodes[node_id].open_folder.remote()) for node_id in blind))
        return dict(zip(blind, opened, strict=True))

    async def _collect(self, node_id: str, there: Path, folder: Path) -> None:
        node = self._nodes[node_id]
        for name, size in (await _answer(node.files_in.remote(there))).items():
            for offset in range(0, max(size, 1), PIECE_BYTES):
                piece = await _answer(node.read_piece.remote(there / name, offset))
                await asyncio.to_thread(_write_piece, folder / name, offset, piece)

    async def _spread(self, node_id: str, there: Path, folder: Path) -> None:
        files = NodeFiles()
        for name, size in files.files_in(folder).items():
            for offset in range(0, max(size, 1), PIECE_BYTES):
                piece = await asyncio.to_thread(files.read_piece, folder / name, offset)
                await _answer(self._nodes[node_id].write_piece.remote(there / name, offset, piece))

    async def _remove(self, own: dict[str, Path]) -> None:
        removals = (_answer(self._nodes[node_id].remove_folder.remote(folder)) for node_id, folder in own.items())
        # A folder that stays is removed when Ray starts there again (`sandboxes/scratch.py`), or with its lost node.
        await asyncio.gather(*removals, return_exceptions=True)


def _start_actor(node_id: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor: Any = ray.remote(NodeFiles)
    return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy).remote()


def _write_piece(path: Path, offset: int, piece: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(piece)


async def _answer(call: Awaitable[T]) -> T:
    """Await a call of `NodeFiles`. The caller sets a time limit. Raises CheckpointError."""
    try:
        return await call
    except RayTaskError as error:
        raise CheckpointError(f"checkpoint files on another node: {first_line(error.cause)}") from None
    except RayError as error:
        raise CheckpointError(f"checkpoint files on another node: {first_line(error)}") from None
