"""Config of asynchronous stages, which score a trajectory after its episode and before the learner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat

from roll_flash.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section


class StageConfig(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Name of the stage in metrics and messages."""
    entry_point: str
    """`judge`, `reward_model`, or `module:Class` (`file.py:Class`) with a method `score`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    reward: Literal["add", "multiply", "replace"] = "add"
    """Operation that applies `weight` x score to the reward. Stages run in the order of this list."""
    weight: FiniteFloat = 1.0
    """Factor of the score."""
    workers: PositiveInt = 4
    """Maximum number of concurrent calls of `score`."""
    batch_size: PositiveInt = 1
    """Maximum trajectories per call; they fail together."""
    timeout_s: PositiveFloat = 60.0
    """Timeout in seconds of one call."""
    retries: NonNegativeInt = 1
    """Maximum retries of a failed call."""
    on_failure: Literal["drop_row", "drop_group", "stop"] = "drop_row"
    """After the last retry of a call: do not train its trajectories, or none of their group, or stop the run. With
    `drop_group` a call gets one whole group. A missing reward is never invented."""
    max_failures_in_a_row: PositiveInt = 8
    """Maximum consecutive calls that fail after all retries; then the run stops and reports why."""


def _different_names(stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two stages are named {name!r}; their scores could not be told apart")
    if {"learner", "reward"} & set(names):
        raise ValueError("a stage cannot be named learner or reward")
    return stages


Stages = Annotated[tuple[StageConfig, ...], AfterValidator(_different_names)]
