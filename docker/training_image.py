"""Build the training image: `make training-image`, or `python docker/training_image.py [cpu|gpu]`.

docker/training/Dockerfile with what it needs: the wheels of requirements/, fetched on this machine by its own pip, and
a Debian to build on, made by debootstrap where no image registry answers. The build itself then needs no network. Built
again only when the sources, the requirements or the Dockerfile changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import apt

from roll_flash.doctor import check_docker
from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.api import EngineApi, open_engine
from roll_flash.sandboxes.errors import SandboxImageError
from roll_flash.sandboxes.images.build import build_image, file_content
from roll_flash.sandboxes.images.debian import BASE_IMAGE, import_debian, pull_image
from roll_flash.sandboxes.images.stored_images import inspect_image

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "docker/training/Dockerfile"
IMAGE = "roll-flash-training"
OWN_BASE = "roll-flash-training-base"
SETS = ("cpu", "gpu")
PYTHON = "3.11"
"""Python of BASE_IMAGE."""
GLIBC_MINOR = 36
"""glibc 2.x of BASE_IMAGE: the newest `manylinux` that runs there."""
PINS = {"cpu": ("cpu.txt",), "gpu": ("gpu.txt",)}
PINS_WITHOUT_DEPENDENCIES = ("model.txt", "bfcl.txt", "dev.txt")
SYSTEM_PACKAGES = {
    "cpu": ("ca-certificates", "libnuma1", "python3", "python3-venv", "wget"),
    "gpu": ("ca-certificates", "libnuma1", "python3", "python3-venv", "wget", "gcc", "libc6-dev", "python3-dev"),
}
LABEL = "roll-flash.training"
FETCH_TIMEOUT_S = 3600.0
REMOVE_TIMEOUT_S = 300.0
MAX_ERROR = 600


async def ensure(packages: str) -> None:
    """Build the image of a set of packages, `cpu` or `gpu`. Raises SandboxError with what to do."""
    image = f"{IMAGE}:{packages}"
    async with open_engine() as engine:
        labels = {LABEL: _recipe()}
        existing = await inspect_image(engine, image)
        if existing is not None and labels.items() <= (existing["Config"]["Labels"] or {}).items():
            print(f"training image {image} is there")
            return
        began = time.monotonic()
        base = await _base(engine, packages)
        with tempfile.TemporaryDirectory(prefix="roll-flash-training-") as folder:
            wheels = Path(folder) / "wheels"
            await asyncio.to_thread(_fetch_wheels, wheels, packages)
            context = await asyncio.to_thread(_context, Path(folder), wheels)
            arguments = {"SET": packages, "BASE": base}
            try:
                await build_image(engine, image, file_content(context), labels, arguments=arguments)
            finally:
                await _remove_stages(engine)
        size = (await engine.json("GET", f"/images/{image}/json"))["Size"]
        print(f"training image {image}: fetched and built in {time.monotonic() - began:.0f} s, {size / 1e9:.1f} GB")


def _recipe() -> str:
    """Hash of everything that the image is built from."""
    digest = hashlib.sha256(DOCKERFILE.read_bytes())
    for path in _sources():
        name = path.relative_to(ROOT)
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    """The files and links that .dockerignore lets in, in order."""
    for name in sorted(_allowed()):
        top = ROOT / name
        if top.is_dir():
            for path in sorted(top.rglob("*")):
                if "__pycache__" not in path.parts and (path.is_symlink() or path.is_file()):
                    yield path
        elif top.exists():
            yield top


def _allowed() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


async def _base(engine: EngineApi, packages: str) -> str:
    """Return the image to build on: Debian's, or one of our own with the system packages already in it."""
    own = f"{OWN_BASE}:{packages}"
    if await inspect_image(engine, own) is not None:
        return own
    if await pull_image(engine, BASE_IMAGE):
        return BASE_IMAGE
    await asyncio.to_thread(apt.provide, "debootstrap", "debootstrap")
    await import_debian(engine, own, SYSTEM_PACKAGES[packages])
    return own


def _fetch_wheels(folder: Path, packages: str) -> None:
    """The wheels for the image's Python, as they were published."""
    print(f"training image: fetching the packages of requirements/ ({packages}) for Python {PYTHON}", flush=True)
    processor = platform.machine()
    platforms = [f"manylinux_2_{minor}_{processor}" for minor in range(5, GLIBC_MINOR + 1)]
    platforms += [f"manylinux2014_{processor}", f"linux_{processor}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--only-binary=:all:", f"--python-version={PYTHON}", f"--dest={folder}"]
    command += [f"--platform={name}" for name in platforms]
    with_dependencies = [] if packages == "gpu" else ["--no-deps"]  # cpu.txt is complete
    _run([*command, *with_dependencies, *_files(PINS[packages])])
    _run([*command, "--no-deps", *_files(PINS_WITHOUT_DEPENDENCIES)])


def _files(names: tuple[str, ...]) -> list[str]:
    return [part for name in names for part in ("-r", str(ROOT / "requirements" / name))]


def _run(command: list[str]) -> None:
    what = " ".join(command[1:4])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SandboxImageError(f"{what} took longer than {FETCH_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-MAX_ERROR:]
        raise SandboxImageError(f"{what} failed: {said}")


def _context(folder: Path, wheels: Path) -> Path:
    """The build's context as one tar file."""
    archive = folder / "context.tar"
    with tarfile.open(archive, "w") as packed:
        for path in _sources():
            packed.add(path, arcname=str(path.relative_to(ROOT)), filter=_as_root)
        packed.add(wheels, arcname="wheels", filter=_as_root)
        member = tarfile.TarInfo("Dockerfile")
        member.size = DOCKERFILE.stat().st_size
        packed.addfile(member, io.BytesIO(DOCKERFILE.read_bytes()))
    return archive


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o755 if member.isdir() else 0o444
    return member


async def _remove_stages(engine: EngineApi) -> None:
    """Remove what the build left of its stages: they hold the wheels."""
    filters = json.dumps({"dangling": ["true"], "label": [f"{LABEL}=stage"]})
    await engine.call("POST", "/images/prune", query={"filters": filters}, timeout_s=REMOVE_TIMEOUT_S)


def main() -> int:
    packages = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if packages not in SETS:
        print(f"training image: {packages!r} is no set; name one of {', '.join(SETS)}", file=sys.stderr)
        return 2
    if not (engine := check_docker()).ok:
        print(f"training image: none can be built: {engine.detail} (make engine)", file=sys.stderr)
        return 1
    try:
        asyncio.run(ensure(packages))
    except RollFlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
