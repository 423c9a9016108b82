"""Build the image with Chromium, for `MiniWoB-v0`: `make browser-image`, or `python docker/browser_image.py`.

Debian's Chromium and a font, on the Debian image of a registry, or made by debootstrap where none answers (as root).
Built again only when the recipe below changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time

import apt

from roll_flash.doctor import check_docker
from roll_flash.envs.adapters.miniwob.browser import BROWSER_IMAGE
from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.files.build_context import build_archive
from roll_flash.sandboxes.images.build import build_image
from roll_flash.sandboxes.images.debian import BASE_IMAGE, import_debian, pull_image
from roll_flash.sandboxes.images.stored_images import inspect_image

PACKAGES = ("chromium-headless-shell", "fonts-liberation")
DOCKERFILE = f"""FROM {BASE_IMAGE}
RUN apt-get update \\
    && apt-get install -y --no-install-recommends {" ".join(PACKAGES)} \\
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*
"""
LABEL, RECIPE = "roll-flash.browser", hashlib.sha256(DOCKERFILE.encode()).hexdigest()[:32]


async def ensure() -> None:
    """Raises SandboxError with what to do."""
    async with open_engine() as engine:
        existing = await inspect_image(engine, BROWSER_IMAGE)
        if existing is not None and (existing["Config"]["Labels"] or {}).get(LABEL) == RECIPE:
            print(f"browser image {BROWSER_IMAGE} is there")
            return
        began = time.monotonic()
        if await pull_image(engine, BASE_IMAGE):
            await build_image(engine, BROWSER_IMAGE, build_archive(DOCKERFILE, b""), {LABEL: RECIPE})
        else:
            await asyncio.to_thread(apt.provide, "debootstrap", "debootstrap")
            await import_debian(engine, BROWSER_IMAGE, PACKAGES, changes=[f"LABEL {LABEL}={RECIPE}"])
        print(f"browser image {BROWSER_IMAGE}: built in {time.monotonic() - began:.0f} s")


def main() -> int:
    if not check_docker().ok:
        print("browser image: no Docker engine, so none is needed")
        return 0
    try:
        asyncio.run(ensure())
    except RollFlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
