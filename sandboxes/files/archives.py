"""Unpack tar and zip archives of users, within limits. Their names never touch the file system of this machine.

The contents are written one after another into one unnamed file; paths and link targets are resolved in a model of the
tree (`tree_model.py`) before anything is sent on.
"""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from errno import EFBIG, EINVAL
from typing import IO, BinaryIO

from roll_flash.sandboxes.errors import SandboxFileError
from roll_flash.sandboxes.files.archive_stream import (
    CHUNK,
    ArchiveError,
    Blocks,
    Budget,
    decompressed,
    is_tar,
)
from roll_flash.sandboxes.files.tar_reader import Member, tar_members
from roll_flash.sandboxes.files.tree_model import EscapesTree, File, Folder, Link, Node, follow, parts_of, walk

ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Accepted compression methods: for others, `zipfile` does not limit the output of one step."""
ZIP_MEMBER, ZIP_MEMBER_BYTES = b"PK\x01\x02", 46
MAX_EXTRA_BYTES = 1024
"""Maximum bytes of the extra field of one member in a zip's directory: times, owners, sizes."""
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,
    ArithmeticError,
    LookupError,
    ValueError,
)


def max_packed(max_bytes: int, max_entries: int) -> int:
    """Return the maximum size of an archive: a larger one holds more than `max_bytes`, or is padded."""
    return max_bytes + 4 * 1024 * max_entries + (1 << 20)


def unpack(packed: bytes, contents: BinaryIO, *, max_bytes: int, max_entries: int) -> Folder:
    """Return the tree of an archive, and write the content of its files to `contents`.

    Raises SandboxFileError if the data is no archive, leads out of the tree, holds anything but files, folders and
    links, or exceeds a limit.
    """
    budget = Budget(len(packed), max_bytes, max_entries)
    if len(packed) > max_packed(max_bytes, max_entries):
        raise SandboxFileError(f"an archive of {len(packed)} bytes, for at most {max_bytes} bytes unpacked", EFBIG)
    tree = _Unpacked(contents, budget)
    try:
        if packed.startswith(b"PK") and not is_tar(packed):
            _read_zip(packed, tree, budget, max_entries)
        else:
            for member, content in tar_members(Blocks(decompressed(packed, budget)), budget):
                _add_member(tree, member, content)
        for folder, _, node in walk(tree.root):
            if isinstance(node, Link):
                follow(folder, node.target, budget.step)
    except (ArchiveError, EscapesTree) as error:
        raise SandboxFileError(f"the archive cannot be unpacked: {error}", EINVAL) from None
    return tree.root


class _Unpacked:
    """Tree of the members read so far."""

    def __init__(self, contents: BinaryIO, budget: Budget) -> None:
        self.root = Folder()
        self._contents = contents
        self._budget = budget

    def store(self, content: Iterator[bytes], mode: int) -> File:
        """Append content to `contents`. Drops set-id bits and write bits of others; the owner can read and write."""
        start = self._contents.tell()
        for piece in content:
            self._contents.write(piece)
        kept = mode & (0o755 if mode & 0o100 else 0o644) | 0o600
        return File(kept, self._contents.tell() - start, start)

    def add(self, name: str, node: Node, *, replace: bool) -> None:
        """Add a member and its missing parent folders. `replace`: it may replace an earlier member, but no folder."""
        self._budget.take(entries=1)
        *above, last = parts_of(name)
        folder = self.find_folder(above)
        known = folder.members.get(last)
        if known is not None and (not replace or isinstance(known, Folder) or isinstance(node, Folder)):
            raise ArchiveError(f"{name[:80]!r} is in it twice")
        folder.members[last] = node

    def make_folder(self, name: str) -> None:
        if name:
            self.find_folder(parts_of(name))

    def find_folder(self, parts: list[str]) -> Folder:
        """Return a folder, created like with `mkdir -p`; follows links that stay in the tree. Raises EscapesTree."""
        here = self.root
        for part in parts:
            self._budget.step()
            found = here.members.get(part)
            if found is None:
                self._budget.take(entries=1)
                found = here.make_folder(part)
            elif isinstance(found, Link):
                found = follow(here, found.target, self._budget.step)
            if not isinstance(found, Folder):
                raise ArchiveError(f"{'/'.join(parts)[:80]!r} is used as a folder, which it is not")
            here = found
        return here

    def find_file(self, name: str) -> File:
        """Return the file that a hard link refers to. Raises ArchiveError."""
        *above, last = parts_of(name)
        here = self.root
        for part in above:
            found = follow(here, part, self._budget.step)
            if not isinstance(found, Folder):
                break
            here = found
        else:
            if isinstance(linked := here.members.get(last), File):
                self._budget.take(linked.size)
                return linked
        raise ArchiveError(f"a hard link to {name[:80]!r}, which is no file before it in the archive")


