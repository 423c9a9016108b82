"""Build images from the Dockerfile of a spec, named by the hash of their inputs; each image is built once."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from roll_flash.sandboxes.client.agent_program import cache_folder
from roll_flash.sandboxes.docker.api import EngineApi, disk_full
from roll_flash.sandboxes.errors import SandboxDiskFull, SandboxImageError, SandboxImageMissing, SandboxStartError
from roll_flash.sandboxes.files.build_context import build_archive
from roll_flash.sandboxes.images.stored_images import BUILDS, IMAGE_NAME, use_build
from roll_flash.sandboxes.owner import LABEL
from roll_flash.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec
from roll_flash.terminal import one_line, say

IDLE_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.2
LOCK_TIMEOUTS_S = {"agent": 600.0, "build": 3600.0}
"""Maximum seconds to wait for a lock of each kind, over all its holders: one may be a stopped process."""
LOCKS = 16
PROGRESS_S = 5.0
PIECE_BYTES = 1 << 20


def image_key(dockerfile: str, context: bytes = b"") -> str:
    digest = hashlib.sha256(dockerfile.encode())
    if context:
        digest.update(b"\0" + hashlib.sha256(context).digest())
    return digest.hexdigest()[:32]


def build_name(spec: SandboxSpec) -> str:
    """Return the image that is built from the Dockerfile of a spec."""
    assert spec.dockerfile is not None
    return f"{BUILDS}:{image_key(spec.dockerfile, spec.context)}"


async def image_of(engine: EngineApi, spec: SandboxSpec) -> str:
    """Return the image of a spec; build it first if necessary. Raises SandboxImageError."""
    if spec.dockerfile is None:
        image = spec.image or DEFAULT_IMAGE
        if not IMAGE_NAME.fullmatch(image):
            raise SandboxImageMissing(f"{image[:100]!r} is no name of an image")
        return image
    image = build_name(spec)
    if await use_build(engine, image):
        return image
    async with one_at_a_time("build", image):
        if not await use_build(engine, image):
            await build_image(engine, image, build_archive(spec.dockerfile, spec.context), {LABEL: "image"})
    return image


@asynccontextmanager
async def one_at_a_time(kind: str, what: str = "") -> AsyncIterator[None]:
    """Hold a lock across the processes of this machine and user; it is released when its process ends.

    The files are never deleted, else two processes could hold the same lock on two files. At most LOCKS per kind,
    chosen by hash. Raises SandboxStartError if other processes hold the lock longer than LOCK_TIMEOUTS_S.
    """
    number = hashlib.sha256(what.encode()).digest()[0] % LOCKS
    path = cache_folder() / f"{kind}-{number}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = await asyncio.to_thread(os.open, path, flags, 0o600)
    try:
        await _acquire(lock, path, LOCK_TIMEOUTS_S[kind])
        yield
    finally:
        os.close(lock)


async def _acquire(lock: int, path: Path, timeout_s: float) -> None:
    """Wait for the lock and report the wait every PROGRESS_S seconds. Raises SandboxStartError after `timeout_s`."""
    began = shown = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
        if now - began >= timeout_s:
            raise SandboxStartError(
                f"another process of this user has held {path} for {timeout_s:g} s: `fuser {path}` names it, end it"
            )
        if now - shown >= PROGRESS_S:
            shown = now
            say(f"sandboxes: another process holds {path}; waiting for it", error=True)
        await asyncio.sleep(LOCK_POLL_S)


async def build_image(
    engine: EngineApi,
    image: str,
    archive: bytes | AsyncIterator[bytes],
    labels: dict[str, str] | None = None,
    *,
    arguments: dict[str, str] | None = None,
) -> None:
    """Build an image from an archive with a Dockerfile; `arguments` are for its ARG lines.

    Raises SandboxImageError, SandboxDiskFull.
    """
    progress = _Progress(image)
    query = {"t": image, "rm": "1", "forcerm": "1", "labels": json.dumps(labels or {})}
    query["buildargs"] = json.dumps(arguments or {})
    async for line in engine.stream("POST", "/build", query=query, content=archive, idle_timeout_s=IDLE_TIMEOUT_S):
        if "error" in line:
            raise build_error(image, str(line["error"]))
        if said := str(line.get("stream", "")).strip():
            progress.note(said)
    progress.done()


async def file_content(path: Path) -> AsyncIterator[bytes]:
    """Yield the content of a file in pieces, to send it as a request."""
    with await asyncio.to_thread(path.open, "rb") as opened:
        while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
            yield piece


def build_error(image: str, said: str) -> SandboxImageError | SandboxDiskFull:
    """Return the error for the engine's message about a failed build."""
    if "no space left" in said:
        return disk_full(said)
    if "could not find bridge" in said:
        # Observed after a second engine on the same machine, configured without a bridge, had removed it.
        said = f"the engine's network bridge is gone, restart the engine ({said})"
    return SandboxImageError(f"building {image} failed: {said[:300]}")


class _Progress:
    """Prints progress to standard error: at the start, every PROGRESS_S seconds, and at the end."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._began = self._shown = time.monotonic()
        self._show("is built, once")

    def note(self, line: str) -> None:
        if time.monotonic() - self._shown >= PROGRESS_S:
            self._shown = time.monotonic()
            self._show(line[:160])

    def done(self) -> None:
        self._show(f"is ready after {time.monotonic() - self._began:.0f} s")

    def _show(self, what: str) -> None:
        say(one_line(f"image {self._image}: {what}"), error=True)
