"""Packs sequences into rows in which every shared prefix is computed once.

A row is the prefix tree of its sequences in depth-first order. The longest common token prefix of two sequences is
detected, never assumed: the prompt of a group's replicas, few-shot examples shared by several groups and equal first
tokens of replicas all appear once. Token i may attend to token j exactly if j is an ancestor of i or i itself; in
depth-first order this is j <= i < subtree_end[j]. There is no padding.

The result is exact: a token sees the same tokens at the same positions as in a separate sequence. Where experts are
replayed, a shared token has those of the first sequence in the order of the tree: two servers may have computed it with
different experts, and a token that is computed once has one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.inference import fill_experts
from roll_flash.engines.learner import SampleName


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sequence to train on. Arrays have shape [T]; the first token is never a policy token.

    `token_weight` is the weight of each of its tokens in the mean over a step. `prox_logprobs` are computed at the
    step's start; None means that the training forward pass provides them.
    """

    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]
    token_weight: float = 1.0
    prox_logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None
    """[T, layers, k] as in `Trajectory`."""
    name: SampleName | None = None
    rewards: NDArray[np.float64] | None = None
    """Reward after each policy token, as this and the following arrays only with a critic."""
    value_places: NDArray[np.int64] | None = None
    """For each policy token, the one before which its value is read: itself, or the first of its turn."""
    values: NDArray[np.float32] | None = None
    """Predicted at the step's start."""
    returns: NDArray[np.float32] | None = None
    """What the values should be."""
    targets: NDArray[np.int64] | None = None
    """The tokens whose log-probabilities are wanted at each place; None: `token_ids` themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """N tree nodes and the M policy tokens that are predicted from them (several may share a node).

    `token_ids`, `position_ids`, `subtree_end`: int64 [N]. The other arrays have shape [M]: `source` is the node whose
    hidden state predicts the token (ascending), `target` its id, `sequence_ids` numbers the row's sequences from 0.
    `members` maps these numbers to indices of the packed sequences. `padded_tokens` is the token count without sharing.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    subtree_end: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]
    token_weights: NDArray[np.float32]
    prox_logprobs: NDArray[np.float32] | None
    members: tuple[int, ...]
    padded_tokens: int
    routed_experts: NDArray[np.int16] | None = None
    """[N, layers, k]: experts that the model must use; None: those that it chooses."""
    value_source: NDArray[np.int64] | None = None
    """[M]: the node whose hidden state gives the value; None: `source`."""
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    """Both [M], as in `TrainSequence`."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def after_updates(self) -> NDArray[np.bool_]:
        """Return [M]: true for tokens whose server got new weights since their turn began. They were sampled from keys
        and values of earlier weights, as the learner never computes them."""
        order, begins = self._turns()
        versions = self.versions[order]
        first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        found = np.empty(len(order), np.bool_)
        found[order] = versions != versions[first]
        return found

    def turn_ids(self) -> NDArray[np.int64]:
        """Return [M]: the turn of each token, numbered from 0 over all sequences. A turn is an unbroken run of policy
        tokens of one sequence; a token without a log-probability, which is none, ends it."""
        order, begins = self._turns()
        found = np.empty(len(order), np.int64)
        found[order] = np.cumsum(begins) - 1
        return found

    def _turns(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the order of the tokens by sequence and position, and in this order, true where a turn begins."""
        positions = self.position_ids[self.source]
        order = np.lexsort((positions, self.sequence_ids))
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (np.diff(self.sequence_ids[order]) != 0) | (np.diff(positions[order]) != 1)
        return order, begins


def pack(sequences: Sequence[TrainSequence], max_tokens: int) -> list[PackedRow]:
    """Pack all sequences into rows of at most `max_tokens` nodes; a group split over rows repeats its prefix.

    A sequence longer than `max_tokens` gets a separate row.
    """
    rows: list[_Tree] = []
    # In lexicographic order the previous sequence has the longest shared prefix: no search is needed.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].token_ids.tolist())
    for index in order:
        if not rows or not rows[-1].has_room(sequences[index], max_tokens):
            rows.append(_Tree())
        rows[-1].add(sequences[index], index)
    return [row.finish() for row in rows]


def with_predictions(
    sequences: Sequence[TrainSequence], rows: Sequence[PackedRow], **predictions: Sequence[NDArray[np.float32]]
) -> list[TrainSequence]:
    """Return `sequences` with `prox_logprobs` or `values` taken from the rows: one array [policy tokens] per row."""
    found = list(sequences)
    for name, of_rows in predictions.items():
        for row, values in zip(rows, of_rows, strict=True):
            for number, member in enumerate(row.members):
                sequence = found[member]
                spread = np.zeros(len(sequence.token_ids), np.float32)
                # A row keeps the token order of each sequence, because ancestors come first in a tree.
                spread[sequence.policy_mask] = values[row.sequence_ids == number]
                changed: dict[str, Any] = {name: spread}
                found[member] = replace(sequence, **changed)
    return found


