"""Brings published weights to every node that has servers: over each link once, and only the blocks that changed there.

Nodes form a chain: each passes on what it has received, while the next piece arrives, so that the learner's node sends
the weights once, however many nodes there are. Ray's object store carries the pieces. They are small and few are under
way at each node, so that they fit into small object stores.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_flash.engines.inference import StagedWeights
from roll_flash.errors import InferenceError, RollFlashError, first_line
from roll_flash.processes.supervise import end_by_sigterm
from roll_flash.weight_sync.mirror import Blocks, WeightMirror, read_blocks

PIECE_BLOCKS = 16
PIECES_UNDER_WAY = 2
TIMEOUT_S = 600.0
"""Time in seconds for one call of a node; the deadline of the whole publication is shorter or longer by config."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Mirrors:
    """The mirrors of a run. `here` is Ray's id of the driver's node, empty without Ray: then all servers are here."""

    def __init__(self, here: str = "") -> None:
        self._here = here
        self._nodes: dict[str, _Node] = {}
        self._newest: StagedWeights | None = None
        self._at: dict[str, StagedWeights] = {}
        """The newest weights at each node that has them."""

    @property
    def newest(self) -> StagedWeights | None:
        """The newest kept weights, at the node of the learner; None if nothing is kept."""
        return self._newest

    async def keep(self, weights: StagedWeights) -> None:
        """Keep a copy of weights that servers could load, on the node where they are."""
        node_id = weights.node_id or self._here
        self._newest = self._at[node_id] = await self._node(node_id).keep(weights)

    async def bring(
        self, weights: StagedWeights, node_ids: Collection[str]
    ) -> Mapping[str, StagedWeights | InferenceError]:
        """Return the weights as each node has them now, or why it does not. Nodes get them at the same time."""
        source = weights.node_id or self._here
        there = {node_id or self._here for node_id in node_ids}
        found: dict[str, StagedWeights | InferenceError] = dict.fromkeys(there & {source}, weights)
        targets = [node_id for node_id in there - {source} if not self._has(node_id, weights)]
        found |= {node_id: self._at[node_id] for node_id in there - {source} if node_id not in targets}
        if targets:
            found |= await self._send(weights, source, targets)
        self._at |= {
            node_id: at for node_id, at in found.items() if node_id in targets and isinstance(at, StagedWeights)
        }
        return found

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()
        self._nodes.clear()
        self._at.clear()
        self._newest = None

    def _has(self, node_id: str, weights: StagedWeights) -> bool:
        at = self._at.get(node_id)
        return at is not None and (at.version, at.tag) == (weights.version, weights.tag)

    async def _send(
        self, weights: StagedWeights, source: str, targets: Sequence[str]
    ) -> dict[str, StagedWeights | InferenceError]:
        sender, *_ = [
            self._node(node_id) for node_id in (source, *targets)
        ]  # they start while this one computes hashes
        blocks = await sender.blocks(weights.path)
        failed: dict[str, InferenceError] = {}

        async def on(node_id: str, call: Callable[[_Node], Awaitable[T]], otherwise: T) -> T:
            """Call a node that has not failed; note its failure, which must not keep the others waiting."""
            if node_id in failed:
                return otherwise
            try:
                return await call(self._node(node_id))
            except InferenceError as error:
                failed[node_id] = error
                self._nodes.pop(node_id, None)
                self._at.pop(node_id, None)
                return otherwise

        for node_id in targets:
            self._at.pop(node_id, None)
        nothing: list[int] = []
        begun = await asyncio.gather(*(on(node_id, lambda node: node.begin(blocks), nothing) for node_id in targets))
        missing = dict(zip(targets, map(set, begun), strict=True))
        gates = {node_id: asyncio.Semaphore(PIECES_UNDER_WAY) for node_id in targets}

        async def send_piece(numbers: list[int]) -> None:
            """Let the piece go from node to node; where a node that has it fails, the next takes it from the source."""
            before: _Node | None = None

            async def write(node: _Node) -> None:
                if before is not None:
                    try:
                        return await node.write(numbers, await before.pass_on(numbers))
                    except InferenceError as error:
                        _log.warning("a node takes weights from their source, not from the one before it: %s", error)
                await node.write(numbers, await sender.read(weights.path, numbers))

            for node_id in targets:
                if not missing[node_id].isdisjoint(numbers):
                    async with gates[node_id]:
                        await on(node_id, write, None)
                before = before if node_id in failed else self._node(node_id)

        await asyncio.gather(*(send_piece(numbers) for numbers in _pieces(sorted(set().union(*missing.values())))))
        finished = await asyncio.gather(*(on(node_id, lambda node: node.finish(weights), None) for node_id in targets))
        return {node_id: failed[node_id] if at is None else at for node_id, at in zip(targets, finished, strict=True)}

    def _node(self, node_id: str) -> _Node:
        if node_id not in self._nodes:
            self._nodes[node_id] = _HereNode() if node_id == self._here else _RemoteNode(node_id)
        return self._nodes[node_id]


