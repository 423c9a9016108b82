"""The staleness rule: pure arithmetic over versions. A version is a number of training steps.

A trajectory may be trained at learner version v only if all its policy tokens were sampled at a version >= v - alpha.

Versions are whole numbers, so only the whole part of alpha limits them: a token may be at most `floor(alpha)` steps
old. The fraction only affects admission: `ceil(fraction * G)` more tasks are drawn and queued, so that they start as
soon as a slot and a version allow it; they sample no token before that version. Starting them earlier, as a plain
capacity of `(1 + alpha) * G` does, would sample tokens that no step may train.
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

    @property
    def max_staleness(self) -> int:
        """Maximum age in steps of a trained token."""
        return math.floor(self.async_ratio)

    def last_step(self, oldest_version: int) -> int:
        """Return the last learner version whose step may train tokens from `oldest_version`."""
        return oldest_version + self.max_staleness

    def capacity(self, server_version: int, learner_version: int) -> int:
        """Maximum number of admitted groups (drawn and queued) that are not yet part of a finished step.

        If the servers are up to date, this is ceil((1 + alpha) * G) + extra.
        """
        steps = server_version + self.async_ratio - learner_version + 1
        return max(0, math.ceil(steps * self.groups_per_step)) + self.extra_groups

    def startable(self, server_version: int, open_step: int) -> int:
        """Maximum number of started groups not yet part of a finished step; `open_step`: next step with free places.

        A group that starts now uses `server_version`, so the last step that can train it is the one from
        `server_version + floor(alpha)`. From the open step to that one the learner takes `groups_per_step` each; more
        groups could not all be trained in time. `extra_groups` is redundancy that the user asks for on top; it
        starts only if it could still be trained.
        """
        steps = self.last_step(server_version) - open_step + 1
        return steps * self.groups_per_step + self.extra_groups if steps > 0 else 0
