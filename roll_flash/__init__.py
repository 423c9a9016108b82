"""ROLL Flash: asynchronous reinforcement learning for language-model agents.

The public names are imported on first use, so that `import roll_flash.config` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_flash.config import Config, load_config
    from roll_flash.envs.base import Env, SandboxEnv
    from roll_flash.envs.registration import register_env
    from roll_flash.sandboxes import ExecResult, SandboxSpec, open_sandbox

__version__ = "0.1.0"

_HOMES = {
    "Config": "roll_flash.config",
    "load_config": "roll_flash.config",
    "Env": "roll_flash.envs.base",
    "SandboxEnv": "roll_flash.envs.base",
    "register_env": "roll_flash.envs.registration",
    "ExecResult": "roll_flash.sandboxes",
    "SandboxSpec": "roll_flash.sandboxes",
    "open_sandbox": "roll_flash.sandboxes",
}

__all__ = ["Config", "Env", "ExecResult", "SandboxEnv", "SandboxSpec", "load_config", "open_sandbox", "register_env"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'roll_flash' has no attribute {name!r}")
