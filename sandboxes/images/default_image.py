"""Build the default sandbox image: `python -m roll_flash.sandboxes.images.default_image`.

Uses the Debian image of a registry if one is reachable, else `debootstrap` (as root). Does nothing if the image exists.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.api import EngineApi, open_engine
from roll_flash.sandboxes.errors import SandboxImageError
from roll_flash.sandboxes.files.build_context import build_archive
from roll_flash.sandboxes.images.build import build_image, file_content
from roll_flash.sandboxes.images.stored_images import inspect_image
from roll_flash.sandboxes.scratch import scratch_folder
from roll_flash.sandboxes.spec import DEFAULT_IMAGE

BASE_IMAGE = "debian:bookworm-slim"
SUITE = "bookworm"
PACKAGES = "python3-minimal"
PULL_TIMEOUT_S = 15.0
"""Maximum seconds without data from the registry; the whole pull may take PULL_TOTAL_S."""
PULL_TOTAL_S = 600.0
DOCKERFILE = f"""FROM {BASE_IMAGE}
RUN apt-get update \\
    && apt-get install -y --no-install-recommends {PACKAGES} \\
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/* \\
    && useradd --uid 1000 --user-group --home-dir /sandbox --no-create-home --shell /bin/sh sandbox
USER sandbox
WORKDIR /sandbox
"""
"""The default image: a shell, coreutils and a small Python. Without a registry, debootstrap makes the same one."""
STRIPPED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)


async def ensure_image(provide_debootstrap: Callable[[], None] | None = None) -> None:
    """Ensure that the engine has the default image. Raises SandboxError with instructions for the user.

    `provide_debootstrap` is called before `debootstrap` is needed; it may install it.
    """
    async with open_engine() as engine:
        if await inspect_image(engine, DEFAULT_IMAGE) is not None:
            _print(f"sandbox image {DEFAULT_IMAGE} is there")
            return
        began = time.monotonic()
        if await _registry_answers(engine):
            await build_image(engine, DEFAULT_IMAGE, build_archive(DOCKERFILE, b""))
        else:
            if provide_debootstrap is not None:
                await asyncio.to_thread(provide_debootstrap)
            await _build_by_debootstrap(engine)
        _print(f"sandbox image {DEFAULT_IMAGE} built in {time.monotonic() - began:.0f} s")


def _print(line: str) -> None:
    print(line, flush=True)


async def _registry_answers(engine: EngineApi) -> bool:
    if await inspect_image(engine, BASE_IMAGE):
        return True
    _print(f"pulling {BASE_IMAGE}")
    name, tag = BASE_IMAGE.split(":")
    try:
        async with asyncio.timeout(PULL_TOTAL_S):
            async for line in engine.stream(
                "POST", "/images/create", query={"fromImage": name, "tag": tag}, idle_timeout_s=PULL_TIMEOUT_S
            ):
                if "error" in line:
                    raise SandboxImageError(str(line["error"]))
    except (RollFlashError, TimeoutError) as error:
        _print(f"the image registry cannot be used ({str(error)[:160] or 'no answer in time'}); using debootstrap")
        return False
    return True


async def _build_by_debootstrap(engine: EngineApi) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SandboxImageError(
            f"{DEFAULT_IMAGE} cannot be built: no image registry answers, and its substitute, the program debootstrap, "
            + ("needs root" if os.geteuid() else "is not installed (apt-get install debootstrap)")
        )
    with scratch_folder("image") as folder:
        root = folder / "root"
        await asyncio.to_thread(_debootstrap, root)
        await asyncio.to_thread(_finish_root, root)
        archive = folder / "root.tar"
        await asyncio.to_thread(_pack, root, archive)
        _print(f"importing {archive.stat().st_size >> 20} MiB into the engine")
        await _import(engine, archive)


def _debootstrap(root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = time.monotonic()
        for line in process.stdout:
            last = line.strip()
            if time.monotonic() - said > 5:
                _print(f"  debootstrap: {last[:100]}")
                said = time.monotonic()
    if process.returncode:
        raise SandboxImageError(f"debootstrap {SUITE} failed: {last[:300]}")


def _finish_root(root: Path) -> None:
    for folder in STRIPPED:
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True, exist_ok=True)
    with open(root / "etc/passwd", "a") as passwd:
        passwd.write("sandbox:x:1000:1000::/sandbox:/bin/sh\n")
    with open(root / "etc/group", "a") as group:
        group.write("sandbox:x:1000:\n")


def _pack(root: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as packed:
        packed.add(root, arcname=".", filter=lambda member: None if member.isdev() else member)


async def _import(engine: EngineApi, archive: Path) -> None:
    name, _, tag = DEFAULT_IMAGE.partition(":")
    changes = ["USER sandbox", "WORKDIR /sandbox"]
    changes.append("ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    query = [("fromSrc", "-"), ("repo", name), ("tag", tag), *(("changes", change) for change in changes)]
    content = file_content(archive)
    async for line in engine.stream("POST", "/images/create", query=query, content=content, idle_timeout_s=120):
        if "error" in line:
            raise SandboxImageError(f"importing {DEFAULT_IMAGE} failed: {json.dumps(line['error'])[:300]}")


def main() -> int:
    try:
        asyncio.run(ensure_image())
    except RollFlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
