"""Folders that other nodes need at the same path as on the driver's node: what is in them, and how they get there.

A node keeps what it got, so that a later run sends nothing. A record in the folder tells what was sent: such files may
be replaced by newer ones, other files never are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_flash.errors import RunError

Piece = list[tuple[str, int, bytes]]
"""Names of files, offsets in bytes, and what is there."""
PIECE_BYTES = 32 * 2**20
EDGE_BYTES = 2**20
MAX_CODE_BYTES = 100 * 2**20
MAX_CODE_FILES = 20_000
IGNORED = frozenset({"__pycache__", "runs", "venv", "node_modules"})
"""Folders that are not sent; nor is anything whose name begins with a dot."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
"""Ends of names of files with weights."""
RECORD = ".roll-flash-sent.json"
STAGING = ".roll-flash-part-"
STAGING_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class FileMark:
    """Size in bytes, access mode, and a hash of size, first and last MiB of a file."""

    size: int
    mode: int
    digest: str

    @classmethod
    def of(cls, file: Path) -> FileMark:
        """Raises OSError."""
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            found = hashlib.sha256(f"{status.st_size} ".encode() + opened.read(EDGE_BYTES))
            opened.seek(max(EDGE_BYTES, status.st_size - EDGE_BYTES))
            found.update(opened.read(EDGE_BYTES))
        return cls(status.st_size, stat.S_IMODE(status.st_mode), found.hexdigest())


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files that a node needs below `path`. `what`: for messages, such as `the model tiny-1`."""

    what: str
    path: Path
    files: Mapping[str, FileMark]
    too_large: bool = False
    """True if there is more than may be sent; then `files` is incomplete."""

    @property
    def code(self) -> Wanted:
        """Its Python files; all files if there are none."""
        python = {name: mark for name, mark in self.files.items() if name.endswith(".py")}
        return Wanted(self.what, self.path, python or self.files, self.too_large)

    def without_weights(self, what: str) -> Wanted:
        """Return what a tokenizer needs of a model's folder: all but its large files."""
        small = {name: mark for name, mark in self.files.items() if not name.endswith(WEIGHTS)}
        return Wanted(what, self.path, small)


@dataclass(frozen=True, slots=True)
class Compared:
    """Names of wanted files that a node lacks or has in an older version that was sent, and of those that differ."""

    missing: tuple[str, ...]
    different: tuple[str, ...]


def whole(what: str, folder: Path) -> Wanted:
    """Return all files of a folder."""
    return Wanted(what, folder, {name: FileMark.of(file) for name, file in files_in(folder)})


def limited(path: Path) -> Wanted:
    """Return a file or folder with a limit on what may be sent."""
    if path.is_file():
        return Wanted(str(path), path.parent, {path.name: FileMark.of(path)}, path.stat().st_size > MAX_CODE_BYTES)
    what = f"the code in {path}"
    files: dict[str, FileMark] = {}
    left = MAX_CODE_BYTES
    for name, file in files_in(path):
        left -= file.stat().st_size
        if left < 0 or len(files) >= MAX_CODE_FILES:
            return Wanted(what, path, files, too_large=True)
        files[name] = FileMark.of(file)
    return Wanted(what, path, files)


def files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the regular files of a folder with their names in it, without IGNORED; linked folders once."""
    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        below = [name for name in sorted(folders) if not name.startswith(".") and name not in IGNORED]
        real = {name: os.path.realpath(os.path.join(root, name)) for name in below}
        folders[:] = [name for name in below if real[name] not in seen]
        seen.update(real.values())
        for name in sorted(files):
            file = Path(root, name)
            if not name.startswith(".") and file.is_file():
                yield str(file.relative_to(folder)), file


def compare(wanted: Wanted) -> Compared:
    """Compare the wanted files with those of this node."""
    sent = _record(wanted.path)
    missing: list[str] = []
    different: list[str] = []
    for name, mark in wanted.files.items():
        try:
            here = FileMark.of(wanted.path / name).digest
        except FileNotFoundError:
            missing.append(name)
            continue
        except OSError:  # such as a folder in its place
            here = ""
        if here != mark.digest:
            (missing if sent.get(name) == here else different).append(name)
    return Compared(tuple(missing), tuple(different))


def pieces(wanted: Wanted, names: Sequence[str]) -> Iterator[Piece]:
    """Yield the contents of files in pieces of at most PIECE_BYTES, each with many small files or a part of a large
    one."""
    piece: Piece = []
    left = PIECE_BYTES
    for name in names:
        with (wanted.path / name).open("rb") as opened:
            offset = 0
            while (data := opened.read(left)) or not offset:
                piece.append((name, offset, data))
                offset += len(data)
                left -= len(data)
                if not left:
                    yield piece
                    piece, left = [], PIECE_BYTES
                if not data:
                    break
    if piece:
        yield piece


def digest_of(piece: Piece) -> str:
    """Return the SHA-256 of a piece, names and offsets included."""
    found = hashlib.sha256()
    for name, offset, data in piece:
        found.update(f"{name} {offset} {len(data)} ".encode())
        found.update(data)
    return found.hexdigest()


def write_piece(folder: Path, token: str, piece: Piece, digest: str) -> None:
    """Write a piece beside the places of its files; `token` names this transfer. Raises OSError, RunError if the piece
    is not the one with this digest."""
    if digest_of(piece) != digest:
        raise RunError(f"a piece of {folder} arrived damaged; start the run again")
    for name, offset, data in piece:
        part = part_of(folder, token, name)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("r+b" if offset else "wb") as opened:
            opened.seek(offset)
            opened.write(data)


def part_of(folder: Path, token: str, name: str) -> Path:
    """Return where the file of a transfer is before it is complete."""
    return folder / f"{STAGING}{token}" / name


def put_in_place(wanted: Wanted, token: str, names: tuple[str, ...]) -> None:
    """Move the complete files of a transfer to their places. Raises OSError."""
    staging = wanted.path / f"{STAGING}{token}"
    for name in names:
        (staging / name).chmod(wanted.files[name].mode)
        (wanted.path / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(wanted.path / name)
    record = _record(wanted.path) | {name: wanted.files[name].digest for name in names}
    (staging / RECORD).write_text(json.dumps(record))
    (staging / RECORD).replace(wanted.path / RECORD)
    shutil.rmtree(staging)
    for left in wanted.path.glob(f"{STAGING}*"):  # of transfers that were interrupted
        if time.time() - left.stat().st_mtime > STAGING_AGE_S:
            shutil.rmtree(left, ignore_errors=True)


def _record(folder: Path) -> dict[str, str]:
    """Return the digests of the files that were sent into a folder; empty without a record that can be read."""
    try:
        found = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
