"""Copies of weights on nodes: exact, with only the blocks that changed, and never of another file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from roll_flash.config.tree import InferenceConfig
from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError
from roll_flash.inference.open import open_engine
from roll_flash.inference.servers.engine import ServerEngine
from roll_flash.models.prepare import resolve_model
from roll_flash.weight_sync.mirror import BLOCK_BYTES, Blocks, WeightMirror, read_blocks
from roll_flash.weight_sync.mirrors import Mirrors
from roll_flash.weight_sync.published import ModelFolder, PublishedWeights


def take_over(mirror: WeightMirror, source: Path, version: int) -> list[int]:
    """Copy a file as `Mirrors` does; return the blocks that travelled."""
    blocks = Blocks.of(str(source))
    missing = mirror.begin(blocks)
    mirror.write(missing, read_blocks(str(source), missing))
    mirror.finish(StagedWeights(version, str(source), blocks.size))
    assert mirror.weights is not None
    assert Path(mirror.weights.path).read_bytes() == source.read_bytes()
    return missing


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4 * BLOCK_BYTES), min_size=1, max_size=4),
    changes=st.lists(st.integers(0, 4 * BLOCK_BYTES - 1), max_size=3),
)
def test_a_mirror_is_exact_after_any_changes_of_content_and_size(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], changes: list[int]
) -> None:
    source, mirror = tmp_path_factory.mktemp("weights") / "file", WeightMirror()
    content = bytearray(b"x" * 4 * BLOCK_BYTES)
    for version, size in enumerate(sizes):
        for place in changes:
            content[place] = version
        source.write_bytes(content[:size])
        take_over(mirror, source, version)
    mirror.close()


def test_only_changed_blocks_travel(tmp_path: Path) -> None:
    source, mirror = tmp_path / "file", WeightMirror()
    content = bytearray(20 * BLOCK_BYTES)
    source.write_bytes(content)
    assert take_over(mirror, source, 0) == list(range(20))
    content[7 * BLOCK_BYTES + 5] = 1
    source.write_bytes(content)
    assert take_over(mirror, source, 1) == [7]
    mirror.close()


def test_blocks_are_sent_without_a_copy_of_the_weights_in_between(tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(bytes(2 * BLOCK_BYTES) + b"end")
    assert [(len(block), block.flags.owndata) for block in read_blocks(str(source), [1, 2])] == [
        (BLOCK_BYTES, False),
        (3, False),
    ]


def test_a_block_that_was_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    source, mirror = tmp_path / "file", WeightMirror()
    source.write_bytes(bytes(2 * BLOCK_BYTES))
    mirror.begin(Blocks.of(str(source)))
    with pytest.raises(InferenceError, match="block 1 of the weights did not arrive as it was sent"):
        mirror.write([0, 1], [np.zeros(BLOCK_BYTES, np.uint8), np.ones(BLOCK_BYTES, np.uint8)])
    with pytest.raises(InferenceError, match="did not arrive whole"):
        mirror.finish(StagedWeights(1, str(source), 2 * BLOCK_BYTES))
    mirror.close()


def test_the_newest_weights_outlive_the_memory_that_they_were_in(tmp_path: Path) -> None:
    async def run() -> bytes:
        source, mirrors = tmp_path / "file", Mirrors()
        source.write_bytes(b"weights")
        await mirrors.keep(StagedWeights(1, str(source), 7))
        source.unlink()
        assert mirrors.newest is not None
        (found,) = (await mirrors.bring(mirrors.newest, {""})).values()
        assert isinstance(found, StagedWeights)
        try:
            return await asyncio.to_thread(Path(found.path).read_bytes)
        finally:
            await mirrors.close()

    assert asyncio.run(run()) == b"weights"


class NodeOfTest:
    """A stand-in for a mirror in an actor: pieces are passed without Ray, and counted. It fails at piece `fails_at`."""

    def __init__(self, fails_at: int = -1) -> None:
        self.mirror = WeightMirror()
        self.read_blocks, self.passed_blocks, self._pieces_left = list[int](), list[int](), fails_at

    async def keep(self, weights: StagedWeights) -> StagedWeights:
        return self.mirror.keep(weights)

    async def blocks(self, path: str) -> Blocks:
        return Blocks.of(path)

    async def read(self, path: str, numbers: Sequence[int]) -> Any:
        self.read_blocks.extend(numbers)
        return read_blocks(path, numbers)

    async def pass_on(self, numbers: Sequence[int]) -> Any:
        if self._pieces_left == 0:
            raise InferenceError("node is lost")
        self.passed_blocks.extend(numbers)
        return read_blocks(self.mirror.path, numbers)

    async def begin(self, blocks: Blocks) -> list[int]:
        return self.mirror.begin(blocks)

    async def write(self, numbers: Sequence[int], piece: Any) -> None:
        await asyncio.sleep(0)
        if self._pieces_left == 0:
            raise InferenceError("node is lost")
        self._pieces_left -= 1
        self.mirror.write(numbers, piece)

    async def finish(self, weights: StagedWeights) -> StagedWeights:
        return self.mirror.finish(weights)

    async def close(self) -> None:
        self.mirror.close()


def bring_in_turn(
    source: Path, nodes: Mapping[str, NodeOfTest], versions: Sequence[bytes]
) -> Mapping[str, StagedWeights | InferenceError]:
    """Bring each of `versions` from the first node to all others; return what is there in the end."""
    mirrors = Mirrors("source")
    mirrors._nodes |= nodes
    found: Mapping[str, StagedWeights | InferenceError] = {}
    with asyncio.Runner() as runner:
        for version, content in enumerate(versions):
            source.write_bytes(content)
            staged = StagedWeights(version, str(source), len(content), node_id="source")
            found = runner.run(mirrors.bring(staged, set(nodes)))
            for name, at in found.items():
                assert isinstance(at, InferenceError) or Path(at.path).read_bytes() == content, name
    for node in nodes.values():
        node.mirror.close()
    return found


def test_the_source_sends_each_block_once_however_many_nodes_there_are(tmp_path: Path) -> None:
    first = os.urandom(70 * BLOCK_BYTES + 9)
    second = first[:BLOCK_BYTES] + os.urandom(BLOCK_BYTES) + first[2 * BLOCK_BYTES :]
    nodes = {name: NodeOfTest() for name in ("source", "one", "two", "three")}
    bring_in_turn(tmp_path / "file", nodes, [first, second])
    assert sorted(nodes["source"].read_blocks) == sorted([*range(71), 1])
    passed = sorted(len(node.passed_blocks) for node in nodes.values())
    assert passed == [0, 0, 72, 72]  # the last one and the source pass nothing on


@pytest.mark.parametrize("fails_at", [0, 2])
def test_behind_a_node_that_is_lost_the_weights_come_from_their_source(tmp_path: Path, fails_at: int) -> None:
    nodes = {"source": NodeOfTest(), "one": NodeOfTest(), "lost": NodeOfTest(fails_at), "three": NodeOfTest()}
    found = bring_in_turn(tmp_path / "file", nodes, [os.urandom(70 * BLOCK_BYTES)])
    assert isinstance(found["lost"], InferenceError)
    assert all(isinstance(found[name], StagedWeights) for name in ("one", "three"))


def test_weights_of_another_run_at_the_same_path_are_refused(tmp_path: Path) -> None:
    folder = ModelFolder(resolve_model("tiny"))
    path = tmp_path / "file"
    save_file({name: torch.zeros(shape) for name, shape in folder.shapes.items()}, path, metadata={"tag": "other"})
    with PublishedWeights(path, folder, tied=True, tag="other") as weights:
        assert weights.names
    with pytest.raises(ValueError, match="its tag is another one"):
        PublishedWeights(path, folder, tied=True, tag="ours").__enter__()


@pytest.mark.ray
def test_servers_without_a_plan_load_what_a_rank_of_this_node_has_staged_without_a_copy(
    tmp_path: Path, ray_local: None
) -> None:
    """As in benchmarks/weights.py: the rank is an actor that knows its node, the servers are children."""
    config = InferenceConfig(engine="transformers")
    engine = open_engine(config, model_folder=resolve_model("tiny"), max_model_len=256, logs=tmp_path)
    assert isinstance(engine, ServerEngine)
    node_id = ray.get_runtime_context().get_node_id()
    staged = StagedWeights(1, str(tmp_path / "file"), 7, node_id=node_id)
    (tmp_path / "file").write_bytes(b"weights")
    found = asyncio.run(engine._at(engine._servers[0], staged))
    assert found == staged
