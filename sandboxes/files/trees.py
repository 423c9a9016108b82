"""Copy directory trees into and out of a sandbox. Data from a sandbox is hostile: names, links, sizes are checked."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from errno import EFBIG, EINVAL, ELOOP
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from roll_flash.sandboxes.client import files
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.frames import Entry
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.files.archives import max_packed, unpack
from roll_flash.sandboxes.files.tree_model import (
    MAX_DEPTH,
    EscapesTree,
    File,
    Folder,
    Link,
    StepCounter,
    decoded,
    follow,
    parts_of,
    walk,
)
from roll_flash.sandboxes.files.tree_writer import TreeWriter, host_error

T = TypeVar("T")
MAX_ENTRIES = 20_000
MAX_BYTES = 1 << 28
PARALLEL_FILES = 16


@dataclass(frozen=True, slots=True)
class TreeReport:
    """Result of a transfer. `left_out`: members that are no regular file, directory or safe link."""

    files: int
    bytes: int
    left_out: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """Members of a listing that will be written; each untrusted name and link is checked against the others."""

    folders: list[str] = field(default_factory=list)
    files: list[tuple[Entry, str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _plan(entries: list[Entry]) -> _Plan:
    plan = _Plan()
    known = {"": Folder()}
    links: list[tuple[Folder, str, str]] = []
    for entry in entries:
        path = decoded(entry.path)
        above, _, name = path.rpartition("/")
        folder = known.get(above)
        if not is_safe_name(entry.path) or folder is None or name in folder.members:
            plan.left_out.append(path)
        elif stat.S_ISDIR(entry.mode):
            plan.folders.append(path)
            known[path] = folder.members[name] = Folder(folder)
        elif stat.S_ISREG(entry.mode):
            plan.files.append((entry, path))
            folder.members[name] = File(entry.mode, entry.size)
        elif stat.S_ISLNK(entry.mode):
            folder.members[name] = Link(decoded(entry.target))
            links.append((folder, path, decoded(entry.target)))
        else:
            plan.left_out.append(path)
    count = StepCounter(len(entries))
    for folder, path, target in links:
        if _stays_inside(folder, target, count):
            plan.links.append((path, target))
        else:
            plan.left_out.append(path)
    return plan


def is_safe_name(raw: bytes) -> bool:
    """True for a relative path that stays below its start."""
    try:
        parts_of(decoded(raw))
    except EscapesTree:
        return False
    return True


def _stays_inside(folder: Folder, target: str, count: StepCounter) -> bool:
    try:
        follow(folder, target, count)
    except EscapesTree:
        return False
    return True


async def get_tree(
    connection: AgentConnection, path: str, destination: Path, *, max_bytes: int, max_entries: int
) -> TreeReport:
    """Copy a directory of the sandbox into `destination`, which must not exist or be empty.

    Raises SandboxFileError before anything is written if a limit is exceeded. Omits links that are absolute or that
    leave the tree at any step, devices, FIFOs and sockets; drops set-id bits.
    """
    entries = await files.list_tree(connection, path, max_entries)
    total = sum(entry.size for entry in entries if stat.S_ISREG(entry.mode))
    if total > max_bytes:
        raise SandboxFileError(
            f"sandbox {connection.name}: {path} holds {total} bytes; {max_bytes} is the limit", EFBIG
        )
    plan = await asyncio.to_thread(_plan, entries)
    with await asyncio.to_thread(TreeWriter, destination) as writer:
        await asyncio.to_thread(writer.make_folders, plan.folders)
        moved = await _fetch_files(connection, path, writer, plan.files, max_bytes)
        await asyncio.to_thread(writer.make_links, plan.links)
    return TreeReport(len(plan.files), moved, plan.left_out)


async def _fetch_files(
    connection: AgentConnection, path: str, writer: TreeWriter, entries: list[tuple[Entry, str]], max_bytes: int
) -> int:
    limit = asyncio.Semaphore(PARALLEL_FILES)
    moved = 0

    async def fetch(entry: Entry, name: str) -> int:
        size = -1

        async def keep(part: bytes) -> None:
            nonlocal moved, size
            goes_on, size = size >= 0, max(0, size) + len(part)
            moved += len(part)
            if moved > max_bytes:
                raise SandboxFileError(f"sandbox {connection.name}: {path} grew past {max_bytes} bytes", EFBIG)
            if part or not goes_on:
                mode = entry.mode & 0o777 | 0o600
                await asyncio.to_thread(writer.write_file, name, part, mode, goes_on=goes_on)

        async with limit:
            most = min(max_bytes, entry.size + 4096)
            await files.read_parts(connection, f"{path.rstrip('/')}/{name}", most, keep)
            return size

    await gather_or_cancel([fetch(entry, name) for entry, name in entries])
    return moved


async def gather_or_cancel(moves: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all moves and return their results; on the first error cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(move) for move in moves]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Outgoing:
    """Members to send: folders before their members, links last."""

    folders: list[str] = field(default_factory=list)
    files: list[tuple[str, int, Callable[[int], bytes]]] = field(default_factory=list)
    """Path, mode, and a function that reads PART_BYTES of the content from a position on."""
    links: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


async def put_tree(
    connection: AgentConnection, source: Path | bytes, path: str, *, max_bytes: int, max_entries: int
) -> TreeReport:
    """Copy a directory, or the content of a tar or zip archive (a file, or its bytes), into a directory of the sandbox.

    Raises SandboxFileError, before anything is sent, for an archive that leads out of the directory, is too large or
    unpacks to more than `archive_stream.MAX_RATIO` times its size.
    """
    if not isinstance(source, bytes) and await asyncio.to_thread(source.is_dir):
        return await _send(connection, await asyncio.to_thread(_of_folder, source, max_bytes, max_entries), path)
    with tempfile.TemporaryFile(prefix="roll-flash-tree-") as contents:
        outgoing = await asyncio.to_thread(_of_archive, source, contents, max_bytes, max_entries)
        return await _send(connection, outgoing, path)


async def _send(connection: AgentConnection, outgoing: _Outgoing, path: str) -> TreeReport:
    limit = asyncio.Semaphore(PARALLEL_FILES)
    target = path.rstrip("/")

    async def send(name: str, mode: int, part: Callable[[int], bytes]) -> int:
        async with limit:
            return await files.write_parts(
                connection, f"{target}/{name}", mode & 0o777, lambda start: asyncio.to_thread(part, start)
            )

    await files.make_directory(connection, path, 0o755)
    await files.in_order(files.make_directory(connection, f"{target}/{name}", 0o755) for name in outgoing.folders)
    sent = await gather_or_cancel([send(*file) for file in outgoing.files])
    await files.in_order(
        files.make_symlink(connection, leads_to, f"{target}/{name}") for name, leads_to in outgoing.links
    )
    return TreeReport(len(sent), sum(sent), outgoing.left_out)


def _of_archive(source: Path | bytes, contents: BinaryIO, max_bytes: int, max_entries: int) -> _Outgoing:
    packed = source if isinstance(source, bytes) else _read_archive(source, max_packed(max_bytes, max_entries))
    outgoing = _Outgoing()
    for folder, name, member in walk(unpack(packed, contents, max_bytes=max_bytes, max_entries=max_entries)):
        path = folder.path_of(name)
        if isinstance(member, Folder):
            outgoing.folders.append(path)
        elif isinstance(member, Link):
            outgoing.links.append((path, member.target))
        else:
            outgoing.files.append((path, member.mode, partial(_read_part, contents, member.offset, member.size)))
    contents.flush()
    return outgoing


def _read_part(contents: BinaryIO, offset: int, size: int, start: int) -> bytes:
    return os.pread(contents.fileno(), min(files.PART_BYTES, size - start), offset + start)


def _read_part_of(member: bytes, size: int, start: int) -> bytes:
    """Read part of a file, which may have grown since: at most `size` bytes of it."""
    with open(member, "rb", buffering=0) as opened:
        return os.pread(opened.fileno(), min(files.PART_BYTES, size - start), start)


def _read_archive(source: Path, limit: int) -> bytes:
    try:
        with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SandboxFileError(f"{source} is neither a folder nor an archive", EINVAL)
            if status.st_size > limit:
                raise SandboxFileError(f"{source} has {status.st_size} bytes; {limit} is the limit", EFBIG)
            return file.read(limit + 1)
    except OSError as error:
        raise host_error(f"{source} cannot be read", error) from None


def _of_folder(source: Path, max_bytes: int, max_entries: int) -> _Outgoing:
    outgoing, total, count = _Outgoing(), 0, 0
    root = os.fsencode(source)
    try:
        for folder, folders, names in os.walk(root, onerror=_raise):
            if folder.count(b"/") - root.count(b"/") > MAX_DEPTH:  # os.walk itself ends at the limit of recursion
                raise SandboxFileError(f"{source} has folders nested deeper than {MAX_DEPTH}", ELOOP)
            for name in (*folders, *names):
                member = os.path.join(folder, name)
                status = os.lstat(member)
                count += 1
                total += status.st_size if stat.S_ISREG(status.st_mode) else 0
                if count > max_entries or total > max_bytes:
                    raise SandboxFileError(f"{source} has more than {max_entries} members or {max_bytes} bytes", EFBIG)
                _add(outgoing, member, decoded(os.path.relpath(member, root)), status)
    except OSError as error:
        raise host_error(f"{os.fsdecode(error.filename or root)} cannot be read", error) from None
    return outgoing


def _raise(error: OSError) -> None:
    raise error


def _add(outgoing: _Outgoing, member: bytes, name: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        outgoing.folders.append(name)
    elif stat.S_ISREG(mode):
        outgoing.files.append((name, mode, partial(_read_part_of, member, status.st_size)))
    elif stat.S_ISLNK(mode):
        outgoing.links.append((name, decoded(os.readlink(member))))
    else:
        outgoing.left_out.append(os.fsdecode(member))
