"""Build the image of the third-party agents: `make agents-image`, or `python docker/agents_image.py`.

On top of the sandbox image: the whole standard library of its Python, and the wheels of requirements/agents.txt as they
were published. Everything is fetched on this machine, by its own pip and apt; where this machine's apt does not fit the
image, the standard library is installed during the build, which then needs the engine's network. Built again only when
the requirements, the sandbox image or the recipe below changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from roll_flash.doctor import check_docker, check_image
from roll_flash.envs.agents.presets import AGENTS_IMAGE
from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.api import open_engine
from roll_flash.sandboxes.errors import SandboxImageError
from roll_flash.sandboxes.images.build import build_image, file_content
from roll_flash.sandboxes.images.stored_images import inspect_image
from roll_flash.sandboxes.spec import DEFAULT_IMAGE

REQUIREMENTS = Path(__file__).parent.parent / "requirements" / "agents.txt"
PYTHON = "3.11"
LIBRARY = f"/usr/local/lib/python{PYTHON}/dist-packages"
SYSTEM_PACKAGES = (f"libpython{PYTHON}-stdlib", "libsqlite3-0", "libncursesw6", "libreadline8", "media-types")
LABEL_AGENTS = "roll-flash.agents"
FETCH_TIMEOUT_S = 600.0
MAX_ERROR = 600

FROM_DEBS = "COPY root/ /\n"
FROM_APT = f"RUN apt-get update && apt-get install -y --no-install-recommends {' '.join(SYSTEM_PACKAGES)}\n"
REST = f"""COPY packages/ {LIBRARY}/
RUN python3 -m compileall -q -j 0 {LIBRARY} /usr/lib/python{PYTHON}
USER sandbox
"""


async def ensure() -> None:
    """Raises SandboxError with what to do."""
    async with open_engine() as engine:
        base = await inspect_image(engine, DEFAULT_IMAGE)
        if base is None:
            raise SandboxImageError(f"{DEFAULT_IMAGE} is not there, on which {AGENTS_IMAGE} is built: make image")
        labels = {LABEL_AGENTS: _recipe(base["Id"])}
        existing = await inspect_image(engine, AGENTS_IMAGE)
        if existing is not None and labels.items() <= (existing["Config"]["Labels"] or {}).items():
            print(f"agents image {AGENTS_IMAGE} is there")
            return
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="roll-flash-agents-") as folder:
            context = await asyncio.to_thread(_context, Path(folder))
            await build_image(engine, AGENTS_IMAGE, file_content(context), labels)
        print(f"agents image {AGENTS_IMAGE}: fetched and built in {time.monotonic() - began:.0f} s")


def _recipe(base: str) -> str:
    parts = (base, REQUIREMENTS.read_text(), *SYSTEM_PACKAGES, FROM_DEBS, REST)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _context(folder: Path) -> Path:
    """The build's context as one tar file."""
    print(f"agents image: fetching the packages of {REQUIREMENTS.name}", flush=True)
    _fetch_packages(folder / "packages")
    has_debs = _fetch_system_packages(folder / "debs", folder / "root")
    dockerfile = f"FROM {DEFAULT_IMAGE}\nUSER root\n{FROM_DEBS if has_debs else FROM_APT}{REST}"
    archive = folder / "context.tar"
    with tarfile.open(archive, "w") as packed:
        for name in ("packages", "root") if has_debs else ("packages",):
            packed.add(folder / name, arcname=name, filter=_as_root)
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile.encode())
        packed.addfile(member, io.BytesIO(dockerfile.encode()))
    return archive


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.mode |= 0o755 if member.isdir() else 0o444
    return member


def _fetch_packages(target: Path) -> None:
    """The wheels for the sandbox's Python, unpacked as they are; nothing is compiled."""
    processor = platform.machine()
    platforms = [f"manylinux_2_{minor}_{processor}" for minor in (17, 28, 34)] + [f"manylinux2014_{processor}"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-compile", "--only-binary=:all:", f"--python-version={PYTHON}", f"--target={target}"]
    _run([*command, *(f"--platform={name}" for name in platforms), "-r", str(REQUIREMENTS)])


def _fetch_system_packages(debs: Path, root: Path) -> bool:
    """The missing part of the standard library, unpacked into `root`; False where this machine's apt has another."""
    release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    if "VERSION_CODENAME=bookworm" not in release or not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        return False
    debs.mkdir()
    debs.chmod(0o777)  # apt fetches as a user of its own
    try:
        _download_debs(debs)
    except SandboxImageError as error:
        print(f"agents image: {error}; installing during the build", flush=True)
        return False
    root.mkdir()
    for package in sorted(debs.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])
    for links in ("lib", "bin", "sbin"):  # those of the image are links into /usr
        if (root / links).is_dir():
            shutil.copytree(root / links, root / "usr" / links, dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(root / links)
    shutil.rmtree(root / "usr/share", ignore_errors=True)
    return True


def _download_debs(folder: Path) -> None:
    command = ["apt-get", "download", "--quiet", *SYSTEM_PACKAGES]
    try:
        _run(command, cwd=folder)
    except SandboxImageError:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update", "--quiet"])  # a fresh machine has no lists of packages yet
        _run(command, cwd=folder)


def _run(command: list[str], *, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SandboxImageError(f"{' '.join(command[:4])} took longer than {FETCH_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-MAX_ERROR:]
        raise SandboxImageError(f"{' '.join(command[:4])} failed: {said}")


def main() -> int:
    if not check_docker().ok:
        print("agents image: no Docker engine, so none is needed")
        return 0
    if not check_image().ok:
        print("agents image: there is no sandbox image to build it on, so none is built (make image says why)")
        return 0
    try:
        asyncio.run(ensure())
    except RollFlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
