"""A stand-in for NVIDIA's driver: the functions of pynvml that we call, about GPUs that are not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from roll_flash.processes import nvml

GIB = 2**30


@dataclass
class FakeGpu:
    name: str = "NVIDIA H100 80GB HBM3"
    memory_gib: float = 80
    used_gib: float = 0.5
    processes: dict[int, int | None] = field(default_factory=dict)
    slices: list[FakeGpu] | None = None
    """In MIG mode if it is a list."""
    uuid: str = ""


class NVMLError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    NVMLError = NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def __init__(self, *gpus: FakeGpu, cuda: int = 13000, problem: NVMLError | None = None) -> None:
        self.gpus, self.cuda, self.problem = gpus, cuda, problem
        for number, gpu in enumerate(gpus):
            gpu.uuid = gpu.uuid or f"GPU-{number}000"

    def nvmlInit(self) -> None:
        if self.problem is not None:
            raise self.problem

    def nvmlShutdown(self) -> None:
        return None

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NVMLError(2, "Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        everything = [*self.gpus, *(part for gpu in self.gpus for part in gpu.slices or ())]
        return next(each for each in everything if each.uuid == uuid)

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:
        """Slices are numbered within their GPU."""
        parent = self.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu)
        return self.gpus.index(gpu) if parent is None else (parent.slices or []).index(gpu)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: FakeGpu) -> FakeGpu | None:
        return next((gpu for gpu in self.gpus if part in (gpu.slices or ())), None)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=int(gpu.memory_gib * GIB), used=int(gpu.used_gib * GIB))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.processes.items()]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> tuple[int, int]:
        if gpu.memory_gib < 40:
            raise NVMLError(3, "Not Supported")
        return (int(gpu.slices is not None),) * 2  # type: ignore[return-value]

    def nvmlDeviceGetMaxMigDeviceCount(self, _: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.slices or ()):
            raise NVMLError(6, "Not Found")
        return (gpu.slices or [])[index]


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeNvml | None) -> None:
    """Let `read_driver` ask this driver; None: no binding is installed."""
    monkeypatch.setattr(nvml, "_binding", lambda: driver)


def in_slices(*memory_gib: float) -> FakeGpu:
    """A GPU in MIG mode."""
    parts = [FakeGpu("slice", size, uuid=f"MIG-{number}aaa") for number, size in enumerate(memory_gib)]
    return FakeGpu(slices=parts)
