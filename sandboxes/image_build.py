"""Images built from a spec's Dockerfile, under the hash of what goes into them; each is built once."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from roll_flash.sandboxes.agent_program import cache_folder
from roll_flash.sandboxes.build_context import build_archive
from roll_flash.sandboxes.engine_api import EngineApi, disk_full
from roll_flash.sandboxes.errors import SandboxDiskFull, SandboxImageError, SandboxStartError
from roll_flash.sandboxes.identity import LABEL
from roll_flash.sandboxes.kept_images import BUILDS, use_build
from roll_flash.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

IDLE_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.2
LOCK_TIMEOUTS_S = {"agent": 600.0, "build": 3600.0}
"""How long those that hold a lock, one after the other, are waited for: one may have been stopped."""
LOCKS = 16
PROGRESS_S = 5.0


def image_key(dockerfile: str, context: bytes = b"") -> str:
    digest = hashlib.sha256(dockerfile.encode())
    if context:
        digest.update(b"\0" + hashlib.sha256(context).digest())
    return digest.hexdigest()[:32]


async def image_of(engine: EngineApi, spec: SandboxSpec) -> str:
    """The image that a spec's sandboxes start from, built first if need be. Raises SandboxImageError."""
    if spec.dockerfile is None:
        return spec.image or DEFAULT_IMAGE
    image = f"{BUILDS}:{image_key(spec.dockerfile, spec.context)}"
    if await use_build(engine, image):
        return image
    async with one_at_a_time("build", image):
        if not await use_build(engine, image):
            await _build(engine, image, build_archive(spec.dockerfile, spec.context))
    return image


@asynccontextmanager
async def one_at_a_time(kind: str, what: str = "") -> AsyncIterator[None]:
    """Across the processes of this machine and user; the lock goes with the process that holds it.

    Its files stay, at most LOCKS for a kind, chosen by hash: one that were removed could be held twice, as two files.
    Raises SandboxStartError if it cannot be had in time.
    """
    number = hashlib.sha256(what.encode()).digest()[0] % LOCKS
    path = cache_folder() / f"{kind}-{number}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = await asyncio.to_thread(os.open, path, flags, 0o600)
    try:
        await _take(lock, path, LOCK_TIMEOUTS_S[kind])
        yield
    finally:
        os.close(lock)


async def _take(lock: int, path: Path, timeout_s: float) -> None:
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
            print(f"sandboxes: another process holds {path}; waiting for it", file=sys.stderr, flush=True)
        await asyncio.sleep(LOCK_POLL_S)


async def _build(engine: EngineApi, image: str, archive: bytes) -> None:
    progress = _Progress(image)
    query = {"t": image, "rm": "1", "forcerm": "1", "labels": json.dumps({LABEL: "image"})}
    try:
        async for line in engine.stream("POST", "/build", query=query, content=archive, idle_timeout_s=IDLE_TIMEOUT_S):
            if "error" in line:
                raise build_error(str(line["error"]))
            if said := str(line.get("stream", "")).strip():
                progress.note(said)
    except httpx.HTTPError as error:
        raise SandboxImageError(f"building the image of a spec: the engine stopped answering: {error!r}") from None
    progress.done()


def build_error(said: str) -> SandboxImageError | SandboxDiskFull:
    """What the engine's words about a build that failed mean."""
    if "no space left" in said:
        return disk_full(said)
    if "could not find bridge" in said:
        # Seen after a second engine of the same machine, without a bridge of its own, had removed it.
        said = f"the engine's network bridge is gone, restart the engine ({said})"
    return SandboxImageError(f"building the image of a spec failed: {said[:300]}")


class _Progress:
    """Lines on standard error: at the beginning, every PROGRESS_S, and at the end."""

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
        print(f"sandbox image {self._image}: {what}", file=sys.stderr, flush=True)
