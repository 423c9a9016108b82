"""Checks of a user's own loss and advantage functions, for tests: the ones that `train` does at its start."""

from roll_flash.learner.losses.own import check_advantage, check_loss

__all__ = ["check_advantage", "check_loss"]
