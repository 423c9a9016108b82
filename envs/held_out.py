"""Problems for training and problems for evaluation that have none in common.

Seeds from `HELD_OUT_SEEDS` on are held out. A checksum of a problem, not its seed, decides which side it is on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

HELD_OUT_SEEDS = 1_000_000_000
"""Seeds from here on give problems that no smaller seed gives."""

HELD_OUT_SHARE = 8
"""One in so many problems is held out."""

Problem = TypeVar("Problem")


def draw_problem(seed: int, draw: Callable[[random.Random], Problem], as_text: Callable[[Problem], str]) -> Problem:
    """The first problem of this seed that is on the side of the seed."""
    generator = random.Random(seed)
    while True:
        problem = draw(generator)
        if (zlib.crc32(as_text(problem).encode()) % HELD_OUT_SHARE == 0) == (seed >= HELD_OUT_SEEDS):
            return problem
