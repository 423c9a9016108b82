"""Checksums of a checkpoint: `checksums.json` has the size and the CRC-32 of each of its files.

They find what a disk, a copy or a hand has changed; they are no protection against somebody who changes both.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

CHECKSUMS = "checksums.json"
_FORMAT = 1
_THREADS = 4
_BLOCK_BYTES = 1 << 20
_MAX_NAME_BYTES = 255


def write_checksums(folder: Path) -> None:
    """Write the sizes and checksums of all files in `folder`."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    found = zip(names, _checksums([folder / name for name in names], from_disk=False), strict=True)
    files = {name: {"bytes": size, "crc32": checksum} for name, (size, checksum) in found}
    (folder / CHECKSUMS).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))


def has_checksums(folder: Path) -> bool:
    """Return False for a checkpoint of a version that wrote none."""
    return (folder / CHECKSUMS).exists()


def find_damage(folder: Path, *, sizes_only: bool = False) -> str | None:
    """Describe the first file that is not as it was written; None if all are, or if there are no checksums.

    Reads every file from the disk, not from memory that the system keeps of it. `sizes_only` reads none.
    """
    if not has_checksums(folder):
        return None
    try:
        content = json.loads((folder / CHECKSUMS).read_text())
        expected = {name: (int(file["bytes"]), str(file["crc32"])) for name, file in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return f"{CHECKSUMS} cannot be read"
    if outside := next((name for name in expected if not _is_below(name)), None):
        return f"{CHECKSUMS} names {outside[:80]!r}, which is no file of it"
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} of {size} bytes"
    if sizes_only:
        return None
    try:
        read = _checksums([folder / name for name in expected], from_disk=True)
    except OSError as error:
        return f"{Path(error.filename or '').name or 'a file'} cannot be read: {error.strerror}"
    wrong = [name for name, found in zip(expected, read, strict=True) if found != expected[name]]
    return f"{wrong[0]} has other bytes than were written" if wrong else None


def _is_below(name: str) -> bool:
    """True for a path of plain names that a file system can hold; a copied checkpoint may name any."""
    parts = [part.encode(errors="surrogatepass") for part in name.split("/")]
    return not any(part in (b"", b".", b"..") or len(part) > _MAX_NAME_BYTES for part in parts)


def _checksums(paths: Sequence[Path], *, from_disk: bool) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(functools.partial(_checksum, from_disk=from_disk), paths))


def _checksum(path: Path, *, from_disk: bool) -> tuple[int, str]:
    """Size in bytes and CRC-32 (eight hexadecimal digits) of a file."""
    checksum, size, buffer = 0, 0, bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            checksum, size = crc32(view[:count], checksum), size + count
    return size, f"{checksum:08x}"
