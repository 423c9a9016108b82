"""Checksums of a checkpoint: `checksums.json` has the size and the CRC-32 of each of its files.

They find what a disk, a copy or a hand has changed; they are no protection against somebody who changes both.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase, RawIOBase
from pathlib import Path
from zlib import crc32

from roll_flash.checked_files import CONTENT_ERRORS, decode, open_checked, read_checked

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


def parse_checksums(content: bytes) -> dict[str, tuple[int, str]]:
    """Return size and checksum of each file, by its path in the folder. Raises ValueError with what is wrong."""
    try:
        files = decode(content)["files"]
        found = {str(name): (int(file["bytes"]), str(file["crc32"])) for name, file in files.items()}
    except CONTENT_ERRORS:
        raise ValueError("cannot be read") from None
    if outside := next((name for name in found if not _is_below(name)), None):
        raise ValueError(f"names {outside[:80]!r}, which is no file of it")
    return found


def has_checksums(folder: Path) -> bool:
    """Return False for a checkpoint of a version that wrote none."""
    return (folder / CHECKSUMS).exists()


def find_damage(folder: Path, *, part: str = "", sizes_only: bool = False) -> str | None:
    """Describe the first file that is not as it was written; None if all are, or if there are no checksums.

    Reads every file, or those of the folder `part`, from the disk, not from memory that the system keeps of it.
    `sizes_only` reads none.
    """
    if not has_checksums(folder):
        return None
    try:
        listed = parse_checksums(read_checked(folder / CHECKSUMS))
    except OSError:
        return f"{CHECKSUMS} cannot be read"
    except ValueError as error:
        return f"{CHECKSUMS} {error}"
    expected = {name: found for name, found in listed.items() if name.startswith(f"{part}/" if part else "")}
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
    with open_checked(path) as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return checksum_of(file)


def checksum_of(file: RawIOBase | BufferedIOBase) -> tuple[int, str]:
    """Return size in bytes and CRC-32 (eight hexadecimal digits) of what is left of a file."""
    checksum, size, buffer = 0, 0, bytearray(_BLOCK_BYTES)
    with memoryview(buffer) as view:
        while count := file.readinto(buffer):
            checksum, size = crc32(view[:count], checksum), size + count
    return size, f"{checksum:08x}"
