"""Trajectories in Ray's object store: what a worker puts there at the end of an episode, and how it is read.

A worker hands in the episodes that ended within a few milliseconds together: objects cost per object, not per byte.
Arrays, text and log lines lie in objects of their own, because the learner needs only the arrays.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_flash.engines.inference import fill_experts
from roll_flash.errors import StreamError, first_line
from roll_flash.monitor.episodes import episode_line
from roll_flash.stream.episodes import finished_episode
from roll_flash.types import Branch, EpisodeFailure, FinishedEpisode, StoredTrajectory, Trajectory

FETCH_TIMEOUT_S = 120.0
ARRAYS = ("token_ids", "policy_mask", "logprobs", "versions")
EXPERTS = "routed_experts"
"""An array that only mixtures of experts have, whose routing is replayed."""
_EMPTY: dict[str, Any] = {EXPERTS: None, **{name: np.empty(0, np.int32) for name in ARRAYS}}


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """What the learner needs of a trajectory. The arrays hold its samples one after another."""

    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: tuple[int, ...]
    """Number of tokens of each sample."""
    turn_spans: tuple[tuple[int, int], ...]
    """(start, end) of each turn of the first sample."""
    routed_experts: NDArray[np.int16] | None = None
    """[T, layers, k] as in `Trajectory`; None if routing is not replayed."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> TokenArrays:
        return TokenBlock.of([trajectory])[0]

    def samples(self) -> list[dict[str, Any]]:
        """Return the arrays of each sample, by name."""
        ends = np.cumsum(self.lengths).tolist()
        spans = [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        names = ARRAYS if self.routed_experts is None else (*ARRAYS, EXPERTS)
        return [{name: getattr(self, name)[span] for name in names} for span in spans]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """Arrays of several trajectories, one after another: many small arrays would take Ray ten times as long."""

    arrays: dict[str, Any]
    starts: list[int]
    """Place of the first token of each trajectory, and the end of the last."""
    lengths: list[tuple[int, ...]]
    turn_spans: list[tuple[tuple[int, int], ...]]
    """Both as in `TokenArrays`."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TokenBlock:
        samples = [sample for trajectory in trajectories for sample in trajectory.samples]
        lengths = [tuple(len(sample.token_ids) for sample in trajectory.samples) for trajectory in trajectories]
        arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in ARRAYS if samples}
        tokens = [len(sample.token_ids) for sample in samples]
        if (experts := fill_experts(tokens, [sample.routed_experts for sample in samples])) is not None:
            arrays[EXPERTS] = experts
        return cls(
            arrays,
            np.cumsum([0, *map(sum, lengths)]).tolist(),
            lengths,
            [tuple((turn.start, turn.end) for turn in trajectory.turns) for trajectory in trajectories],
        )

    def __getitem__(self, index: int) -> TokenArrays:
        span = slice(self.starts[index], self.starts[index + 1])
        arrays = {name: array[span] for name, array in self.arrays.items()}
        return TokenArrays(**arrays, lengths=self.lengths[index], turn_spans=self.turn_spans[index])


HandedIn = tuple[list[FinishedEpisode | EpisodeFailure], TokenBlock, list[bytes], list[bytes]]


def hand_in(outcomes: Sequence[Trajectory | EpisodeFailure], worker: str | None = None) -> HandedIn:
    """Return what `worker` returns of episodes that ended, as four objects, of which the driver reads only the first.

    They are: the outcomes, of trajectories without `data`; and of the trajectories among them, in this order, the
    arrays, the rest in pickled form, and the lines of the episode log.
    """
    whole = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    ended = [
        outcome if isinstance(outcome, EpisodeFailure) else replace(finished_episode(outcome), data=None)
        for outcome in outcomes
    ]
    lines = [episode_line(each, worker) for each in whole]
    return ended, TokenBlock.of(whole), [_text(each) for each in whole], lines


def _text(trajectory: Trajectory) -> bytes:
    branches = tuple(replace(branch, **_EMPTY) for branch in trajectory.branches)
    return pickle.dumps(replace(trajectory, branches=branches, **_EMPTY))


def located(
    ended: Sequence[FinishedEpisode | EpisodeFailure], tokens: Any, texts: Any, lines: Any
) -> Sequence[FinishedEpisode | EpisodeFailure]:
    """Note in what a worker handed in where the data of each trajectory is."""
    trajectories = (each for each in ended if isinstance(each, FinishedEpisode))
    for index, each in enumerate(trajectories):
        each.data = StoredTrajectory(index, tokens, texts, lines)
    return ended


def join(text: bytes, tokens: TokenArrays) -> Trajectory:
    """Return the whole trajectory."""
    trajectory: Trajectory = pickle.loads(text)  # written by `_text` in a worker of this run
    own, *others = tokens.samples()
    branches: tuple[Branch, ...] = tuple(
        replace(branch, **arrays) for branch, arrays in zip(trajectory.branches, others, strict=True)
    )
    return replace(trajectory, **own, branches=branches)


def fetch_tokens(data: Sequence[Trajectory | StoredTrajectory | None]) -> list[TokenArrays]:
    """Read the arrays of trajectories, without a copy where they lie on this node. Raises StreamError."""
    blocks = _get([each.tokens for each in data if isinstance(each, StoredTrajectory)])
    found = []
    for each in data:
        assert each is not None, "a simulated episode has no data"
        found.append(TokenArrays.of(each) if isinstance(each, Trajectory) else blocks[each.tokens][each.index])
    return found


def fetch_trajectories(data: Sequence[Trajectory | StoredTrajectory | None]) -> list[Trajectory]:
    """Read whole trajectories. Blocks: call it in a thread. Raises StreamError."""
    arrays = fetch_tokens(data)
    blocks = _get([each.texts for each in data if isinstance(each, StoredTrajectory)])
    return [
        join(blocks[each.texts][each.index], tokens) if isinstance(each, StoredTrajectory) else each
        for each, tokens in zip(data, arrays, strict=True)
        if each is not None
    ]


def fetch_lines(stored: Sequence[StoredTrajectory]) -> list[bytes]:
    """Read the lines of the episode log. Blocks: call it in a thread. Raises StreamError."""
    blocks = _get([each.lines for each in stored])
    return [blocks[each.lines][each.index] for each in stored]


def _get(references: Sequence[Any]) -> dict[Any, Any]:
    """Read each object once."""
    import ray  # only where objects are read: a worker of an evaluation in one process needs no Ray
    from ray.exceptions import GetTimeoutError, RayError

    distinct = list(dict.fromkeys(references))
    if not distinct:
        return {}
    try:
        return dict(zip(distinct, ray.get(distinct, timeout=FETCH_TIMEOUT_S), strict=True))
    except GetTimeoutError:
        what = f"were not there within {FETCH_TIMEOUT_S:g} s"
    except RayError as error:
        what = f"are lost: {first_line(error)}"
    raise StreamError(f"trajectories in Ray's object store {what}; did a node die? resume the run from its checkpoint")
