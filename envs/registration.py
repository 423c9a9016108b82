"""Registration with gymnasium, and lookup of an environment by its id.

An id may be `Maze-v0` (shipped, or registered by a plug-in or by user code), `package.module:Maze-v0`,
`path/to/file.py:Maze-v0`, or either of the last two with a class name in place of a registered id.
Plug-ins are entry points of the group `roll_flash.envs`: a module that registers on import, or a function that does.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import gymnasium

from roll_flash.config.user_code import load_module
from roll_flash.envs.base import Env
from roll_flash.errors import ConfigError

ENTRY_POINT_GROUP = "roll_flash.envs"
SHIPPED = {
    "FileQuest-v0": "roll_flash.envs.shipped.file_quest:FileQuest",
    "GymText-v0": "roll_flash.envs.shipped.gym_text:GymText",
    "PythonRepair-v0": "roll_flash.envs.shipped.python_repair:PythonRepair",
    "ShellMath-v0": "roll_flash.envs.shipped.shell_math:ShellMath",
    "TextFrozenLake-v0": "roll_flash.envs.shipped.text_game:TextFrozenLake",
    "TextSokoban-v0": "roll_flash.envs.shipped.sokoban_level:TextSokoban",
}
OF_ROWS = {"Dataset-v0": "roll_flash.envs.datasets.env:make_dataset_env"}
"""Environments that are nothing without a data set."""
ADAPTERS = {
    "BFCL-v4": "roll_flash.envs.adapters.bfcl.env:BFCL",
    "MiniWoB-v0": "roll_flash.envs.adapters.miniwob.env:MiniWoB",
    "OpenEnv-v0": "roll_flash.envs.adapters.openenv.client:OpenEnv",
    "ReasoningGym-v0": "roll_flash.envs.adapters.reasoning_gym:ReasoningGym",
    "TaskFolder-v0": "roll_flash.envs.adapters.task_folders.env:TaskFolder",
    "TextArena-v0": "roll_flash.envs.adapters.textarena.games:TextArena",
    "TextArenaDuel-v0": "roll_flash.envs.adapters.textarena.duel:TextArenaDuel",
    "TextWorldExpress-v0": "roll_flash.envs.adapters.textworld_express:TextWorldExpress",
    "Verifiers-v0": "roll_flash.envs.adapters.verifiers.loading:make_verifiers",
}
"""Adapters to third-party environments. If an optional package is missing, the error names it."""
AGENT_ENV = "roll_flash.envs.agents.agent_env:AgentEnv"
AGENTS = {"MiniSweAgent-v0": "mini-swe-agent", "OpenAIAgent-v0": "openai", "SmolAgent-v0": "smolagents"}
"""`AgentEnv-v0` with one of its preset agents."""
RENAMED = {
    "plays_itself": "runs_own_loop",
    "asks_aside": "needs_unrecorded_calls",
    "least_step_timeout_s": "min_step_timeout_s",
    "least_episode_timeout_s": "min_episode_timeout_s",
    "calls_may_take_s": "calls_timeout_s",
}
"""Old name of an environment's attribute: new name. Nothing reads an old one, so it would be ignored silently."""
MULTI_AGENT = frozenset({"AECEnv", "ParallelEnv", "MultiAgentEnv"})
"""Base classes of environments of several agents (PettingZoo, RLlib)."""
_SYNC_WRAPPERS = (gymnasium.wrappers.OrderEnforcing, gymnasium.wrappers.TimeLimit)

logger = logging.getLogger("roll_flash.envs")


def register_env(id: str, entry_point: str | Callable[..., gymnasium.Env[Any, Any]], **kwargs: Any) -> None:
    """Register a text environment, so that `gymnasium.make(id)` and the `id` of an entry of a config's `envs` find it.

    A thin wrapper over `gymnasium.register` that leaves out the wrappers for synchronous environments with arrays,
    because they cannot check coroutines. Takes the arguments of `gymnasium.register`; `kwargs={...}` become defaults
    of the environment's arguments.
    """
    gymnasium.register(id, entry_point, disable_env_checker=True, order_enforce=False, **kwargs)


