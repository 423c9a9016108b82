"""Chooses the device of a learner rank: the GPU that Ray has reserved for it, and never the CPU in its place; and how
many threads it has on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import ray
import torch

from roll_flash.errors import ConfigError, first_line
from roll_flash.monitor.limits import usable_cores
from roll_flash.processes.gpus import assigned_gpus, environment_of, torch_build

CPU = torch.device("cpu")


def reserved_gpus() -> tuple[str, ...] | None:
    """Return the ids of the GPUs that Ray has reserved for this actor; None outside of actors."""
    is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return assigned_gpus() if is_actor else None


def rank_device(name: Literal["auto", "cpu", "cuda"], gpus: Sequence[str] | None) -> torch.device:
    """Return the device of this rank, whose reserved GPUs are `gpus`; None: it may use what it sees. Call it before
    anything else uses CUDA: the process sees no other GPUs afterwards.

    Raises ConfigError if it should compute on a GPU, but has none reserved, or torch cannot use it.
    """
    if gpus is not None:
        os.environ |= environment_of(() if name == "cpu" else gpus)
    if name == "cpu" or (name == "auto" and gpus == ()):
        return CPU
    if gpus == ():
        raise ConfigError(
            "learner.device=cuda, but Ray has reserved no GPU for this rank; add GPU: 1 to learner.rank_resources, or "
            "set learner.device=cpu"
        )
    if gpus is None and name == "auto" and not torch.cuda.is_available():
        return CPU
    device = torch.device("cuda", 0)
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA fails an assertion
        raise ConfigError(_explanation(gpus, error)) from None
    return device


@contextmanager
def all_cores(threads: int, ranks: int) -> Iterator[None]:
    """Compute on all cores of this machine, which `ranks` share, while servers and environments rest; then again with
    `threads`."""
    torch.set_num_threads(max(threads, usable_cores() // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _explanation(gpus: Sequence[str] | None, error: Exception) -> str:
    which = "a GPU is wanted" if gpus is None else f"Ray has reserved GPU {', '.join(gpus)} for this rank"
    build = "install torch's CUDA build (make setup SET=gpu)"
    advice = build if torch_build() == "cpu" else "`roll-flash doctor` compares torch with the driver"
    why = first_line(error)
    return f"{which}, but torch {torch.__version__} cannot use it: {why}; {advice}, or set learner.device=cpu"
