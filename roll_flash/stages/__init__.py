"""Stages of a run: judges, reward models and user classes that score trajectories while episodes are running."""

from roll_flash.stages.reward_stage import RewardStage, check_stages
from roll_flash.stages.running import RunningStages

__all__ = ["RewardStage", "RunningStages", "check_stages"]
