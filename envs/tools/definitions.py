"""What the class of a `ToolEnv` defines: its tools and its rewards.

A definition that would silently be left out, or take the place of something else, raises ToolDefinitionError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

from roll_flash.envs.rewards.functions import Rubric, reward_methods
from roll_flash.envs.tools.calls import RESERVED_NAMES
from roll_flash.envs.tools.functions import Tool, ToolDefinitionError, make_tool, options_of

BASES = ("roll_flash.envs.base", "roll_flash.envs.tools.tool_env")
"""Modules of the classes that all environments with tools derive from."""


@functools.cache
def rubric_of(env_type: type[Any]) -> Rubric:
    """Return the decorated methods and the functions in `rewards`. Raises ToolDefinitionError."""
    _functions_in(env_type, "rewards")
    methods = reward_methods(env_type)
    _refuse_names_of_bases(env_type, "reward", methods)
    _refuse_undecorated(env_type, "reward", methods, reward_methods)
    return Rubric.of(env_type)


@functools.cache
def tools_of(env_type: type[Any]) -> Mapping[str, Tool]:
    """Return methods in source order, those of base classes first, then the functions in `tools`. Raises
    ToolDefinitionError."""
    methods = _tool_methods(env_type)
    _refuse_names_of_bases(env_type, "tool", methods)
    _refuse_undecorated(env_type, "tool", methods, _tool_methods)
    tools = [
        *(make_tool(getattr(env_type, name), takes_env=_takes_env(env_type, name)) for name in methods),
        *map(make_tool, _functions_in(env_type, "tools")),
    ]
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in (*found, *RESERVED_NAMES):
            raise ToolDefinitionError(f"{env_type.__name__}: the tool name {tool.name!r} is taken; give another name")
        found[tool.name] = tool
    return found


def refuse_functions_of_an_instance(env: Any) -> None:
    """Raises ToolDefinitionError for `tools` or `rewards` that a constructor has set: those of the class are read."""
    for name in ("tools", "rewards"):
        own = vars(env).get(name)
        if isinstance(own, tuple | list) and own and all(map(callable, own)):
            where = type(env).__name__
            raise ToolDefinitionError(f"{where}: self.{name} is not read; set {name} = (...) in the class {where}")


def _tool_methods(env_type: type[Any]) -> list[str]:
    names = dict.fromkeys(name for base in reversed(env_type.__mro__) for name in vars(base))
    return [name for name in names if options_of(getattr(env_type, name, None)) is not None]


def _takes_env(env_type: type[Any], name: str) -> bool:
    return not isinstance(inspect.getattr_static(env_type, name), staticmethod | classmethod)


def _functions_in(env_type: type[Any], name: str) -> Sequence[Callable[..., Any]]:
    """Return the functions in `tools` or `rewards`; one function without a comma is no tuple of them."""
    functions = getattr(env_type, name)
    if not isinstance(functions, tuple | list) or not all(map(callable, functions)):
        raise ToolDefinitionError(f"{env_type.__name__}: {name} is a tuple of functions; write {name} = (FUNCTION,)")
    return functions


def _refuse_names_of_bases(env_type: type[Any], kind: str, names: Iterable[str]) -> None:
    """Refuse a tool or reward in the place of a method of every environment, such as `step` or `answered`, which is
    called with other arguments."""
    bases = [base for base in env_type.__mro__ if base.__module__ in BASES]
    for name in names:
        if any(isinstance(vars(base).get(name), FunctionType | property) for base in bases):
            other = f", and write @tool(name={name!r})" if kind == "tool" else ""
            raise ToolDefinitionError(
                f"{env_type.__name__}: the {kind} {name!r} takes the place of what every environment has under this "
                f"name; rename the method{other}"
            )


def _refuse_undecorated(
    env_type: type[Any], kind: str, methods: Container[str], methods_of: Callable[[type[Any]], Iterable[str]]
) -> None:
    """Refuse a method without a decorator in the place of one that has it in a base class: the tool or reward would be
    gone."""
    for base in env_type.__mro__[1:]:
        for name in methods_of(base):
            if name not in methods and isinstance(getattr(env_type, name), FunctionType):
                raise ToolDefinitionError(
                    f"{env_type.__name__}: {name!r} takes the place of a {kind} of {base.__name__} and is none; write "
                    f"@{kind}() above it too, or set {name} = None"
                )
