"""Stages of a run: judges, reward models, user classes and a teacher score trajectories while episodes are running."""

from roll_flash.stages.reward_stage import RewardStage, check_stages
from roll_flash.stages.running import RunningStages
from roll_flash.stages.teacher import Teacher

__all__ = ["RewardStage", "RunningStages", "Teacher", "check_stages"]
