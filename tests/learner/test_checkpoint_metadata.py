"""The index of a checkpoint, which is read by an unpickler that knows a few names only."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from roll_flash.learner.ranks.checkpoint import SafeReader


class OlderPickler(pickle.Pickler):
    """Pickles members of an Enum as Python 3.11.2 does, which Debian 12 has: as a call of `getattr`."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def write_index(folder: Path, value: object) -> None:
    with (folder / ".metadata").open("wb") as file:
        OlderPickler(file).dump(value)


def test_a_checkpoint_of_another_python_is_read(tmp_path: Path) -> None:
    """With Debian's own Python no run could be resumed, and no adapter exported."""
    dcp.save({"weight": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    saved = SafeReader(tmp_path).read_metadata()
    write_index(tmp_path, saved)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert SafeReader(tmp_path).read_metadata().state_dict_metadata == saved.state_dict_metadata


class Forged:
    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self._arguments


@pytest.mark.parametrize("arguments", [(OrderedDict, "fromkeys"), (torch.Size, "__subclasses__"), ("", "format")])
def test_it_reaches_no_attributes(tmp_path: Path, arguments: tuple[Any, str]) -> None:
    write_index(tmp_path, Forged(*arguments))
    with pytest.raises(pickle.UnpicklingError, match=f"'{arguments[1]}' .*which has no place in a checkpoint"):
        SafeReader(tmp_path).read_metadata()
