"""The device of a learner rank. torch's CUDA calls are stubbed; `tests/cluster/test_gpu_parts.py` has a rank in Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from roll_flash.config.sections.learner import LearnerConfig
from roll_flash.errors import ConfigError
from roll_flash.learner.ranks import device as device_module
from roll_flash.learner.ranks.device import rank_device, reserved_gpus
from roll_flash.learner.ranks.fsdp import _gpus_without_places

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch find a GPU, or fail with an error."""

    def set_up(error: Exception | None = None) -> None:
        def init() -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: error is None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return set_up


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_rank_computes_on_the_gpu_that_ray_reserved_and_sees_no_other(name: str, cuda: Callable[..., None]) -> None:
    cuda()
    assert rank_device(name, ["3"]) == CUDA  # type: ignore[arg-type]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "also if Ray was told not to set it"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_rank_without_a_gpu_computes_on_the_cpu_and_sees_none(name: str, cuda: Callable[..., None]) -> None:
    cuda()
    assert rank_device(name, ()) == torch.device("cpu")  # type: ignore[arg-type]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "a checkpoint would start CUDA on every GPU that is visible"


def test_cuda_without_a_reservation_is_refused(cuda: Callable[..., None]) -> None:
    cuda()
    with pytest.raises(
        ConfigError, match=r"Ray has reserved no GPU for this rank; add GPU: 1 to learner.rank_resources"
    ):
        rank_device("cuda", ())


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("build", "error", "advice"),
    [
        (
            "cpu",
            AssertionError("Torch not compiled with CUDA enabled"),
            r"install torch's CUDA build \(make setup SET=gpu\)",
        ),
        ("cuda", RuntimeError("The NVIDIA driver on your system is too old\nmore"), "`roll-flash doctor` compares"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_one_line_and_not_the_cpu(
    name: str, build: str, error: Exception, advice: str, cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda(error)
    monkeypatch.setattr(device_module, "torch_build", lambda: build)
    with pytest.raises(ConfigError, match=advice) as caught:
        rank_device(name, ["1"])  # type: ignore[arg-type]
    said = str(caught.value)
    assert said.startswith(f"Ray has reserved GPU 1 for this rank, but torch {torch.__version__} cannot use it: ")
    assert str(error).splitlines()[0] in said
    assert "\n" not in said


def test_outside_of_ray_a_rank_takes_what_torch_sees(cuda: Callable[..., None]) -> None:
    assert reserved_gpus() is None
    cuda(RuntimeError("no CUDA"))
    assert rank_device("auto", None) == torch.device("cpu")
    with pytest.raises(ConfigError, match="a GPU is wanted, but torch"):
        rank_device("cuda", None)
    cuda()
    assert rank_device("auto", None) == rank_device("cuda", None) == CUDA
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_more_ranks_than_gpus_are_refused_at_once_without_a_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would let them wait for GPUs until the start times out."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert _gpus_without_places(LearnerConfig()) == 1
    assert _gpus_without_places(LearnerConfig(device="cpu")) == 0
    with pytest.raises(ConfigError, match=r"learner.ranks=2 need a GPU each, and Ray has 1"):
        _gpus_without_places(LearnerConfig(ranks=2))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    assert _gpus_without_places(LearnerConfig()) == 0
    with pytest.raises(ConfigError, match="and Ray has 0"):
        _gpus_without_places(LearnerConfig(device="cuda"))