def register_shipped() -> None:
    """Register all shipped environments."""
    for id, entry_point in {**SHIPPED, **OF_ROWS, **ADAPTERS, "AgentEnv-v0": AGENT_ENV}.items():
        register_env(id, entry_point)
    for id, agent in AGENTS.items():
        register_env(id, AGENT_ENV, kwargs={"agent": agent})


def make_env(env_id: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make the environment with the id `env_id`.

    Raises ConfigError, with file, line and reason, for an unknown id, for a source that cannot be loaded, and for an
    environment with an attribute of an old name. Exceptions of the environment's constructor pass through.
    """
    env = _find_and_make(env_id, kwargs)
    _refuse_old_names(env_id, env.unwrapped)
    return env


def _refuse_old_names(env_id: str, env: object) -> None:
    defined = [vars(place) for place in (env, *type(env).__mro__)]  # not hasattr, which runs code of the user
    for old, new in RENAMED.items():
        if any(old in names for names in defined):
            raise ConfigError(f"{env_id}: {old!r} of {type(env).__name__} is now {new!r}; rename it there")


def _find_and_make(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    source, _, name = env_id.rpartition(":")
    if not source:
        if not _is_registered(name):
            load_plugins()
        if not _is_registered(name):
            raise ConfigError(f"{env_id!r} is not registered{_near(name)}; {_HOW_TO_NAME_ONE}")
        return _make(name, kwargs)
    module = load_module(source)
    if _is_registered(name):
        return _make(name, kwargs)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, gymnasium.Env):
        return found(**kwargs)
    if isinstance(found, type) and not MULTI_AGENT.isdisjoint(base.__name__ for base in found.__mro__):
        raise ConfigError(
            f"{source}: {name!r} is an environment of several agents; write a gymnasium.Env in which the model plays "
            "one of them, and code the others; or one in which it plays several `roles` (docs/self-play.md)"
        )
    raise ConfigError(f"{source} has no environment {name!r}; it has {_offered(module)}")


_HOW_TO_NAME_ONE = (
    "`roll-flash envs list` shows what is; an id may name where it comes from: my_package.my_module:MyEnv-v0 or "
    "path/to/file.py:MyEnv-v0"
)


def load_plugins() -> list[str]:
    """Load every entry point once and return one line for each that fails. A broken one does not affect the others."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        key = f"{point.name} = {point.value}"
        if key not in _plugins:
            _plugins[key] = _load_plugin(point)
    return [trouble for trouble in _plugins.values() if trouble]


_plugins: dict[str, str] = {}


def _load_plugin(point: Any) -> str:
    try:
        loaded = point.load()
        if callable(loaded):
            loaded()
    except Exception as error:  # third-party code may raise anything
        trouble = f"plug-in {point.name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        logger.warning(trouble)
        return trouble
    return ""


def _is_registered(name: str) -> bool:
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error:
        return False
    return True


def _make(name: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    env = gymnasium.make(name, disable_env_checker=True, **kwargs)
    while isinstance(env.unwrapped, Env) and isinstance(env, _SYNC_WRAPPERS):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            raise ConfigError(
                f"{name}: max_episode_steps cannot count the steps of an asynchronous environment; leave it out and "
                "give `max_turns` in the config, or end the episode in `step`"
            )
        env = env.env
    return env


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, gymnasium.registry, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _offered(module: ModuleType) -> str:
    ids = [
        id
        for id, spec in gymnasium.registry.items()
        if str(getattr(spec.entry_point, "__module__", str(spec.entry_point).partition(":")[0])) == module.__name__
    ]
    classes = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, gymnasium.Env) and value.__module__ == module.__name__
    ]
    return ", ".join([*ids, *classes]) or "none: define a class, and call roll_flash.register_env(ID, CLASS)"
