"""Copies an image from one engine to another, in pieces that the caller carries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.errors import SandboxError, SandboxImageError, SandboxUnavailable
from roll_flash.sandboxes.images.stored_images import inspect_image

IDLE_TIMEOUT_S = 300.0
"""Time in seconds in which an engine packs or unpacks without a word."""
READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FoundImage:
    """The engine that has an image (None: the usual one), or one that could get it."""

    engine: str | None
    size: int
    """Bytes; 0 if the image is missing."""


async def find_image(engines: Sequence[str], image: str) -> FoundImage:
    """Look for an image on any of `engines` (empty: the usual one). Raises SandboxUnavailable if none answers."""
    without: list[FoundImage] = []
    refusals: list[str] = []
    for host in engines or (None,):
        try:
            async with open_engine(host) as engine:
                described = await inspect_image(engine, image)
        except SandboxError as error:
            refusals.append(str(error))
            continue
        if described is not None:
            return FoundImage(host, max(1, int(described.get("Size", 0))))
        without.append(FoundImage(host, 0))
    if not without:
        raise SandboxUnavailable("; ".join(refusals))
    return without[0]


async def image_pieces(host: str | None, image: str, piece_bytes: int) -> AsyncIterator[bytes]:
    """Yield an image as an archive, in pieces of `piece_bytes`, the last one shorter. Raises SandboxError."""
    held = bytearray()
    async with open_engine(host) as engine:
        async for chunk in engine.download(f"/images/{image}/get", idle_timeout_s=IDLE_TIMEOUT_S):
            held += chunk
            while len(held) >= piece_bytes:
                yield bytes(held[:piece_bytes])
                del held[:piece_bytes]
    if held:
        yield bytes(held)


async def load_image(host: str | None, archive: Path) -> None:
    """Load an archive of `image_pieces` into an engine. Raises SandboxError, OSError."""
    async with open_engine(host) as engine:
        answer = engine.stream(
            "POST", "/images/load", query={"quiet": "1"}, content=_read(archive), idle_timeout_s=IDLE_TIMEOUT_S
        )
        async for line in answer:
            if "error" in line:
                raise SandboxImageError(f"the engine cannot load the image: {line['error']}")


async def _read(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(READ_BYTES):
            yield piece
