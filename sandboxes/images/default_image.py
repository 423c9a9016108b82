"""Build the default sandbox image: `python -m roll_flash.sandboxes.images.default_image`.

Uses the Debian image of a registry if one is reachable, else `debootstrap` (as root). Does nothing if the image exists.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.files.build_context import build_archive
from roll_flash.sandboxes.images.build import build_image
from roll_flash.sandboxes.images.debian import BASE_IMAGE, import_debian, pull_image
from roll_flash.sandboxes.images.stored_images import inspect_image
from roll_flash.sandboxes.spec import DEFAULT_IMAGE
from roll_flash.terminal import say

PACKAGES = "python3-minimal"
DOCKERFILE = f"""FROM {BASE_IMAGE}
RUN apt-get update \\
    && apt-get install -y --no-install-recommends {PACKAGES} \\
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/* \\
    && useradd --uid 1000 --user-group --home-dir /sandbox --no-create-home --shell /bin/sh sandbox
USER sandbox
WORKDIR /sandbox
"""
"""The default image: a shell, coreutils and a small Python. Without a registry, debootstrap makes the same one."""


async def ensure_image(provide_debootstrap: Callable[[], None] | None = None) -> None:
    """Ensure that the engine has the default image. Raises SandboxError with instructions for the user.

    `provide_debootstrap` is called before `debootstrap` is needed; it may install it.
    """
    async with open_engine() as engine:
        if await inspect_image(engine, DEFAULT_IMAGE) is not None:
            say(f"sandbox image {DEFAULT_IMAGE} is there")
            return
        began = time.monotonic()
        if await pull_image(engine, BASE_IMAGE):
            await build_image(engine, DEFAULT_IMAGE, build_archive(DOCKERFILE, b""))
        else:
            if provide_debootstrap is not None:
                await asyncio.to_thread(provide_debootstrap)
            changes = ("USER sandbox", "WORKDIR /sandbox")
            await import_debian(engine, DEFAULT_IMAGE, (PACKAGES,), changes=changes, finish=_add_user)
        say(f"sandbox image {DEFAULT_IMAGE} built in {time.monotonic() - began:.0f} s")


def _add_user(root: Path) -> None:
    with open(root / "etc/passwd", "a") as passwd:
        passwd.write("sandbox:x:1000:1000::/sandbox:/bin/sh\n")
    with open(root / "etc/group", "a") as group:
        group.write("sandbox:x:1000:\n")


def main() -> int:
    try:
        asyncio.run(ensure_image())
    except RollFlashError as error:
        say(str(error), error=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
