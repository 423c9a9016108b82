"""ROLL Flash: asynchronous reinforcement learning for language-model agents.

`load_config`, `train`, `evaluate` and `Run` do what the command line does. Public names are imported lazily, on first
use, so that `import roll_flash` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_flash.chat.judge import Judge
    from roll_flash.config.own_functions import advantage, loss, stage
    from roll_flash.config.tree import Config, load_config
    from roll_flash.envs.agents.session_access import AgentGateway
    from roll_flash.envs.base import Env, SandboxEnv, TextSpace
    from roll_flash.envs.registration import make_env, register_env
    from roll_flash.envs.rewards.functions import Rubric, reward
    from roll_flash.envs.tools.functions import tool
    from roll_flash.envs.tools.tool_env import SandboxToolEnv, ToolEnv
    from roll_flash.errors import ConfigError, RollFlashError
    from roll_flash.evaluation.result import EvalResult
    from roll_flash.evaluator import evaluate
    from roll_flash.run.results import Run
    from roll_flash.sandboxes import ExecResult, SandboxSpec, open_sandbox
    from roll_flash.scheduling.tasks import RowTasks, ShuffledTasks, TaskSource
    from roll_flash.trainer import train
    from roll_flash.types import Task

__version__ = "0.1.0"

_HOMES = {
    "Config": "roll_flash.config.tree",
    "load_config": "roll_flash.config.tree",
    "train": "roll_flash.trainer",
    "evaluate": "roll_flash.evaluator",
    "EvalResult": "roll_flash.evaluation.result",
    "Run": "roll_flash.run.results",
    "ConfigError": "roll_flash.errors",
    "RollFlashError": "roll_flash.errors",
    "AgentGateway": "roll_flash.envs.agents.session_access",
    "Env": "roll_flash.envs.base",
    "SandboxEnv": "roll_flash.envs.base",
    "SandboxToolEnv": "roll_flash.envs.tools.tool_env",
    "TextSpace": "roll_flash.envs.base",
    "ToolEnv": "roll_flash.envs.tools.tool_env",
    "Judge": "roll_flash.chat.judge",
    "Rubric": "roll_flash.envs.rewards.functions",
    "advantage": "roll_flash.config.own_functions",
    "loss": "roll_flash.config.own_functions",
    "stage": "roll_flash.config.own_functions",
    "make_env": "roll_flash.envs.registration",
    "register_env": "roll_flash.envs.registration",
    "reward": "roll_flash.envs.rewards.functions",
    "tool": "roll_flash.envs.tools.functions",
    "RowTasks": "roll_flash.scheduling.tasks",
    "ShuffledTasks": "roll_flash.scheduling.tasks",
    "Task": "roll_flash.types",
    "TaskSource": "roll_flash.scheduling.tasks",
    "ExecResult": "roll_flash.sandboxes",
    "SandboxSpec": "roll_flash.sandboxes",
    "open_sandbox": "roll_flash.sandboxes",
}

__all__ = [
    "AgentGateway",
    "Config",
    "ConfigError",
    "Env",
    "EvalResult",
    "ExecResult",
    "Judge",
    "RollFlashError",
    "RowTasks",
    "Rubric",
    "Run",
    "SandboxEnv",
    "SandboxSpec",
    "SandboxToolEnv",
    "ShuffledTasks",
    "Task",
    "TaskSource",
    "TextSpace",
    "ToolEnv",
    "advantage",
    "evaluate",
    "load_config",
    "loss",
    "make_env",
    "open_sandbox",
    "register_env",
    "reward",
    "stage",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'roll_flash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
