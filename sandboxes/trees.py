"""Directory trees in and out. What comes out of a sandbox is hostile: names, links and sizes are checked here."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from roll_flash.sandboxes import files
from roll_flash.sandboxes.archives import EFBIG, EINVAL, unpack
from roll_flash.sandboxes.connection import AgentConnection
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.frames import Entry

MAX_ENTRIES = 20_000
MAX_BYTES = 1 << 28
PARALLEL_FILES = 16


@dataclass(frozen=True, slots=True)
class TreeReport:
    """What a transfer moved, and which members it left out because they are no regular file, directory or safe link."""

    files: int
    bytes: int
    left_out: list[str] = field(default_factory=list)


async def get_tree(
    connection: AgentConnection, path: str, destination: Path, *, max_bytes: int, max_entries: int
) -> TreeReport:
    """Copy a directory of the sandbox into `destination`, which must not exist or be empty.

    Raises SandboxFileError before anything is written if the limits are passed. Links that are absolute or lead out of
    the tree, devices, FIFOs and sockets are left out; set-id bits are dropped.
    """
    entries = await files.list_tree(connection, path, max_entries)
    total = sum(entry.size for entry in entries if stat.S_ISREG(entry.mode))
    if total > max_bytes:
        raise SandboxFileError(
            f"sandbox {connection.name}: {path} holds {total} bytes; {max_bytes} is the limit", EFBIG
        )
    await asyncio.to_thread(_make_empty, destination)
    good = [(entry, name) for entry in entries if (name := _safe_name(entry.path)) is not None]
    left_out = [os.fsdecode(entry.path) for entry in entries if _safe_name(entry.path) is None]
    for entry, name in good:
        if stat.S_ISDIR(entry.mode):
            await asyncio.to_thread((destination / name).mkdir, 0o755, parents=True, exist_ok=True)
    moved = await _fetch_files(connection, path, destination, good, max_bytes)
    for entry, name in good:
        if stat.S_ISLNK(entry.mode) and _stays_inside(name, os.fsdecode(entry.target)):
            (destination / name).symlink_to(os.fsdecode(entry.target))
        elif not stat.S_ISDIR(entry.mode) and not stat.S_ISREG(entry.mode):
            left_out.append(name)
    return TreeReport(sum(stat.S_ISREG(entry.mode) for entry, _ in good), moved, left_out)


async def _fetch_files(
    connection: AgentConnection, path: str, destination: Path, entries: list[tuple[Entry, str]], max_bytes: int
) -> int:
    limit = asyncio.Semaphore(PARALLEL_FILES)
    moved = 0

    async def fetch(entry: Entry, name: str) -> int:
        nonlocal moved
        async with limit:
            data = await files.read_file(connection, f"{path.rstrip('/')}/{name}", min(max_bytes, entry.size + 4096))
            moved += len(data)
            if moved > max_bytes:
                raise SandboxFileError(f"sandbox {connection.name}: {path} grew past {max_bytes} bytes", EFBIG)
            await asyncio.to_thread(_write_new, destination / name, data, entry.mode & 0o777 | 0o600)
            return len(data)

    await _together([fetch(entry, name) for entry, name in entries if stat.S_ISREG(entry.mode)])
    return moved


async def _together(moves: list[Coroutine[Any, Any, int]]) -> list[int]:
    """All of them, or the first error, after the rest has been cancelled."""
    tasks = [asyncio.ensure_future(move) for move in moves]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def put_tree(
    connection: AgentConnection, source: Path | bytes, path: str, *, max_bytes: int, max_entries: int
) -> TreeReport:
    """Copy a directory, or the content of a tar or zip archive (a file, or its bytes), into a directory of the sandbox.

    Raises SandboxFileError for an archive that leads outside, is too large or unpacks to more than
    `archives.MAX_RATIO` times its size, before anything is sent.
    """
    if isinstance(source, bytes) or await asyncio.to_thread(source.is_file):
        packed = source if isinstance(source, bytes) else await asyncio.to_thread(source.read_bytes)
        with tempfile.TemporaryDirectory(prefix="roll-flash-tree-") as folder:
            await asyncio.to_thread(unpack, packed, Path(folder), max_bytes=max_bytes, max_entries=max_entries)
            return await put_tree(connection, Path(folder), path, max_bytes=max_bytes, max_entries=max_entries)
    members = await asyncio.to_thread(_members, source, max_bytes, max_entries)
    await files.make_directory(connection, path, 0o755)
    limit = asyncio.Semaphore(PARALLEL_FILES)

    async def send(member: Path, mode: int) -> int:
        async with limit:
            data = await asyncio.to_thread(member.read_bytes)
            await files.write_file(connection, f"{path.rstrip('/')}/{member.relative_to(source)}", data, mode & 0o777)
            return len(data)

    for member, mode in members:
        if stat.S_ISDIR(mode):
            await files.make_directory(connection, f"{path.rstrip('/')}/{member.relative_to(source)}", 0o755)
    sent = await _together([send(member, mode) for member, mode in members if stat.S_ISREG(mode)])
    for member, mode in members:
        if stat.S_ISLNK(mode):
            name = member.relative_to(source)
            await files.make_symlink(connection, os.readlink(member), f"{path.rstrip('/')}/{name}")
    special = [str(member) for member, mode in members if stat.S_IFMT(mode) not in _CARRIED]
    return TreeReport(len(sent), sum(sent), special)


_CARRIED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


def _members(source: Path, max_bytes: int, max_entries: int) -> list[tuple[Path, int]]:
    found: list[tuple[Path, int]] = []
    total = 0
    for folder, folders, names in os.walk(source):
        for name in (*folders, *names):
            member = Path(folder) / name
            status = member.lstat()
            found.append((member, status.st_mode))
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            if len(found) > max_entries or total > max_bytes:
                raise SandboxFileError(f"{source} has more than {max_entries} members or {max_bytes} bytes", EFBIG)
    return found


def _make_empty(destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    if any(destination.iterdir()):
        raise SandboxFileError(f"{destination} is not empty; choose a new folder", EINVAL)


def _write_new(target: Path, data: bytes, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
        file.write(data)


def is_safe_name(raw: bytes) -> bool:
    """A relative path that leads nowhere but down."""
    return _safe_name(raw) is not None


def _safe_name(raw: bytes) -> str | None:
    name = os.fsdecode(raw)
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        return None
    return name


def _stays_inside(name: str, target: str) -> bool:
    if not target or target.startswith("/") or "\0" in target:
        return False
    depth = len(PurePosixPath(name).parent.parts)
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return True
