"""Reads all weights of a model from a publication file and, for unchanged tensors, from the model folder.

The file is in the safetensors format. It holds every tensor of the model folder, or, if marked `rest: model_folder`,
only those that differ from the folder that the server was started from: untrained tensors are neither written nor
sent. An adapted weight is stored as its low-rank factors and read as W + scale B A, with W from the folder. The learner
merges with the same function, so that both get the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from torch import Tensor

from roll_flash.weight_sync.mapped_file import MappedFile

CPU = torch.device("cpu")
TIED_HEAD = "lm_head.weight"
LORA_A, LORA_B = "lora_a", "lora_b"
"""Last name components of the factors A [rank, in] and B [out, rank] of an adapted layer."""
BASE_KEY, SCALE, TAG = "rest", "lora_scale", "tag"
"""Keys of the file's metadata."""
MODEL_FOLDER = "model_folder"


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + scale B A on the device and in the dtype of W, computed in float32: rounded once, at the end."""
    whole = weight.to(torch.float32, copy=True)
    return whole.addmm_(up.float(), down.float(), alpha=scale).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Return true if `name`, from a model's state or a file, is that of an adapter factor."""
    return name.rsplit(".", 1)[-1] in (LORA_A, LORA_B)


class ModelFolder:
    """Index of the tensors in the model folder that the server loaded at start."""

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
    """All weights of one version. A context manager, or `open` and `close` it; tensors can be read only while it is
    open, from any thread, one at a time."""

    def __init__(
        self,
        path: str | Path,
        folder: ModelFolder,
        *,
        tied: bool,
        tag: str = "",
        device: torch.device = CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adapted weights are merged on `device`, where they stay, and then rounded to `dtype`; None: not rounded."""
        self._path = str(path)
        self._tag = tag
        self._folder = folder
        self._tied = tied
        self._device = device
        self._dtype = dtype
        self._open = ExitStack()
        self._mapped: MappedFile | None = None
        self._folder_files: dict[Path, MappedFile] = {}

    def open(self) -> PublishedWeights:
        """Open the file; return this object. Raises ValueError if the file does not match the model in the folder, or
        does not contain `tag`: a path of shared memory may meanwhile be that of another file. The first `tensor` opens
        it once more, and raises ValueError as well."""
        self._file = self._open.enter_context(safe_open(self._path, framework="pt", device="cpu"))
        metadata = self._file.metadata() or {}
        stored = list(self._file.keys())
        self._scale = float(metadata.get(SCALE, 0.0))
        self._adapted = {f"{name.removesuffix('.' + LORA_A)}.weight" for name in stored if name.endswith("." + LORA_A)}
        whole = {name for name in stored if not is_adapter(name)}
        try:
            self._check_tag(metadata)
            self._check(whole, is_whole=metadata.get(BASE_KEY) != MODEL_FOLDER)
        except BaseException:
            self._open.close()
            raise
        self.changed: frozenset[str] = frozenset(whole | self._adapted)
        """Names of the tensors that may differ from those in the model folder."""
        return self

    def close(self) -> None:
        self._open.close()
        self._folder_files.clear()
        self._mapped = None

    def page_lock(self) -> None:
        """Lock the file's memory, so that a GPU copies from it by itself. Takes time; call it before a pause."""
        self._mapped = MappedFile(self._path, locked=True)
        self._open.callback(self._mapped.close)
        self._check_tag(self._mapped.metadata)

    @property
    def is_page_locked(self) -> bool:
        return self._mapped is not None and self._mapped.is_locked

    def __enter__(self) -> PublishedWeights:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the model, in the order of the folder."""
        known = list(self._folder.shapes)
        return known + sorted(self.changed - self._folder.shapes.keys())

    def tensor(self, name: str) -> Tensor:
        """Return one tensor. It may be mapped from the file: do not write to it."""
        if name in self._adapted:
            return self._merged(name)
        if name not in self.changed:
            return self._base(name)
        return self._stored(name)

    def _merged(self, name: str) -> Tensor:
        """Merge an adapted weight, always from the one in the folder: errors of versions cannot add up."""
        layer = name.removesuffix(".weight")
        down, up = (self._stored(f"{layer}.{part}").to(self._device) for part in (LORA_A, LORA_B))
        whole = merged(self._base(name).to(self._device).float(), down, up, self._scale)
        return whole if self._dtype is None else whole.to(self._dtype)

    def _base(self, name: str) -> Tensor:
        path = self._folder.path(name)
        if path not in self._folder_files:
            self._folder_files[path] = MappedFile(str(path))
        return self._folder_files[path].tensor(name)

    def _stored(self, name: str) -> Tensor:
        if self._mapped is None:
            mapped = MappedFile(self._path)  # which opens the path anew
            self._check_tag(mapped.metadata)
            self._mapped = mapped
        return self._mapped.tensor(name)

    def _check_tag(self, metadata: Mapping[str, str]) -> None:
        if self._tag and metadata.get(TAG) != self._tag:
            raise ValueError(f"{self._path} does not hold the weights that were published: its tag is another one")

    def _check(self, whole: Collection[str], *, is_whole: bool) -> None:
        """Raises ValueError if names or shapes do not match; only a head tied to the embedding is optional."""
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
            down, up = (list(self._file.get_slice(f"{layer}.{part}").get_shape()) for part in (LORA_A, LORA_B))
            if [up[0], down[1]] != expected[name] or up[1] != down[0]:
                raise ValueError(f"the factors {up} x {down} do not fit the weight {name}, {expected[name]}")
