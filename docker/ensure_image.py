"""Build the sandbox image (`make image`), or say in one line why the weaker `local` sandbox is used instead.

Where no image registry answers, debootstrap makes the image; as root it is installed with apt if it is missing.
Exit status 0 if either sandbox can be used, 1 if neither.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import apt
from ensure_engine import use_local

from roll_flash.doctor import check_docker
from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.images.default_image import ensure_image


def main() -> int:
    if not check_docker().ok:
        print("image: no Docker engine, so none is needed")
        return 0
    try:
        asyncio.run(ensure_image(partial(apt.provide, "debootstrap", "debootstrap")))
    except RollFlashError as error:
        return use_local(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
