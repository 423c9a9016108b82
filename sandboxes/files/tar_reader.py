"""Reader for tar archives (V7, ustar, GNU, PAX).

It replaces `tarfile`, which holds extension headers of any size in memory, searches them with regular expressions in
quadratic time, and has no `filter` before Python 3.11.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roll_flash.sandboxes.files.archive_stream import ArchiveError, Blocks, Budget

MAX_EXTENSION_BYTES = 1 << 18
"""Maximum bytes of an extension header (a name or PAX fields); one extended attribute can take a quarter of it."""
MAX_TRAILER_BYTES = 1 << 20
"""Maximum bytes after the end of an archive."""
USED = (b"path", b"linkpath", b"size")
Kind = Literal["file", "folder", "link", "hard link"]
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "link",
    b"5": "folder",
}
_SPECIAL = {b"3": "a device", b"4": "a device", b"6": "a FIFO", b"S": "a sparse file (pack it without --sparse)"}


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    """Name as in the archive; invalid UTF-8 bytes become surrogates."""
    kind: Kind
    mode: int
    size: int
    """Bytes of content; 0 unless `kind` is `file`."""
    target: str
    """Target of a link or hard link."""


def tar_members(blocks: Blocks, budget: Budget) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Yield each member with its content; unread content is skipped. Raises ArchiveError, SandboxFileError."""
    fields: dict[bytes, bytes] = {}
    seen = 0
    while (block := blocks.block()) is not None and block.strip(b"\0"):
        budget.take(headers=1)
        seen += 1
        kind, size = _checked(block), _number(block[124:136])
        if kind in (b"x", b"X", b"g", b"L", b"K"):
            found = _extension(kind, _extension_data(blocks, size, budget), budget)
            fields |= found if kind != b"g" else {}
            continue
        member = _member(block, kind, size, fields)
        fields = {}
        budget.take(member.size)
        content = blocks.content(member.size)
        yield member, content
        for _ in content:
            pass
    if not seen and block is None:
        raise ArchiveError("it is empty")
    blocks.drain(MAX_TRAILER_BYTES)


def _checked(block: bytes) -> bytes:
    """Verify a header's checksum and return the header's kind; some old programs summed the bytes as signed."""
    wanted = _number(block[148:156])
    rest = block[:148] + b" " * 8 + block[156:]
    if wanted != sum(rest) and wanted != sum(byte - 256 * (byte > 127) for byte in rest):
        raise ArchiveError("it is neither a tar nor a zip archive, or damaged")
    return block[156:157]


def _number(field: bytes) -> int:
    """Parse octal digits, or a binary number after 0x80."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise ArchiveError("a header holds no number where one is due")
    return int(digits or b"0", 8)


def _extension_data(blocks: Blocks, size: int, budget: Budget) -> bytes:
    if size > MAX_EXTENSION_BYTES:
        raise ArchiveError(f"a header of {size} bytes; {MAX_EXTENSION_BYTES} is the limit")
    budget.take(size)
    return b"".join(blocks.content(size))


def _extension(kind: bytes, data: bytes, budget: Budget) -> dict[bytes, bytes]:
    """Return the fields for the next member. Global headers (kind g) are checked; the caller ignores their fields."""
    if kind in (b"L", b"K"):
        return {b"path" if kind == b"L" else b"linkpath": data.partition(b"\0")[0]}
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        budget.step()
        space = data.find(b" ", at, at + 10)
        length = data[at : max(at, space)]
        end = at + int(length) if length.isdigit() else 0
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(data) or not equals or data[end - 1 : end] != b"\n":
            raise ArchiveError("a header of further fields is damaged")
        if key.startswith(b"GNU.sparse."):
            raise ArchiveError(f"it holds {_SPECIAL[b'S']}")
        if key in USED and value:
            found[key] = value
        at = end
    return found


def _member(block: bytes, kind: bytes, size: int, fields: dict[bytes, bytes]) -> Member:
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    name = fields.get(b"path", prefix + b"/" + name if prefix else name)
    target = fields.get(b"linkpath", block[157:257].partition(b"\0")[0])
    if kind not in _KINDS:
        special = _SPECIAL.get(kind, f"a member of kind {kind!r}")
        raise ArchiveError(f"{_text(name)[:80]!r} is {special}, which is not taken")
    if b"size" in fields:
        if not fields[b"size"].isdigit() or len(fields[b"size"]) > 20:
            raise ArchiveError("a header holds no number where one is due")
        size = int(fields[b"size"])
    what = _KINDS[kind]
    if what == "file" and name.endswith(b"/"):
        what = "folder"
    return Member(_text(name), what, _number(block[100:108]), size if what == "file" else 0, _text(target))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
