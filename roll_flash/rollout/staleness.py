"""The staleness rule, exactly. Pure arithmetic over versions; a version is a number of optimizer steps.

A trajectory may be trained at learner version v only if every policy token in it was sampled at a version >= v - alpha.
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

    def is_fresh(self, oldest_version: int, learner_version: int) -> bool:
        """Whether data this old may be trained by the step that starts from `learner_version`."""
        return oldest_version >= learner_version - self.async_ratio

    def capacity(self, server_version: int, learner_version: int) -> int:
        """Groups that may be admitted and not yet be part of a finished step.

        A group admitted now begins with `server_version`, so the last step it can be part of is the one from
        `server_version + alpha`. From the step in progress to that one the learner takes `groups_per_step` each: more
        groups than that could not all be trained in time. With servers up to date this is ceil((1 + alpha) * G); while
        they lag behind, less, and nothing that is admitted is bound to be thrown away.
        """
        steps = server_version + self.async_ratio - learner_version + 1
        return max(0, math.ceil(steps * self.groups_per_step)) + self.extra_groups
