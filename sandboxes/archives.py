"""Archives that users bring, tar and zip, unpacked within limits and never outside the folder."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from roll_flash.sandboxes.errors import SandboxFileError

MAX_RATIO = 200
"""Largest unpacked size of an archive as a multiple of its packed size (beyond the first MiB)."""
CHUNK = 1 << 20
EFBIG, EINVAL = 27, 22


class _Budget:
    """What may still be unpacked. A zip's own figures are not believed: bytes are counted as they come."""

    def __init__(self, packed: bytes, max_bytes: int, max_entries: int) -> None:
        self._bytes = min(max_bytes, (1 << 20) + MAX_RATIO * len(packed))
        self._entries = max_entries
        self._error = f"the archive unpacks to more than {self._bytes} bytes or {max_entries} files"

    def take(self, count: int, entries: int = 0) -> None:
        self._bytes -= count
        self._entries -= entries
        if self._bytes < 0 or self._entries < 0:
            raise SandboxFileError(self._error, EFBIG)


def unpack(packed: bytes, folder: Path, *, max_bytes: int, max_entries: int) -> None:
    """Raises SandboxFileError for what is no archive, leads outside, or passes a limit."""
    budget = _Budget(packed, max_bytes, max_entries)
    try:
        if packed.startswith(b"PK"):
            _unpack_zip(packed, folder, budget)
        else:
            _unpack_tar(packed, folder, budget)
    except (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise SandboxFileError(f"the archive cannot be unpacked: {error}", EINVAL) from None


def _unpack_tar(packed: bytes, folder: Path, budget: _Budget) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            budget.take(member.size, 1)
            archive.extract(member, folder, filter="data")


def _unpack_zip(packed: bytes, folder: Path, budget: _Budget) -> None:
    """Regular files and folders; a zip with links, devices or names that lead out is refused whole."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        for member in archive.infolist():
            mode = member.external_attr >> 16
            name = PurePosixPath(member.filename)
            if name.is_absolute() or ".." in name.parts or not name.parts:
                raise zipfile.BadZipFile(f"{member.filename!r} leads out of the folder")
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise zipfile.BadZipFile(f"{member.filename!r} is no regular file")
            target = folder / name
            budget.take(0, 1)
            if member.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("xb") as file:
                while piece := source.read(CHUNK):
                    budget.take(len(piece))
                    file.write(piece)
            target.chmod(0o755 if mode & 0o100 else 0o644)
