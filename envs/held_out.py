"""Disjoint problems for training and evaluation.

Seeds from `HELD_OUT_SEEDS` on give held-out problems. The checksum of a problem, not its seed, decides its side.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

HELD_OUT_SEEDS = 1_000_000_000
"""First held-out seed. Smaller seeds never give the problems of these seeds."""

HELD_OUT_SHARE = 8
"""One in this number of problems is held out."""

Problem = TypeVar("Problem")


def draw_problem(seed: int, draw: Callable[[random.Random], Problem], as_text: Callable[[Problem], str]) -> Problem:
    """Return the first problem drawn from this seed that belongs to the seed's side."""
    generator = random.Random(seed)
    while True:
        problem = draw(generator)
        if (zlib.crc32(as_text(problem).encode()) % HELD_OUT_SHARE == 0) == (seed >= HELD_OUT_SEEDS):
            return problem