def _plain(name: str) -> str:
    """Return the path without empty and `.` parts; nothing else is removed."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _add_member(tree: _Unpacked, member: Member, content: Iterator[bytes]) -> None:
    name = _plain(member.name)
    if member.kind == "folder":
        tree.make_folder(name)
    elif member.kind == "link":
        tree.add(name, Link(member.target), replace=True)
    elif member.kind == "hard link":
        if member.target.startswith("/"):
            raise ArchiveError(f"a hard link to {member.target[:80]!r} leads out of the folder")
        tree.add(name, tree.find_file(_plain(member.target)), replace=True)
    else:
        tree.add(name, tree.store(content, member.mode), replace=True)


class _ZipBytes(io.BytesIO):
    """File object that checks a zip's directory: `zipfile` reads it at once, creates an object for each member, and
    copies the member's extra field once for each part of that field."""

    max_members: int | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self.max_members is not None:
            _check_directory(data, self.max_members)
        return data


def _check_directory(data: bytes, max_members: int) -> None:
    """Check a zip's directory. Raises ArchiveError for a long extra field, SandboxFileError for too many members."""
    at = count = 0
    while data.startswith(ZIP_MEMBER, at):
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        if extra > MAX_EXTRA_BYTES:
            raise ArchiveError(f"a header of {extra} bytes; {MAX_EXTRA_BYTES} is the limit")
        at += ZIP_MEMBER_BYTES + name + extra + comment
        count += 1
        if count > max_members:
            raise SandboxFileError(f"the archive holds more than {max_members} files", EFBIG)


def _read_zip(packed: bytes, tree: _Unpacked, budget: Budget, max_entries: int) -> None:
    """Read regular files and folders; refuse a zip with links, devices or names that lead out of the tree."""
    file = _ZipBytes(packed)
    file.max_members = max_entries
    try:
        with zipfile.ZipFile(file) as archive:
            file.max_members = None
            # A stream that unpacks to nothing takes time; members that share one would take it again and again.
            if sum(member.compress_size for member in archive.infolist()) > len(packed):
                raise ArchiveError("its members overlap")
            for member in archive.infolist():
                _add_zipped(tree, archive, member, budget)
    except _ZIP_ERRORS as error:
        raise ArchiveError(str(error)) from None


def _add_zipped(tree: _Unpacked, archive: zipfile.ZipFile, member: zipfile.ZipInfo, budget: Budget) -> None:
    mode = member.external_attr >> 16
    name = member.filename
    if name.startswith("/"):
        raise ArchiveError(f"{name[:80]!r} leads out of the folder")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ArchiveError(f"{name[:80]!r} is no regular file")
    if member.is_dir():
        tree.make_folder(_plain(name))
        return
    if member.compress_type not in ZIP_METHODS:
        raise ArchiveError(f"{name[:80]!r} is compressed by a method that is not taken; pack it with deflate")
    with archive.open(member) as source:
        tree.add(_plain(name), tree.store(_counted(source, budget), 0o644 | mode & 0o100), replace=False)


def _counted(source: IO[bytes], budget: Budget) -> Iterator[bytes]:
    """Yield the pieces of `source`, counted as they are read: the sizes in a zip are not trusted."""
    while piece := source.read(CHUNK):
        budget.take(len(piece))
        yield piece
