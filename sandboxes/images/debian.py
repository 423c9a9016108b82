"""A Debian image to build on: pulled from a registry, or made by `debootstrap` (as root) where none answers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.errors import SandboxImageError
from roll_flash.sandboxes.images.build import file_content
from roll_flash.sandboxes.images.stored_images import inspect_image
from roll_flash.sandboxes.scratch import scratch_folder
from roll_flash.terminal import say

BASE_IMAGE = "debian:bookworm-slim"
SUITE = "bookworm"
PULL_TIMEOUT_S = 15.0
"""Maximum seconds without data from the registry; the whole pull may take PULL_TOTAL_S."""
PULL_TOTAL_S = 600.0
STRIPPED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)


async def pull_image(engine: EngineApi, image: str) -> bool:
    """Pull an image that the engine does not have; print why and return False if no registry gives it."""
    if await inspect_image(engine, image):
        return True
    say(f"pulling {image}")
    name, _, tag = image.rpartition(":")
    try:
        async with asyncio.timeout(PULL_TOTAL_S):
            async for line in engine.stream(
                "POST", "/images/create", query={"fromImage": name, "tag": tag}, idle_timeout_s=PULL_TIMEOUT_S
            ):
                if "error" in line:
                    raise SandboxImageError(str(line["error"]))
    except (RollFlashError, TimeoutError) as error:
        say(f"the image registry cannot be used ({str(error)[:160] or 'no answer in time'}); using debootstrap")
        return False
    return True


async def import_debian(
    engine: EngineApi,
    image: str,
    packages: Sequence[str],
    *,
    changes: Sequence[str] = (),
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Make an image of a small Debian with `packages`. `changes` are Dockerfile lines; `finish` gets the root folder.

    Raises SandboxImageError with instructions for the user.
    """
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SandboxImageError(
            f"{image} cannot be built: no image registry answers, and its substitute, the program debootstrap, "
            + ("needs root" if os.geteuid() else "is not installed (apt-get install debootstrap)")
        )
    with scratch_folder("image") as folder:
        root = folder / "root"
        await asyncio.to_thread(_debootstrap, root, packages)
        await asyncio.to_thread(_strip, root)
        if finish is not None:
            await asyncio.to_thread(finish, root)
        archive = folder / "root.tar"
        await asyncio.to_thread(_pack, root, archive)
        say(f"importing {archive.stat().st_size >> 20} MiB into the engine")
        await _import(engine, image, archive, changes)


def _debootstrap(root: Path, packages: Sequence[str]) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, str(root)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = time.monotonic()
        for line in process.stdout:
            last = line.strip()
            if time.monotonic() - said > 5:
                say(f"  debootstrap: {last[:100]}")
                said = time.monotonic()
    if process.returncode:
        raise SandboxImageError(f"debootstrap {SUITE} failed: {last[:300]}")


def _strip(root: Path) -> None:
    for folder in STRIPPED:
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True, exist_ok=True)


def _pack(root: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as packed:
        packed.add(root, arcname=".", filter=lambda member: None if member.isdev() else member)


async def _import(engine: EngineApi, image: str, archive: Path, changes: Sequence[str]) -> None:
    name, _, tag = image.partition(":")
    lines = [*changes, "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    query = [("fromSrc", "-"), ("repo", name), ("tag", tag), *(("changes", line) for line in lines)]
    content = file_content(archive)
    async for line in engine.stream("POST", "/images/create", query=query, content=content, idle_timeout_s=120):
        if "error" in line:
            raise SandboxImageError(f"importing {image} failed: {json.dumps(line['error'])[:300]}")
