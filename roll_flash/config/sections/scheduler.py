"""The config section `scheduler`: which episodes start, how old their tokens may be, and which groups are trained.

docs/scheduling.md explains the settings; `roll_flash.scheduling` implements them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll_flash.config.fields import NonNegativeInt, NumberOrAuto, PositiveInt, Section


class SchedulerConfig(Section):
    async_ratio: NumberOrAuto = 1.0
    """A token may be trained at version v only if it was sampled at version >= v - async_ratio; 0 is synchronous.
    `auto` adapts it within `async_ratio_bounds` from the measurements of each step."""
    async_ratio_bounds: tuple[NonNegativeInt, NonNegativeInt] = (0, 4)
    """Minimum and maximum of `async_ratio: auto`."""
    on_stale: Literal["evict", "requeue", "wait"] = "evict"
    """Action for groups that became too stale to train: `evict` drops them, `requeue` also plays their tasks again (at
    most `max_requeues` times each), `wait` lets no step finish without them."""
    max_requeues: NonNegativeInt = 3
    """Maximum replays of one task by `on_stale: requeue`; after that it is dropped and counted."""
    groups_per_step: PositiveInt = 8
    """Groups (tasks) per training step."""
    group_size: PositiveInt = 8
    """Replicas of one task, each a separate episode. 1 needs `learner.advantage: gae`: others compare replicas."""
    extra_groups: NonNegativeInt = 0
    """Groups in flight beyond the number that the async ratio needs: redundancy against stragglers."""
    extra_replicas: NonNegativeInt = 0
    """Episodes of a group beyond `group_size`; the first `group_size` that finish complete the group."""
    surplus: Literal["keep", "cancel"] = "keep"
    """Surplus of the redundancy: `cancel` stops it at once, `keep` uses it while it is fresh."""
    mode: Literal["queue", "batch"] = "queue"
    """`queue`: a free slot takes the next episode; `batch`: all episodes of a step start together and end together."""
    replicate: bool = True
    """Schedule each replica of a group separately; `false` starts them together."""
    in_order: bool = False
    """Train groups in the order of submission, so that the trained groups have the distribution of the submitted
    ones."""
    drop_groups_without_signal: bool = False
    """Drop groups whose replicas all got the same reward and play others (at most 4 x groups_per_step per step)."""
    max_steps_without_signal: PositiveInt = 4
    """With `drop_groups_without_signal`: maximum consecutive steps in which every group had equal rewards; then the run
    stops and reports it."""
    on_failure: Literal["smaller", "refill"] = "smaller"
    """Action when an episode failed after all retries: train the smaller group, or play another replica."""
    max_failures_in_a_row: PositiveInt = 64
    """Maximum consecutive failed episodes (those that were running when the first one failed count as one), and maximum
    consecutive groups that lost too many replicas; then the run stops and reports why."""

    @property
    def highest_async_ratio(self) -> float:
        """Upper bound of the staleness of any trained token."""
        return self.async_ratio_bounds[1] if self.async_ratio == "auto" else self.async_ratio

    @property
    def first_async_ratio(self) -> float:
        """Async ratio at the start of a run."""
        return self.async_ratio_bounds[0] if self.async_ratio == "auto" else self.async_ratio

    @property
    def replicas(self) -> int:
        """Number of episodes that a group starts with."""
        return self.group_size + self.extra_replicas

    @property
    def redundant_episodes(self) -> int:
        """Episodes in flight that a step does not need, by `extra_groups` and `extra_replicas`."""
        in_groups = self.groups_per_step * self.extra_replicas
        return in_groups + self.extra_groups * self.replicas

    @model_validator(mode="after")
    def _bounds(self) -> SchedulerConfig:
        if self.async_ratio_bounds[0] > self.async_ratio_bounds[1]:
            raise ValueError("async_ratio_bounds must be [smallest, largest]")
        return self

    @model_validator(mode="after")
    def _no_redundancy_in_order(self) -> SchedulerConfig:
        if self.in_order and self.redundant_episodes:
            raise ValueError("in_order trains every group: set extra_groups and extra_replicas to 0")
        return self
