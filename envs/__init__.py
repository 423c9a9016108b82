"""Environments that ship with ROLL Flash, and the API that they and a user's own are written against."""

from roll_flash.envs.base import Env, Observation, SandboxEnv, StepResult
from roll_flash.envs.registration import register, register_env

__all__ = ["Env", "Observation", "SandboxEnv", "StepResult", "register", "register_env"]

# gymnasium 1.x loads no plug-ins by itself: importing this package is what makes the ids known.
register()
