"""Tensors of a safetensors file: the same as safetensors reads, and nothing is kept of a version that was read."""

from __future__ import annotations

import gc
import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll_flash.weight_sync.mapped_file import DTYPES, MappedFile
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": torch.arange(12).view(3, 4).to(dtype) for name, dtype in DTYPES.items() if name != "F8_E8M0"
    } | {"scalar": torch.tensor(3.5)}


def test_tensors_of_each_dtype_are_read_as_they_were_saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    file = MappedFile(str(path))
    for name, expected in tensors.items():
        found = file.tensor(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert found.view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8)), name


def test_a_tensor_at_an_odd_place_is_read_too(tmp_path: Path) -> None:
    path, values = tmp_path / "model.safetensors", torch.tensor([1.0, -2.0])
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\7" + values.numpy().tobytes())
    assert load_file(path)["b"].equal(values)
    assert MappedFile(str(path)).tensor("b").equal(values)


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    MappedFile(str(path)).tensor("a").fill_(1)
    assert load_file(path)["a"].equal(torch.zeros(4))


def test_nothing_stays_of_versions_that_were_read(tmp_path: Path) -> None:
    weights = {f"layer.{number}.weight": torch.zeros(2, 2) for number in range(20)}
    save_file(weights, tmp_path / "model.safetensors")
    folder = ModelFolder(tmp_path)

    def read() -> None:
        with PublishedWeights(tmp_path / "model.safetensors", folder, tied=False) as published:
            for name in published.names:
                published.tensor(name)

    def objects() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    read()
    before = objects()
    for _ in range(100):
        read()
    assert objects() - before < 200, "safetensors keeps 4,000 objects of these"


def test_a_path_that_has_become_that_of_another_file_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    """It is opened twice: to check it, and to read from it."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path, metadata={"tag": "published"})
    with PublishedWeights(path, ModelFolder(tmp_path), tied=False, tag="published") as weights:
        path.unlink()
        save_file({"a": torch.ones(2)}, path, metadata={"tag": "another"})
        with pytest.raises(ValueError, match="its tag is another one"):
            weights.tensor("a")
