"""Environments that ship with ROLL Flash, and the API that they and a user's own are written against.

Importing this package registers what ships, so that `gymnasium.make("ShellMath-v0")` works.
"""

from roll_flash.envs.base import Env, Observation, SandboxEnv, StepResult
from roll_flash.envs.registration import register_env, register_shipped

__all__ = ["Env", "Observation", "SandboxEnv", "StepResult", "register_env"]

register_shipped()
