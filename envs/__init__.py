"""Environments that ship with ROLL Flash, and the API for writing an environment.

Importing this package registers the shipped environments, so that `gymnasium.make("ShellMath-v0")` works.
"""

from roll_flash.envs.base import Env, Observation, SandboxEnv, StepResult, TextSpace
from roll_flash.envs.registration import make_env, register_env, register_shipped
from roll_flash.envs.rewards.functions import Rubric, reward
from roll_flash.envs.tools.functions import tool
from roll_flash.envs.tools.tool_env import SandboxToolEnv, ToolEnv

__all__ = [
    "Env",
    "Observation",
    "Rubric",
    "SandboxEnv",
    "SandboxToolEnv",
    "StepResult",
    "TextSpace",
    "ToolEnv",
    "make_env",
    "register_env",
    "reward",
    "tool",
]

register_shipped()
