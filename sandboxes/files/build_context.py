"""Build contexts of Dockerfiles as one archive, whose bytes depend only on names, modes and contents."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path

from roll_flash.sandboxes.errors import SandboxSpecError

DOCKERFILE = "Dockerfile"
MAX_CONTEXT_BYTES = 64 << 20


def packed_files(files: Mapping[str, bytes | str]) -> bytes:
    """Pack a build context of regular files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(files.items()):
            _add(archive, name, 0o644, content.encode() if isinstance(content, str) else content)
    return packed.getvalue()


def read_build_folder(folder: Path) -> tuple[str, bytes]:
    """Return (text of the Dockerfile, archive of the folder's other files). Raises SandboxSpecError."""
    if not (folder / DOCKERFILE).is_file():
        raise SandboxSpecError(f"{folder}: there is no {DOCKERFILE} in it")
    packed, total = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            name, status = str(path.relative_to(folder)), path.lstat()
            if stat.S_ISLNK(status.st_mode):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, str(path.readlink())
                archive.addfile(link)
            elif stat.S_ISREG(status.st_mode) and name != DOCKERFILE:
                total += status.st_size
                if total > MAX_CONTEXT_BYTES:
                    raise SandboxSpecError(
                        f"{folder}: more than {MAX_CONTEXT_BYTES >> 20} MiB for a build; move what the image does not "
                        "need out of the folder"
                    )
                _add(archive, name, 0o755 if status.st_mode & 0o100 else 0o644, path.read_bytes())
    return (folder / DOCKERFILE).read_text(encoding="utf-8"), packed.getvalue()


def build_archive(dockerfile: str, context: bytes) -> bytes:
    """Return the archive for the engine's builder: the context and the Dockerfile. Raises SandboxSpecError."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if context:
            try:
                with tarfile.open(fileobj=io.BytesIO(context)) as given:
                    for member in given:
                        if member.name.removeprefix("./") != DOCKERFILE:
                            archive.addfile(member, given.extractfile(member) if member.isreg() else None)
            except (tarfile.TarError, EOFError) as error:
                raise SandboxSpecError(f"context: no tar archive: {error}") from None
        _add(archive, DOCKERFILE, 0o644, dockerfile.encode())
    return packed.getvalue()


def _add(archive: tarfile.TarFile, name: str, mode: int, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))
