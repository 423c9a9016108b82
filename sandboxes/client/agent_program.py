"""The agent binary: a static C program for the processor of the machine or engine that runs it.

The wheel contains it. In a source checkout it is built once, with the `ziglang` package or the machine's C
compiler, into the user's cache folder under the hash of its sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from roll_flash.cache import cache_root, open_lock
from roll_flash.sandboxes.errors import SandboxUnavailable
from roll_flash.terminal import say

SOURCES = Path(__file__).parents[1] / "agent"
BUILD_TIMEOUT_S = 300.0
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-Os", "-s", "-static", "-Wall", "-Wextra")
PROCESSORS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


FOLDER = "/.roll-flash"
AGENT = f"{FOLDER}/agent"
"""Path of the agent inside a sandbox."""


def agent_program(processor: str | None = None) -> bytes:
    """Return the agent for a processor (default: this machine's), and build it if necessary.

    Raises SandboxUnavailable if the processor is not supported or the build fails.
    """
    machine = processor or platform.machine()
    known = PROCESSORS.get(machine.lower())
    if known is None:
        raise SandboxUnavailable(
            f"the sandbox agent runs on {' and '.join(sorted(set(PROCESSORS.values())))} processors, not on {machine}: "
            "name a docker engine on one of those (DOCKER_HOST); local sandboxes need this machine to be one"
        )
    return _program(known)


@cache
def _program(processor: str) -> bytes:
    shipped = SOURCES / f"agent-{processor}"
    return (shipped if shipped.exists() else _cached_build(processor)).read_bytes()


def cache_folder() -> Path:
    """Return the cache folder of this user, created if missing."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    return root


def _cached_build(processor: str) -> Path:
    sources = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        sources.update(source.name.encode() + b"\0" + source.read_bytes())
    try:
        root = cache_folder()
        target = root / f"agent-{processor}-{sources.hexdigest()[:16]}"
        if target.exists():
            return target
        with open_lock(root / "agent.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                for unfinished in root.glob("agent-*.new"):  # left by a killed compilation: this process holds the lock
                    unfinished.unlink()
                say(f"compiling {target.name} for sandboxes (usually 10-60 s), once", error=True)
                compile_static(processor, sorted(SOURCES.glob("*.c")), target)
    except OSError as error:
        raise SandboxUnavailable(
            f"the sandbox agent cannot be kept: {error}; set ROLL_FLASH_CACHE to a folder that you can write"
        ) from None
    return target


def compile_static(processor: str, sources: Sequence[Path], target: Path) -> None:
    """Compile C sources into a static Linux program, written atomically. Raises SandboxUnavailable."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}.new")
    command = [*_compiler(processor), *FLAGS, *map(str, sources), "-o", str(temporary)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"building {target.name}: {error}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise SandboxUnavailable(f"building {target.name} for {processor} failed: {first[:300]}")
    temporary.chmod(0o755)
    temporary.rename(target)


def _compiler(processor: str) -> list[str]:
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{processor}-linux-musl"]
    compiler = shutil.which("musl-gcc") or shutil.which("cc")
    if compiler and PROCESSORS.get(platform.machine().lower()) == processor:
        return [compiler]
    raise SandboxUnavailable(
        f"the sandbox agent for {processor} is not built and there is no compiler for it: pip install ziglang"
    )
