"""ROLL Flash: asynchronous reinforcement learning for language-model agents.

Public names are imported lazily, on first use, so that `import roll_flash.config.tree` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_flash.config.tree import Config, load_config
    from roll_flash.envs.base import Env, SandboxEnv
    from roll_flash.envs.registration import make_env, register_env
    from roll_flash.envs.rewards.functions import Rubric, reward
    from roll_flash.envs.rewards.judge import Judge
    from roll_flash.envs.shipped.move_env import TextSpace
    from roll_flash.envs.tools.functions import tool
    from roll_flash.envs.tools.tool_env import SandboxToolEnv, ToolEnv
    from roll_flash.sandboxes import ExecResult, SandboxSpec, open_sandbox

__version__ = "0.1.0"

_HOMES = {
    "Config": "roll_flash.config.tree",
    "load_config": "roll_flash.config.tree",
    "Env": "roll_flash.envs.base",
    "SandboxEnv": "roll_flash.envs.base",
    "SandboxToolEnv": "roll_flash.envs.tools.tool_env",
    "TextSpace": "roll_flash.envs.shipped.move_env",
    "ToolEnv": "roll_flash.envs.tools.tool_env",
    "Judge": "roll_flash.envs.rewards.judge",
    "Rubric": "roll_flash.envs.rewards.functions",
    "make_env": "roll_flash.envs.registration",
    "register_env": "roll_flash.envs.registration",
    "reward": "roll_flash.envs.rewards.functions",
    "tool": "roll_flash.envs.tools.functions",
    "ExecResult": "roll_flash.sandboxes",
    "SandboxSpec": "roll_flash.sandboxes",
    "open_sandbox": "roll_flash.sandboxes",
}

__all__ = [
    "Config",
    "Env",
    "ExecResult",
    "Judge",
    "Rubric",
    "SandboxEnv",
    "SandboxSpec",
    "SandboxToolEnv",
    "TextSpace",
    "ToolEnv",
    "load_config",
    "make_env",
    "open_sandbox",
    "register_env",
    "reward",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'roll_flash' has no attribute {name!r}")
