"""Disjoint problems for training and evaluation.

Seeds from `HELD_OUT_SEEDS` on give held-out problems. The checksum of a problem, not its seed, decides its side.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import TypeVar

from roll_flash.errors import EnvError

HELD_OUT_SEEDS = 1_000_000_000
"""First held-out seed. Smaller seeds never give the problems of these seeds."""

HELD_OUT_SHARE = 8
"""One in this number of problems is held out."""

MAX_DRAWS = 10_000
"""Draws that found no problem of the seed's side, after which there is none."""

Problem = TypeVar("Problem")


def draw_problem(seed: int, draw: Callable[[random.Random], Problem], as_text: Callable[[Problem], str]) -> Problem:
    """Return the first problem drawn from this seed that belongs to the seed's side. Raises EnvError if there is none:
    to draw on for ever would stop a worker with all its episodes."""
    generator, is_held_out = random.Random(seed), seed >= HELD_OUT_SEEDS
    for _ in range(MAX_DRAWS):
        problem = draw(generator)
        if (zlib.crc32(as_text(problem).encode()) % HELD_OUT_SHARE == 0) == is_held_out:
            return problem
    side = "is held out, for evaluations" if is_held_out else "is left for training"
    raise EnvError(f"none of {MAX_DRAWS:,} problems {side}: the task has too few different ones; make it larger")
