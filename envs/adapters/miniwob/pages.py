"""The pages of the package miniwob, and the script that runs in each of them."""

from __future__ import annotations

import io
import tarfile
from functools import cache
from pathlib import Path

from roll_flash.envs.adapters.miniwob.gold import GOLD
from roll_flash.envs.adapters.optional_package import import_optional
from roll_flash.sandboxes import SandboxSpec

SCRIPT = (Path(__file__).parent / "page.js").read_text()
FOLDER = "html"
"""Where they lie in the sandbox's working folder."""


def pages_archive(needed_by: str) -> bytes:
    """Return a tar archive of the pages of all tasks and what they load. Raises ConfigError without the package."""
    package = import_optional("miniwob", package="miniwob", needed_by=needed_by)
    return _packed(Path(package.__path__[0]) / "html")


@cache
def _packed(folder: Path) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as packed:
        for name in ("core", "common/ui_utils.js"):
            packed.add(folder / name, name)
        for name in GOLD:
            packed.add(folder / "miniwob" / f"{name}.html", f"miniwob/{name}.html")
    return archive.getvalue()


def url_of(task: str, spec: SandboxSpec) -> str:
    return f"file://{spec.workdir}/{FOLDER}/miniwob/{task}.html"
