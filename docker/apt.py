"""System packages that the set-up needs, installed with apt where this user may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

INSTALL_TIMEOUT_S = 300.0


class PackageUnavailable(Exception):
    """Why a system package cannot be had on this machine."""


def provide(program: str, package: str) -> None:
    """Install the package of an optional program, if it is missing and this user may; print why that failed."""
    if shutil.which(program) is None and _can_install():
        try:
            install(package)
        except PackageUnavailable as error:
            print(f"setup: {error}", file=sys.stderr)


def _can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(package: str) -> None:
    """Raises PackageUnavailable."""
    if not _can_install():
        raise PackageUnavailable(f"{package} is not installed, and installing it needs root and apt-get")
    print(f"setup: installing the system package {package}", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", package]):
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=environment,
                timeout=INSTALL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PackageUnavailable(f"`{' '.join(command)}` took over {INSTALL_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise PackageUnavailable(f"`{' '.join(command)}` failed: {_cause(done.stdout + done.stderr)}")


def _cause(said: str) -> str:
    """The first line that apt or dpkg mark as an error; what follows are its consequences."""
    errors = [line for line in said.splitlines() if line.startswith(("E:", "Err:", "dpkg: error"))]
    return errors[0][:300] if errors else last_line(said)


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
