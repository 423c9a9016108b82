"""Measures at the start what the longest row needs on the GPU: a run that does not fit ends before its first rollout.

Rows of a quarter and of half the length are measured first: peak memory grows linearly with the length, so they say how
long a row could be. Then the whole length is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from roll_flash.errors import ConfigError, first_line
from roll_flash.learner.packing.rows import PackedRow, TrainSequence, pack

_GIB = 1 << 30
_SHORTEST = 2
"""Tokens of the shortest row with a policy token."""


class GpuMemory:
    """Memory of one GPU in bytes, from counters of torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def room(self) -> int:
        """Return what this process could have allocated at once, with what it has already."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def begin(self) -> None:
        """Begin to measure a peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Return the most that was allocated at once since `begin`, with what was allocated before."""
        return torch.cuda.max_memory_allocated(self._device)


def check_longest_row(
    run_row: Callable[[int], None],
    tokens: int,
    counters: GpuMemory,
    *,
    later_bytes: int,
    largest: Callable[[int], int],
    key: str,
) -> str:
    """Run forward and backward passes on rows of up to `tokens` tokens; return a line that says what they need.

    `later_bytes`: what the run allocates and keeps later. `largest`: the largest number of all ranks, a collective.
    Raises ConfigError if a row of `tokens` does not fit; `key` is what limits its length. A collective.
    """
    room = counters.room() - later_bytes
    run_row(_SHORTEST)  # gradients and what libraries allocate once
    short, middle = (max(_SHORTEST, tokens // part) for part in (4, 2))
    low, high = (_peak(run_row, length, counters) for length in (short, middle))
    per_token = max(1, (high - low) // max(1, middle - short))
    fits = max(0, -largest(-(middle + (room - high) // per_token)))
    wanted = largest(high + per_token * (tokens - middle))
    if fits < tokens:
        raise ConfigError(_too_long(key, tokens, fits, wanted, room))
    try:
        peak = largest(_peak(run_row, tokens, counters))
    except torch.OutOfMemoryError:
        raise ConfigError(_too_long(key, tokens, min(fits, tokens * 3 // 4), wanted, room)) from None
    return (
        f"the longest row ({key}, {tokens} tokens) needs {peak / _GIB:.1f} of {room / _GIB:.1f} GiB, with weights, "
        f"gradients and optimizer; rows of about {fits} tokens would fit"
    )


@contextmanager
def explained_states() -> Iterator[None]:
    """Raises ConfigError in place of torch's error if weights and optimizer states have no room on the GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"weights and optimizer states do not fit on the GPU ({first_line(error)}); more learner.ranks, "
            "learner.lora.rank or a smaller model need less"
        ) from None


def longest_row(tokens: int, max_length: int | None, vocabulary: int) -> PackedRow:
    """Return a row of `tokens` tokens in sequences of at most `max_length`, which share nothing. Every token but the
    first of a sequence is a policy token without an advantage."""
    length = min(tokens, max_length or tokens)
    sequences = [
        _sequence(min(length, tokens - first), number, vocabulary)
        for number, first in enumerate(range(0, tokens, length))
    ]
    (row,) = pack(sequences, tokens)
    return row


def _sequence(length: int, number: int, vocabulary: int) -> TrainSequence:
    zeros = np.zeros(length, np.float32)
    return TrainSequence(
        token_ids=((np.arange(length) * 7919 + number) % vocabulary).astype(np.int32),
        policy_mask=np.arange(length) > 0,
        behavior_logprobs=zeros,
        versions=np.zeros(length, np.int32),
        advantages=zeros,
    )


def _peak(run_row: Callable[[int], None], tokens: int, counters: GpuMemory) -> int:
    counters.begin()
    run_row(tokens)
    return counters.peak()


def _too_long(key: str, tokens: int, fits: int, wanted: int, room: int) -> str:
    advice = f"lower {key} to about {fits}" if fits else "use more learner.ranks"
    return (
        f"a row of {tokens} tokens ({key}) needs about {wanted / _GIB:.1f} GiB on the GPU, of which {room / _GIB:.1f} "
        f"are there; {advice}, or set learner.gradient_checkpointing=true if it is not"
    )
