"""Build the default sandbox image: `python -m roll_flash.sandboxes.images.default_image ensure [--image NAME]`.

Uses the Debian image of a registry if one is reachable, else `debootstrap` (as root). Does nothing if the image exists.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from roll_flash.errors import RollFlashError
from roll_flash.sandboxes.docker.address import CERTIFICATE_FILES, EngineAddress
from roll_flash.sandboxes.docker.api import EngineApi
from roll_flash.sandboxes.errors import SandboxImageError
from roll_flash.sandboxes.scratch import scratch_folder
from roll_flash.sandboxes.spec import DEFAULT_IMAGE

BASE_IMAGE = "debian:bookworm-slim"
SUITE = "bookworm"
PACKAGES = "python3-minimal"
LABEL_IMAGE = "roll-flash.image"
IMAGE_VERSION = "1"
PULL_TIMEOUT_S = 15.0
"""Maximum seconds without data from the registry; the whole pull may take PULL_TOTAL_S."""
PULL_TOTAL_S = 600.0
BUILD_TIMEOUT_S = 900.0
STRIPPED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)

Report = Callable[[str], None]


async def ensure_image(
    image: str = DEFAULT_IMAGE,
    *,
    host: str | None = None,
    report: Report = print,
    provide_debootstrap: Callable[[], None] | None = None,
) -> str:
    """Ensure that the engine has `image` and return its id. Raises SandboxError with instructions for the user.

    `provide_debootstrap` is called before `debootstrap` is needed; it may install it.
    """
    engine = EngineApi(EngineAddress.from_environment(host))
    try:
        await engine.connect()
        if found := await find_image(engine, image):
            report(f"sandbox image {image} is there")
            return found
        began = time.monotonic()
        if await _registry_answers(engine, report):
            await _build_on_registry_image(engine, image, report)
        else:
            if provide_debootstrap is not None:
                await asyncio.to_thread(provide_debootstrap)
            await _build_by_debootstrap(engine, image, report)
        built = await find_image(engine, image)
        if built is None:
            raise SandboxImageError(
                f"{image}: the engine took the build but does not know the image; see `docker images`"
            )
        report(f"sandbox image {image} built in {time.monotonic() - began:.0f} s")
        return built
    finally:
        await engine.close()


async def find_image(engine: EngineApi, image: str) -> str | None:
    """Return the image's id; None if the engine has no image with this name."""
    answer = await engine.call("GET", f"/images/{image}/json", accept=(404,))
    return None if answer.status_code == 404 else str(answer.json()["Id"])


async def _registry_answers(engine: EngineApi, report: Report) -> bool:
    if await find_image(engine, BASE_IMAGE):
        return True
    report(f"pulling {BASE_IMAGE}")
    name, tag = BASE_IMAGE.split(":")
    try:
        async with asyncio.timeout(PULL_TOTAL_S):
            async for line in engine.stream(
                "POST", "/images/create", query={"fromImage": name, "tag": tag}, idle_timeout_s=PULL_TIMEOUT_S
            ):
                if "error" in line:
                    raise SandboxImageError(str(line["error"]))
    except (RollFlashError, TimeoutError, httpx.HTTPError) as error:
        report(f"the image registry cannot be used ({str(error)[:160] or 'no answer in time'}); using debootstrap")
        return False
    return True


async def _build_on_registry_image(engine: EngineApi, image: str, report: Report) -> None:
    import docker
    from docker.errors import DockerException

    report(f"building {image} on {BASE_IMAGE}")

    def build() -> None:
        client = docker.DockerClient(
            base_url=engine.address.host,
            version=engine.version,
            timeout=BUILD_TIMEOUT_S,
            tls=_sdk_tls(engine.address.certificates),
        )
        try:
            with scratch_folder("build") as context:
                shutil.copy(Path(__file__).with_name("Dockerfile"), context)
                client.images.build(path=str(context), tag=image, rm=True, forcerm=True)
        except DockerException as error:
            raise SandboxImageError(f"building {image} failed: {str(error)[:300]}") from None
        finally:
            client.close()

    await asyncio.to_thread(build)


def _sdk_tls(certificates: str | None) -> Any:
    from docker.tls import TLSConfig

    if certificates is None:
        return False
    authority, certificate, key = (str(Path(certificates) / name) for name in CERTIFICATE_FILES)
    return TLSConfig(client_cert=(certificate, key), ca_cert=authority, verify=True)


async def _build_by_debootstrap(engine: EngineApi, image: str, report: Report) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SandboxImageError(
            f"{image} cannot be built: no image registry answers, and its substitute, the program debootstrap, "
            + ("needs root" if os.geteuid() else "is not installed (apt-get install debootstrap)")
        )
    with scratch_folder("image") as folder:
        root = folder / "root"
        await asyncio.to_thread(_debootstrap, root, report)
        await asyncio.to_thread(_finish_root, root)
        archive = folder / "root.tar"
        await asyncio.to_thread(_pack, root, archive)
        report(f"importing {archive.stat().st_size >> 20} MiB into the engine")
        await _import(engine, image, archive)


def _debootstrap(root: Path, report: Report) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = time.monotonic()
        for line in process.stdout:
            last = line.strip()
            if time.monotonic() - said > 5:
                report(f"  debootstrap: {last[:100]}")
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


async def _import(engine: EngineApi, image: str, archive: Path) -> None:
    async def content() -> AsyncIterator[bytes]:
        packed = await asyncio.to_thread(archive.open, "rb")
        with packed:
            while piece := await asyncio.to_thread(packed.read, 1 << 20):
                yield piece

    name, _, tag = image.partition(":")
    changes = [f"LABEL {LABEL_IMAGE}={IMAGE_VERSION}", "USER sandbox", "WORKDIR /sandbox"]
    changes.append("ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    query = [("fromSrc", "-"), ("repo", name), ("tag", tag or "latest"), *(("changes", change) for change in changes)]
    async for line in engine.stream("POST", "/images/create", query=query, content=content(), idle_timeout_s=120):
        if "error" in line:
            raise SandboxImageError(f"importing {image} failed: {json.dumps(line['error'])[:300]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roll_flash.sandboxes.images.default_image", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    ensure = actions.add_parser("ensure", help="build the sandbox image if it is not there")
    ensure.add_argument("--image", default=DEFAULT_IMAGE)
    options = parser.parse_args(arguments)
    try:
        asyncio.run(ensure_image(options.image, report=lambda line: print(line, flush=True)))
    except RollFlashError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
