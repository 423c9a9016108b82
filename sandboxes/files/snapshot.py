"""Snapshots: the files of a sandbox as bytes in a spec, from which new sandboxes start. They never use the host's disk.

A snapshot contains no processes, devices, FIFOs or sockets.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from errno import EFBIG, EINVAL

from roll_flash.sandboxes.client import files
from roll_flash.sandboxes.client.connection import AgentConnection
from roll_flash.sandboxes.client.frames import Entry
from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.files.archive_stream import ArchiveError, Blocks, Budget, decompressed
from roll_flash.sandboxes.files.archives import max_packed
from roll_flash.sandboxes.files.tar_reader import tar_members
from roll_flash.sandboxes.files.trees import MAX_ENTRIES, is_safe_name
from roll_flash.sandboxes.spec import SandboxSpec

MAX_SNAPSHOT_BYTES = 64 << 20
SHARED_FOLDER = "/tmp"
PARALLEL_FILES = 16


async def capture(connection: AgentConnection, spec: SandboxSpec) -> bytes:
    """Return a tar archive of the working directory and /tmp. Raises SandboxFileError if it is too large."""
    packed = io.BytesIO()
    total, left = 0, MAX_SNAPSHOT_BYTES
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in (spec.workdir, SHARED_FOLDER):
            for entry in await files.list_tree(connection, folder, MAX_ENTRIES):
                if not is_safe_name(entry.path):
                    continue
                total += entry.size if stat.S_ISREG(entry.mode) else 0
                if total > MAX_SNAPSHOT_BYTES:
                    what = f"sandbox {connection.name}: its files take more than {MAX_SNAPSHOT_BYTES >> 20} MiB"
                    raise SandboxFileError(f"{what}, too much for a snapshot", EFBIG)
                left -= await _add(archive, connection, folder, entry, left)
    return packed.getvalue()


async def _add(archive: tarfile.TarFile, connection: AgentConnection, folder: str, entry: Entry, max_bytes: int) -> int:
    """Add one entry and return the number of bytes read, at most `max_bytes`: sizes of a sandbox are not trusted."""
    path = f"{folder}/{os.fsdecode(entry.path)}"
    member = tarfile.TarInfo(path.lstrip("/"))
    member.mode = stat.S_IMODE(entry.mode) & 0o777
    if stat.S_ISDIR(entry.mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif stat.S_ISLNK(entry.mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(entry.target)
        archive.addfile(member)
    elif stat.S_ISREG(entry.mode):
        content = await files.read_file(connection, path, max_bytes)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return member.size


async def restore(connection: AgentConnection, tree: bytes) -> None:
    """Write the members of a snapshot to their original paths. Raises SandboxFileError."""
    limit = asyncio.Semaphore(PARALLEL_FILES)

    async def write(path: str, content: bytes, mode: int) -> None:
        async with limit:
            await files.write_file(connection, path, content, mode)

    writes = []
    # Long names count too: every snapshot of `capture` can be restored.
    budget = Budget(len(tree), max_packed(MAX_SNAPSHOT_BYTES, 2 * MAX_ENTRIES), 2 * MAX_ENTRIES)
    try:
        for member, content in tar_members(Blocks(decompressed(tree, budget)), budget):
            path = "/" + member.name
            if member.kind == "folder":
                await files.make_directory(connection, path, member.mode | 0o700)
            elif member.kind == "link":
                await files.make_symlink(connection, member.target, path)
            else:
                writes.append((path, b"".join(content), member.mode))
    except ArchiveError as error:
        raise SandboxFileError(f"sandbox {connection.name}: its snapshot cannot be read: {error}", EINVAL) from None
    await asyncio.gather(*(write(*file) for file in writes))


async def populate(connection: AgentConnection, spec: SandboxSpec) -> None:
    """Write the snapshot and the files of the spec into a new sandbox."""
    if spec.tree:
        await restore(connection, spec.tree)
    for path, content in spec.files:
        await files.write_file(connection, path if path.startswith("/") else f"{spec.workdir}/{path}", content, 0o644)
