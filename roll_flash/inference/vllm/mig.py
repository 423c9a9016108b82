"""Lets vLLM find the GPU of a MIG slice.

vLLM asks NVML about the GPU with the number of a slice (capability, memory). But NVML numbers slices within their GPU,
so a server on the second slice of a machine with one GPU would ask for a second GPU, and not start.
"""

from __future__ import annotations

from typing import Any, cast

from roll_flash.processes.gpus import MIG


def patch_mig_slices() -> None:
    """Number a slice as its GPU. Safe to call more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.platforms import cuda

    platform: Any = cuda.NvmlCudaPlatform
    number = platform.device_control_id_to_physical_device_id
    if hasattr(number, "is_patched"):
        return

    @cuda.with_nvml_context
    def number_of_gpu(_: Any, device_id: str) -> int:
        if not device_id.startswith(MIG):
            return int(number(device_id))
        nvml = cuda.pynvml
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(device_id))
        return int(nvml.nvmlDeviceGetIndex(gpu))

    cast(Any, number_of_gpu).is_patched = True
    platform.device_control_id_to_physical_device_id = classmethod(number_of_gpu)
