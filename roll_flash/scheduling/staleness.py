"""The staleness rule, exactly. Pure arithmetic over versions; a version is a number of optimizer steps.

A trajectory may be trained at learner version v only if every policy token in it was sampled at a version >= v - alpha.

Versions are whole numbers, so only the whole part of alpha can bound them: a token may be at most `floor(alpha)` steps
old, whatever the fraction. The fraction shapes admission alone: `ceil(fraction * G)` further tasks are drawn and
queued, so that they begin the moment a slot and a version allow it, but they sample no token before that version.
Starting them earlier, as a plain capacity of `(1 + alpha) * G` does, would sample tokens that no step may train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """`async_ratio` is the alpha of ROLL Flash (arXiv 2510.11345, section on the asynchronous ratio)."""

    async_ratio: float
    groups_per_step: int
    extra_groups: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.async_ratio) and self.async_ratio >= 0):
            raise ValueError(f"async_ratio {self.async_ratio} must be a finite number >= 0; 0 is synchronous training")
        if self.groups_per_step < 1 or self.extra_groups < 0:
            raise ValueError("groups_per_step must be >= 1 and extra_groups >= 0")

    @property
    def oldest_age(self) -> int:
        """Steps that a trained token may be old."""
        return math.floor(self.async_ratio)

    def last_step(self, oldest_version: int) -> int:
        """The last learner version whose step may train data with tokens from `oldest_version`."""
        return oldest_version + self.oldest_age

    def is_fresh(self, oldest_version: int, learner_version: int) -> bool:
        """Whether data this old may be trained by the step that starts from `learner_version`."""
        return oldest_version >= learner_version - self.async_ratio

    def capacity(self, server_version: int, learner_version: int) -> int:
        """Groups that may be admitted (drawn and queued) and not yet be part of a finished step.

        With servers up to date this is ceil((1 + alpha) * G) + extra.
        """
        steps = server_version + self.async_ratio - learner_version + 1
        return max(0, math.ceil(steps * self.groups_per_step)) + self.extra_groups

    def startable(self, server_version: int, open_step: int) -> int:
        """Groups that may hold tokens and not yet be part of a finished step; `open_step` is the next that has places.

        A group that begins now begins with `server_version`, so the last step it can be part of is the one from
        `server_version + floor(alpha)`. From the open step to that one the learner takes `groups_per_step` each: more
        groups than that could not all be trained in time. `extra_groups` is redundancy on top, asked for by the user,
        and starts only where it could still be trained.
        """
        steps = self.last_step(server_version) - open_step + 1
        return steps * self.groups_per_step + self.extra_groups if steps > 0 else 0
