"""Model of a directory tree in memory: resolves links step by step, like the kernel, without a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095
MAX_DEPTH = 200
"""Maximum nesting of folders; the agent has the same limit for listings (`agent/folders.c`)."""
MAX_LINKS = 40
"""Maximum number of links in one path, as in the kernel."""
MAX_STEPS = 512
"""Maximum number of parts of one path, including the parts of its links. Real trees stay far below."""
STEPS_PER_ENTRY = 32
"""Maximum steps for a whole tree, per member on average; parts of names and fields of headers count too."""


class EscapesTree(Exception):
    """A name or a link leaves its tree, or it is unknown where it leads."""


def encoded(name: str) -> bytes:
    """Return the bytes of a name or target. A sandbox has UTF-8, whatever the locale of this process says."""
    return name.encode("utf-8", "surrogateescape")


def decoded(raw: bytes) -> str:
    """Return the name or target with these bytes; invalid UTF-8 bytes become surrogates."""
    return raw.decode("utf-8", "surrogateescape")


@dataclass(slots=True, eq=False)
class Folder:
    above: Folder | None = None
    """Parent folder; None for the root of the tree."""
    depth: int = 0
    path: str = ""
    """Path from the root."""
    members: dict[str, Node] = field(default_factory=dict)

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def make_folder(self, name: str) -> Folder:
        """Create a folder in this one. Raises EscapesTree if it is nested too deep for common tools."""
        made = Folder(self, self.depth + 1, self.path_of(name))
        if made.depth > MAX_DEPTH or len(encoded(made.path)) > MAX_PATH_BYTES:
            raise EscapesTree(f"{made.path[:80]!r}… lies too deep")
        self.members[name] = made
        return made


@dataclass(frozen=True, slots=True)
class File:
    mode: int
    size: int
    offset: int = 0
    """Start of its content in the file of unpacked contents."""


@dataclass(frozen=True, slots=True)
class Link:
    target: str


Node: TypeAlias = Folder | File | Link


def parts_of(name: str) -> list[str]:
    """Split a relative path that stays below its start. Raises EscapesTree for any other path."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise EscapesTree(f"{name[:80]!r} is no plain path below the folder")
    too_long = len(encoded(name)) > MAX_PATH_BYTES or any(len(encoded(part)) > MAX_NAME_BYTES for part in parts)
    if too_long or len(parts) > MAX_DEPTH + 1:
        raise EscapesTree(f"{name[:80]!r}… is too long for a path")
    return parts


class StepCounter:
    """Limits the work of resolving names and links in a tree with `entries` members. Raises EscapesTree."""

    def __init__(self, entries: int) -> None:
        self._left = STEPS_PER_ENTRY * entries + MAX_STEPS

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise EscapesTree("its links, names and headers take too many steps")


def follow(folder: Folder, target: str, count: Callable[[], None]) -> Node | None:
    """Resolve a link in `folder`; None if its target does not exist. Calls `count` at each step.

    Raises EscapesTree if a step leaves the tree, goes up from a missing member, or exceeds a limit.
    """
    here: Node = folder
    waiting, links, steps = _reversed_parts(target), 0, 0
    while waiting:
        part, steps = waiting.pop(), steps + 1
        count()
        if steps > MAX_STEPS or links > MAX_LINKS:
            raise EscapesTree(f"a link to {target[:80]!r} leads through too much")
        if part in ("", "."):
            continue
        if not isinstance(here, Folder):
            raise EscapesTree(f"a link to {target[:80]!r} leads nowhere")
        found = here.above if part == ".." else here.members.get(part)
        if found is None:
            if part == ".." or ".." in waiting:
                raise EscapesTree(f"a link to {target[:80]!r} leads out of the folder")
            return None
        if isinstance(found, Link):
            links += 1
            waiting += _reversed_parts(found.target)
        else:
            here = found
    return here


def _reversed_parts(target: str) -> list[str]:
    if target.count("/") >= MAX_STEPS:
        raise EscapesTree(f"a link to {target[:80]!r} leads through too much")
    if not target or target.startswith("/") or "\0" in target or len(encoded(target)) > MAX_PATH_BYTES:
        raise EscapesTree(f"a link to {target[:80]!r} leads out of the folder")
    return target.split("/")[::-1]


def walk(root: Folder) -> Iterator[tuple[Folder, str, Node]]:
    """Yield (folder, name in it, member) for all members below `root`; a folder comes before its members."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        for name, member in folder.members.items():
            yield folder, name, member
            if isinstance(member, Folder):
                waiting.append(member)