def by_sample(
    row: PackedRow, sequences: Sequence[TrainSequence], values: NDArray[np.float32]
) -> dict[SampleName, NDArray[np.float32]]:
    """Return `values` [policy tokens of the row] by the names of its sequences, each in the order of its tokens."""
    names = [sequences[member].name for member in row.members]
    return {name: values[row.sequence_ids == number] for number, name in enumerate(names) if name is not None}


class _Tree:
    """A prefix tree; sequences must be added in lexicographic order."""

    def __init__(self) -> None:
        self._size = 0
        self._path: NDArray[np.int64] = np.empty(0, np.int64)
        self._last: NDArray[np.int32] = np.empty(0, np.int32)
        self._token_ids: list[NDArray[np.int32]] = []
        self._position_ids: list[NDArray[np.int64]] = []
        self._ends: list[tuple[NDArray[np.int64], int]] = []
        self._sequences: list[TrainSequence] = []
        self._members: list[int] = []
        self._experts: list[NDArray[np.int16] | None] = []
        self._sources: list[NDArray[np.int64]] = []
        self._value_sources: list[NDArray[np.int64]] = []

    def has_room(self, sequence: TrainSequence, max_tokens: int) -> bool:
        new = len(sequence.token_ids) - common_prefix_length(self._last, sequence.token_ids)
        return self._size + new <= max_tokens

    def add(self, sequence: TrainSequence, index: int) -> None:
        shared = common_prefix_length(self._last, sequence.token_ids)
        new = len(sequence.token_ids) - shared
        self._ends.append((self._path[shared:], self._size))
        self._path = np.concatenate([self._path[:shared], np.arange(self._size, self._size + new)])
        self._size += new
        self._last = sequence.token_ids
        self._token_ids.append(sequence.token_ids[shared:])
        self._position_ids.append(np.arange(shared, shared + new))
        self._sequences.append(sequence)
        self._members.append(index)
        self._experts.append(None if sequence.routed_experts is None else sequence.routed_experts[shared:])
        self._sources.append(self._path[np.flatnonzero(sequence.policy_mask) - 1])
        if sequence.value_places is not None:
            self._value_sources.append(self._path[sequence.value_places[sequence.policy_mask] - 1])

    def finish(self) -> PackedRow:
        subtree_end = np.full(self._size, self._size, np.int64)
        for nodes, end in self._ends:
            subtree_end[nodes] = end
        sequences = self._sequences
        source = np.concatenate(self._sources)
        # Ascending order gives the output head contiguous memory access.
        order = np.argsort(source, kind="stable")
        lengths = [len(part) for part in self._sources]
        return PackedRow(
            token_ids=np.concatenate(self._token_ids).astype(np.int64),
            position_ids=np.concatenate(self._position_ids),
            subtree_end=subtree_end,
            source=source[order],
            target=np.concatenate(
                [(s.token_ids if s.targets is None else s.targets)[s.policy_mask] for s in sequences]
            ).astype(np.int64)[order],
            sequence_ids=np.repeat(np.arange(len(sequences)), lengths)[order],
            behavior_logprobs=np.concatenate([s.behavior_logprobs[s.policy_mask] for s in sequences])[order],
            versions=np.concatenate([s.versions[s.policy_mask] for s in sequences])[order],
            advantages=np.concatenate([s.advantages[s.policy_mask] for s in sequences])[order],
            token_weights=np.repeat(np.array([s.token_weight for s in sequences], np.float32), lengths)[order],
            prox_logprobs=self._joined("prox_logprobs", order),
            members=tuple(self._members),
            padded_tokens=sum(len(s.token_ids) for s in sequences),
            routed_experts=fill_experts([len(part) for part in self._token_ids], self._experts),
            value_source=np.concatenate(self._value_sources)[order] if self._value_sources else None,
            values=self._joined("values", order),
            returns=self._joined("returns", order),
        )

    def _joined(self, name: str, order: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return an array of the policy tokens of all sequences; None if one does not have it."""
        parts = [(getattr(sequence, name), sequence.policy_mask) for sequence in self._sequences]
        if any(values is None for values, _ in parts):
            return None
        joined: NDArray[np.float32] = np.concatenate([values[mask] for values, mask in parts])[order]
        return joined


def common_prefix_length(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if different.size else shorter


def attention_mask(subtree_end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the dense mask [N, N], true if token i (first axis) may attend to token j; for tests and SDPA."""
    index = np.arange(len(subtree_end))
    return (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])
