"""Build contexts of Dockerfiles as one archive, whose bytes depend only on names, modes and contents."""

from __future__ import annotations

import io
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from roll_flash.sandboxes.errors import SandboxSpecError

DOCKERFILE = "Dockerfile"
IGNORE_FILES = (f"{DOCKERFILE}.dockerignore", ".dockerignore")
"""The first one that is there says which files are no part of the context."""
MAX_CONTEXT_BYTES = 64 << 20
MAX_IGNORE_BYTES = 1 << 16
MAX_DOCKERFILE_BYTES = 1 << 20
_ESCAPED = re.compile(r"\\([*?\[])")


def packed_files(files: Mapping[str, bytes | str]) -> bytes:
    """Pack a build context of regular files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(files.items()):
            _add(archive, name, 0o644, content.encode() if isinstance(content, str) else content)
    return packed.getvalue()


@dataclass(frozen=True, slots=True)
class _Rule:
    """A line of .dockerignore."""

    parts: tuple[str, ...]
    is_exception: bool
    """The line begins with `!`: what it matches is taken."""

    def matches(self, names: tuple[str, ...]) -> bool:
        """True if the pattern matches the path, or a folder in which it lies. Takes parts times names steps."""
        reached = {0}  # numbers of names that the parts so far can match
        for part in self.parts:
            if part == "**":
                reached = set(range(min(reached), len(names) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(names) and fnmatchcase(names[at], part)}
            if not reached:
                return False
        return max(reached) > 0


def _ignore_rules(folder: Path) -> list[_Rule]:
    """Return the rules of the folder's .dockerignore, as the engine's own client reads them, which leaves out what they
    name before the engine sees it. Raises SandboxSpecError."""
    file = next((folder / name for name in IGNORE_FILES if (folder / name).is_file()), None)
    if file is None:
        return []
    if file.is_symlink() or file.stat().st_size > MAX_IGNORE_BYTES:
        raise SandboxSpecError(f"{file}: a link, or larger than {MAX_IGNORE_BYTES >> 10} KiB")
    lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    return [_rule(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def _rule(line: str) -> _Rule:
    pattern = posixpath.normpath(line.removeprefix("!").strip()).lstrip("/")
    pattern = _ESCAPED.sub(r"[\1]", pattern.replace("[^", "[!")).replace("\\", "")
    return _Rule(tuple(_parts(pattern)), line.startswith("!"))


def _parts(pattern: str) -> Iterator[str]:
    """Yield the names of a pattern. `**` beside other characters stands for any folders and ends a name, and begins one
    as well if it begins the pattern and no other sign follows: `**.key` is `**/*.key`."""
    begins_name = not any(sign in pattern[2:] for sign in "*?[")
    for place, part in enumerate(pattern.split("/")):
        begin, stars, end = part.partition("**")
        if begin:
            yield begin + "*" * bool(stars)
        if stars:
            yield stars
        if end.strip("*"):
            yield f"*{end}" if begins_name and not place else end


def _is_ignored(rules: list[_Rule], names: tuple[str, ...]) -> bool:
    """The last rule that matches decides."""
    return next((not rule.is_exception for rule in reversed(rules) if rule.matches(names)), False)


def read_build_folder(folder: Path) -> tuple[str, bytes]:
    """Return (text of the Dockerfile, archive of the folder's other files, without those that its .dockerignore names).

    Raises SandboxSpecError.
    """
    if not (folder / DOCKERFILE).is_file():
        raise SandboxSpecError(f"{folder}: there is no {DOCKERFILE} in it")
    if (folder / DOCKERFILE).stat().st_size > MAX_DOCKERFILE_BYTES:
        raise SandboxSpecError(f"{folder / DOCKERFILE}: larger than {MAX_DOCKERFILE_BYTES >> 20} MiB")
    packed, total, rules = io.BytesIO(), 0, _ignore_rules(folder)
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            name, status = str(path.relative_to(folder)), path.lstat()
            if _is_ignored(rules, path.relative_to(folder).parts):
                continue
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
    try:
        return (folder / DOCKERFILE).read_text(encoding="utf-8"), packed.getvalue()
    except UnicodeDecodeError as error:
        raise SandboxSpecError(f"{folder / DOCKERFILE}: is no UTF-8 text ({error.reason})") from None


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
