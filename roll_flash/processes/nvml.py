"""What NVIDIA's driver says of the GPUs of this machine (NVML). Touches no CUDA, and imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RAYS_COPY = "roll_flash_pynvml"
"""Name of the module of Ray's copy."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Its number in PCI order is its place in `Driver.gpus`."""

    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    processes: Mapping[int, int | None]
    """Bytes by process id; None if the driver does not tell them."""
    slices: Mapping[str, int]
    """Bytes of its MIG slices by UUID; empty if it is not in MIG mode."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver. `problem` is why it does not answer; it has no `gpus` then."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    """Highest CUDA version that it runs."""
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


def read_driver() -> Driver:
    """Ask the driver. A machine without one has no GPUs, and no problem."""
    nvml = _binding()
    if nvml is None:
        return Driver()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Driver(problem="" if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND else str(error))
    try:
        return _answers(nvml)
    except nvml.NVMLError as error:
        return Driver(problem=str(error))
    finally:
        nvml.nvmlShutdown()


@cache
def _binding() -> Any:
    """Return the module `pynvml` (nvidia-ml-py), or the copy that Ray carries, without importing Ray; None if there is
    neither."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        pass
    ray = importlib.util.find_spec("ray")
    folders = () if ray is None else ray.submodule_search_locations or ()
    for file in (Path(folder, "_private", "thirdparty", "pynvml", "pynvml.py") for folder in folders):
        spec = importlib.util.spec_from_file_location(RAYS_COPY, file)
        if file.is_file() and spec is not None and spec.loader is not None:
            module = sys.modules[RAYS_COPY] = importlib.util.module_from_spec(spec)  # it looks itself up there
            spec.loader.exec_module(module)
            return module
    return None


def _answers(nvml: Any) -> Driver:
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    version = _text(nvml.nvmlSystemGetDriverVersion())
    return Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(_gpu(nvml, handle) for handle in handles))


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    processes = _or_none(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total) if memory else 0,
        used_bytes=int(memory.used) if memory else 0,
        processes={int(each.pid): each.usedGpuMemory for each in processes},
        slices=_slices(nvml, handle),
    )


def _slices(nvml: Any, handle: Any) -> dict[str, int]:
    mode = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if not mode or not mode[0]:
        return {}
    found = {}
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _or_none(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if part is not None:
            memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, part)
            found[_text(nvml.nvmlDeviceGetUUID(part))] = int(memory.total) if memory else 0
    return found


def _or_none(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Return an answer; None if this GPU has none: no MIG, no slice of that number, no permission."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value
