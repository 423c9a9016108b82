"""Checks of the arguments of `AgentEnv` that Python takes in another way than they were meant. Raise ConfigError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_flash.errors import ConfigError

OF_THE_GATEWAY = frozenset(
    f"{vendor}_{name}" for vendor in ("OPENAI", "ANTHROPIC") for name in ("API_KEY", "BASE_URL", "MODEL")
) | {"OPENAI_API_BASE"}
"""Variables that lead a program to the model of the run."""


def require_variables(env: Mapping[str, Any] | None) -> None:
    for name in env or {}:
        if name in OF_THE_GATEWAY:
            raise ConfigError(f"AgentEnv: env: {name} is set in each episode, for the model of the run; remove it")


def require_texts(**texts: Any) -> None:
    for name, given in texts.items():
        if given is not None and not isinstance(given, str):
            what = "a text" if name == "instruction" else "a line for the shell"
            raise ConfigError(f"AgentEnv: {name} is {what}, not {given!r:.60}")


def require_contents(**mappings: Mapping[Any, Any] | None) -> None:
    for name, files in mappings.items():
        for path, content in (files or {}).items():
            if not isinstance(path, str) or not isinstance(content, str | bytes):
                raise ConfigError(f"AgentEnv: {name}: {path!r}: path and content are texts; put both in quotes")


def by_name(program_files: Sequence[str]) -> dict[str, Path]:
    """Return the files by their names in the sandbox."""
    found: dict[str, Path] = {}
    for path in (Path(name).expanduser() for name in program_files):
        if path.name in found:
            raise ConfigError(f"AgentEnv: program_files: two are named {path.name}, and {{folder}} has room for one")
        found[path.name] = path
    return found
