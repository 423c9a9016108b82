"""What a publication's file says about all weights of a model: whole tensors, low-rank factors, what did not change.

A file is in the safetensors format. It holds every tensor of the model folder, or, marked `rest: model_folder`, only
those that differ from the folder that the server itself was started from: what is not trained is neither written nor
sent. An adapted weight is given by its factors and read as W + scale B A, W from the folder; the learner merges with
the very same function, so that both have the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from roll_flash.engines.inference import StagedWeights

TIED_HEAD = "lm_head.weight"
DOWN, UP = "lora_a", "lora_b"
"""Last part of the names of A [rank, in] and B [out, rank] of the layer whose weight they change."""
REST, SCALE = "rest", "lora_scale"
"""Keys of the file's metadata."""
MODEL_FOLDER = "model_folder"


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale B A, in the dtype of W."""
    return torch.addmm(weight, up.to(weight.dtype), down.to(weight.dtype), alpha=scale)


def is_adapter(name: str) -> bool:
    """Whether a name in a model's state, or in a file, is that of a factor."""
    return name.rsplit(".", 1)[-1] in (DOWN, UP)


class ModelFolder:
    """The tensors that a server loaded itself, read again when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118
                    self._files[name] = path
                    self.shapes[name] = list(file.get_slice(name).get_shape())

    def path(self, name: str) -> Path:
        return self._files[name]


class PublishedWeights:
    """All weights of one version. A context manager; tensors may be read while it is open.

    Raises ValueError if the file is not of the folder's model.
    """

    def __init__(self, path: str | Path, folder: ModelFolder, *, tied: bool) -> None:
        self._path = str(path)
        self._folder = folder
        self._tied = tied
        self._open = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> PublishedWeights:
        self._file = self._open.enter_context(safe_open(self._path, framework="pt", device="cpu"))
        metadata = self._file.metadata() or {}
        stored = list(self._file.keys())
        self._scale = float(metadata.get(SCALE, 0.0))
        self._adapted = {f"{name.removesuffix('.' + DOWN)}.weight" for name in stored if name.endswith("." + DOWN)}
        whole = {name for name in stored if not is_adapter(name)}
        try:
            self._check(whole, is_whole=metadata.get(REST) != MODEL_FOLDER)
        except BaseException:
            self._open.close()
            raise
        self.changed: frozenset[str] = frozenset(whole | self._adapted)
        """Names of the tensors that may differ from the model folder's."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._files.clear()

    @property
    def names(self) -> list[str]:
        """Of all tensors of the model, in the order of the folder."""
        known = list(self._folder.shapes)
        return known + sorted(self.changed - self._folder.shapes.keys())

    def tensor(self, name: str) -> Tensor:
        """A new tensor, or one that lies in the file: not to be written to."""
        if name in self._adapted:
            layer = name.removesuffix(".weight")
            down, up = (self._file.get_tensor(f"{layer}.{part}") for part in (DOWN, UP))
            return merged(self._base(name).to(down.dtype), down, up, self._scale)
        tensor: Tensor = self._file.get_tensor(name) if name in self.changed else self._base(name)
        return tensor

    def _base(self, name: str) -> Tensor:
        path = self._folder.path(name)
        if path not in self._files:
            self._files[path] = self._open.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    def _check(self, whole: Collection[str], *, is_whole: bool) -> None:
        """A head that is tied to the embedding may be left out or stored beside it; everything else must match."""
        expected = self._folder.shapes
        optional = {TIED_HEAD} if self._tied else set()
        missing = sorted(expected.keys() - whole - optional) if is_whole else []
        unknown = sorted((set(whole) | self._adapted) - expected.keys() - optional)
        if missing or unknown:
            raise ValueError(
                f"the weights do not fit the model: {len(missing)} missing {missing[:2]}, unknown {unknown[:2]}"
            )
        for name in whole:
            shape = list(self._file.get_slice(name).get_shape())
            if shape != expected.get(name, shape):
                raise ValueError(f"the weights do not fit the model: {name} is {shape}, not {expected[name]}")
        for name in sorted(self._adapted):
            layer = name.removesuffix(".weight")
            down, up = (list(self._file.get_slice(f"{layer}.{part}").get_shape()) for part in (DOWN, UP))
            if [up[0], down[1]] != expected[name] or up[1] != down[0]:
                raise ValueError(f"the factors {up} x {down} do not fit the weight {name}, {expected[name]}")


CHUNK_BYTES = 64 * 2**20


class KeptWeights:
    """A copy of our own in anonymous shared memory, because the publisher uses its memory again.

    It has no name in any file system: the kernel frees it when this process ends, however it ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.weights: StagedWeights | None = None
        """What is kept, under a path that other processes of this machine can open."""

    def keep(self, weights: StagedWeights) -> None:
        """Copy `weights` in place of what was kept. Raises OSError if they cannot be read."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("roll-flash-newest")
        self.weights = None
        with open(weights.path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            os.truncate(self._descriptor, size)
            done = 0
            while done < size:
                os.lseek(self._descriptor, done, os.SEEK_SET)
                done += os.sendfile(self._descriptor, source.fileno(), done, min(CHUNK_BYTES, size - done))
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.weights = replace(weights, path=path)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.weights = None