def _pieces(numbers: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(numbers), PIECE_BLOCKS):
        yield list(numbers[start : start + PIECE_BLOCKS])


class _HereNode:
    """The mirror in the driver's process."""

    def __init__(self) -> None:
        self._mirror = WeightMirror()

    async def keep(self, weights: StagedWeights) -> StagedWeights:
        return await asyncio.to_thread(self._mirror.keep, weights)

    async def blocks(self, path: str) -> Blocks:
        return await asyncio.to_thread(Blocks.of, path)

    async def read(self, path: str, numbers: Sequence[int]) -> Any:
        """Return a Ray object of what `read_blocks` returns."""
        return await asyncio.to_thread(lambda: ray.put(read_blocks(path, numbers)))

    async def pass_on(self, numbers: Sequence[int]) -> Any:
        """Return the same of blocks that arrived in this mirror."""
        return await self.read(self._mirror.path, numbers)

    async def begin(self, blocks: Blocks) -> list[int]:
        return await asyncio.to_thread(self._mirror.begin, blocks)

    async def write(self, numbers: Sequence[int], piece: Any) -> None:
        await asyncio.to_thread(lambda: self._mirror.write(numbers, ray.get(piece, timeout=TIMEOUT_S)))

    async def finish(self, weights: StagedWeights) -> StagedWeights:
        return self._mirror.finish(weights)

    async def close(self) -> None:
        self._mirror.close()


class MirrorActor(WeightMirror):
    """Ray actor with the mirror of its node."""

    def __init__(self) -> None:
        end_by_sigterm()
        super().__init__()

    def blocks(self, path: str) -> Blocks:
        return Blocks.of(path)

    def read(self, path: str, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        return read_blocks(path, numbers)

    def pass_on(self, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        return read_blocks(self.path, numbers)


class _RemoteNode:
    """The mirror in an actor on another node. Raises InferenceError if the node is lost."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        actor: Any = ray.remote(MirrorActor)
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 2 * PIECES_UNDER_WAY}  # pieces in and out
        self._actor = actor.options(**options, scheduling_strategy=strategy).remote()

    async def keep(self, weights: StagedWeights) -> StagedWeights:
        return await self._within(self._actor.keep.remote(weights))

    async def blocks(self, path: str) -> Blocks:
        return await self._within(self._actor.blocks.remote(path))

    async def read(self, path: str, numbers: Sequence[int]) -> Any:
        return self._actor.read.remote(path, numbers)

    async def pass_on(self, numbers: Sequence[int]) -> Any:
        return self._actor.pass_on.remote(numbers)

    async def begin(self, blocks: Blocks) -> list[int]:
        return await self._within(self._actor.begin.remote(blocks))

    async def write(self, numbers: Sequence[int], piece: Any) -> None:
        await self._within(self._actor.write.remote(numbers, piece))

    async def finish(self, weights: StagedWeights) -> StagedWeights:
        return await self._within(self._actor.finish.remote(weights))

    async def close(self) -> None:
        ray.kill(self._actor)

    async def _within(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await call
        except TimeoutError:
            raise InferenceError(f"node {self._node_id} did not take new weights within {TIMEOUT_S:g} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, RollFlashError):
                raise error.cause from None
            raise InferenceError(f"node {self._node_id} cannot take new weights: {first_line(error.cause)}") from None
        except (RayActorError, ActorUnschedulableError) as error:
            raise InferenceError(f"node {self._node_id} is lost: {first_line(error)}") from None


_Node = _HereNode | _RemoteNode
