"""Snapshots: the files of a sandbox as bytes in a spec, from which new sandboxes start. They never use the host's disk.

A snapshot contains no processes, devices, FIFOs or sockets.
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import stat
import tarfile
from collections.abc import Coroutine
from errno import EFBIG, EINVAL, ENAMETOOLONG, ENOENT, ENOTDIR
from typing import Any

from roll_flash.sandboxes.client import files
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.frames import Entry
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.files.archive_stream import BLOCK, ArchiveError, Blocks, Budget, decompressed
from roll_flash.sandboxes.files.archives import max_packed
from roll_flash.sandboxes.files.tar_reader import Member, tar_members
from roll_flash.sandboxes.files.tree_model import MAX_PATH_BYTES, decoded, encoded
from roll_flash.sandboxes.files.trees import MAX_ENTRIES, gather_or_cancel, is_safe_name
from roll_flash.sandboxes.spec import SandboxSpec

MAX_SNAPSHOT_BYTES = 64 << 20
PAGE_BYTES = 4096
SHORT_LINK_BYTES = 127
"""Longest target of a link that takes no page."""
ENTRY_BYTES = 1024
"""Memory that each file, folder or link takes besides its content."""
TEMPORARY_NAME_BYTES = 48
"""Bytes by which the name under which a file is written (`agent/files.c`) may be longer than its own."""
AGENT_BYTES = 2 << 20
"""Memory of a sandbox that its files may not take."""
SHARED_FOLDER = "/tmp"
PARALLEL_FILES = 64
OPEN_FILES_SHARE = 8
"""At most 1/OPEN_FILES_SHARE of the files that a sandbox may have open are read or written at the same time."""


async def capture(connection: AgentConnection, spec: SandboxSpec) -> bytes:
    """Return a tar archive of the working directory and /tmp. Raises SandboxFileError if it is too large, or larger
    than a new sandbox: sparse files and hard links take less here than they would there; or if a name is too long."""
    listed: list[tuple[str, Entry]] = []
    total = 0
    for folder in _places(spec):
        for entry in await asyncio.to_thread(_plain, await files.list_tree(connection, folder, MAX_ENTRIES)):
            total += BLOCK + len(entry.path) + len(entry.target) + (entry.size if stat.S_ISREG(entry.mode) else 0)
            path = f"{folder}/{decoded(entry.path)}"
            if total > MAX_SNAPSHOT_BYTES:
                raise _too_large(connection)
            if len(encoded(path)) + TEMPORARY_NAME_BYTES > MAX_PATH_BYTES:
                raise SandboxFileError(f"sandbox {connection.name}: {path[:80]!r}…: name too long", ENAMETOOLONG)
            listed.append((path, entry))
    contents = await _contents(connection, [path for path, entry in listed if stat.S_ISREG(entry.mode)], spec)
    found, room = list[tuple[str, Entry, bytes]](), _Room(spec)
    for path, entry in listed:
        if (content := contents.get(path, b"")) is None:
            continue
        if not room.holds(path, entry, len(content)):
            raise SandboxFileError(f"sandbox {connection.name}: its files do not fit into another like it", EFBIG)
        found.append((path, entry, content))
    return await asyncio.to_thread(_packed, found)


async def _contents(connection: AgentConnection, paths: list[str], spec: SandboxSpec) -> dict[str, bytes | None]:
    """Return the contents of files; None for one that was removed since it was listed. Raises SandboxFileError.

    Of all together at most MAX_SNAPSHOT_BYTES are read: sizes of a sandbox are not trusted, and files may have grown.
    """
    found: dict[str, bytes | None] = {}
    left, to_read = MAX_SNAPSHOT_BYTES, iter(paths)

    async def read() -> None:
        for path in to_read:
            found[path] = await read_one(path)

    async def read_one(path: str) -> bytes | None:
        content = bytearray()

        async def keep(part: bytes) -> None:
            nonlocal left
            content.extend(part)
            left -= len(part)
            if left < 0:
                raise _too_large(connection)

        try:
            await files.read_parts(connection, path, MAX_SNAPSHOT_BYTES, keep)
        except SandboxFileError as error:
            if error.errno not in (ENOENT, ENOTDIR):
                raise
            return None
        return bytes(content)

    await gather_or_cancel([read() for _ in range(_parallel(spec))])
    return found


def _too_large(connection: AgentConnection) -> SandboxFileError:
    what = f"sandbox {connection.name}: its files and their names take more than"
    return SandboxFileError(f"{what} {MAX_SNAPSHOT_BYTES >> 20} MiB, too much for a snapshot", EFBIG)


def _parallel(spec: SandboxSpec) -> int:
    """Number of files that are read or written at the same time."""
    return min(PARALLEL_FILES, max(1, spec.open_files // OPEN_FILES_SHARE))


class _Room:
    """Counts what files take in a new sandbox, where nothing is sparse and each link to a file is a copy."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._workdir = f"{posixpath.normpath(spec.workdir)}/"
        self._left = dict.fromkeys((True, False), spec.tmpfs_size_mb << 20)
        """Bytes of the working directory, and of the other folder."""
        self._memory_left = (spec.memory_mb << 20) - AGENT_BYTES

    def holds(self, path: str, entry: Entry, size: int) -> bool:
        """Count one more entry, a file of `size` bytes; False if it does not fit."""
        has_page = len(entry.target) > SHORT_LINK_BYTES
        taken = -(-size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES * has_page
        place = path.startswith(self._workdir)
        self._left[place] -= taken
        self._memory_left -= taken + ENTRY_BYTES
        return min(self._left[place], self._memory_left) >= 0


def _plain(entries: list[Entry]) -> list[Entry]:
    """Return the entries with plain names in plain folders. Runs in a thread: deep names take half a second.

    A name that is removed and made again while its folder is read is listed twice; it is returned once.
    """
    known, folders = dict[bytes, Entry](), {b""}
    for entry in entries:
        if entry.path in known or entry.path.rpartition(b"/")[0] not in folders or not is_safe_name(entry.path):
            continue
        known[entry.path] = entry
        if stat.S_ISDIR(entry.mode):
            folders.add(entry.path)
    return list(known.values())


def _places(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the folders of a snapshot. A working directory in /tmp is in the listing of /tmp."""
    workdir = posixpath.normpath(spec.workdir)
    return (SHARED_FOLDER,) if f"{workdir}/".startswith(f"{SHARED_FOLDER}/") else (workdir, SHARED_FOLDER)


def _packed(found: list[tuple[str, Entry, bytes]]) -> bytes:
    """Runs in a thread: headers of 40,000 entries take seconds."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for path, entry, content in found:
            member = tarfile.TarInfo(path.lstrip("/"))
            member.mode = stat.S_IMODE(entry.mode) & 0o777
            member.size = len(content)
            if stat.S_ISDIR(entry.mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(entry.mode):
                member.type, member.linkname = tarfile.SYMTYPE, decoded(entry.target)
            elif not stat.S_ISREG(entry.mode):
                continue
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


async def restore(connection: AgentConnection, spec: SandboxSpec) -> None:
    """Write the members of the spec's snapshot to their original paths. Raises SandboxFileError."""
    try:
        members = await asyncio.to_thread(_unpacked, spec.tree)
    except ArchiveError as error:
        raise SandboxFileError(f"sandbox {connection.name}: its snapshot cannot be read: {error}", EINVAL) from None
    await files.in_order(_made(connection, member) for member, _ in members if member.kind in ("folder", "link"))
    to_write = ((member, content) for member, content in members if member.kind not in ("folder", "link"))

    async def write() -> None:
        for member, content in to_write:
            await files.write_file(connection, f"/{member.name}", content, member.mode)

    await asyncio.gather(*(write() for _ in range(_parallel(spec))))


def _made(connection: AgentConnection, member: Member) -> Coroutine[Any, Any, None]:
    if member.kind == "link":
        return files.make_symlink(connection, member.target, f"/{member.name}")
    return files.make_directory(connection, f"/{member.name.rstrip('/')}", member.mode | 0o700)


def _unpacked(tree: bytes) -> list[tuple[Member, bytes]]:
    """Runs in a thread, as `_packed` does. Raises ArchiveError, SandboxFileError."""
    # Long names count too: every snapshot of `capture` can be restored.
    budget = Budget(len(tree), max_packed(MAX_SNAPSHOT_BYTES, 2 * MAX_ENTRIES), 2 * MAX_ENTRIES)
    return [(member, b"".join(content)) for member, content in tar_members(Blocks(decompressed(tree, budget)), budget)]


async def populate(connection: AgentConnection, spec: SandboxSpec) -> None:
    """Write the snapshot and the files of the spec into a new sandbox."""
    if spec.tree:
        await restore(connection, spec)
    for path, content in spec.files:
        await files.write_file(connection, path if path.startswith("/") else f"{spec.workdir}/{path}", content, 0o644)
