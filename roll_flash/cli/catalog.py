"""List the available environments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """A registered environment, with the first line of its documentation."""

    id: str
    entry_point: str
    about: str


def list_environments(*, everything: bool) -> list[EnvironmentEntry]:
    """Environments of this package and of plug-ins, by id; with `everything` also those of gymnasium."""
    from roll_flash.envs.registration import load_plugins

    load_plugins()  # plug-ins that fail to load are logged as warnings
    specs = [spec for spec in gymnasium.registry.values() if everything or not _is_gymnasiums_own(spec)]
    return [
        EnvironmentEntry(spec.id, _entry_point(spec), "" if _is_gymnasiums_own(spec) else _about(spec))
        for spec in sorted(specs, key=lambda spec: spec.id)
    ]


def _entry_point(spec: EnvSpec) -> str:
    target: Any = spec.entry_point if spec.entry_point is not None else spec.vector_entry_point
    if callable(target):
        return f"{target.__module__}:{getattr(target, '__qualname__', type(target).__name__)}"
    return str(target)


def _is_gymnasiums_own(spec: EnvSpec) -> bool:
    """True for environments registered by `import gymnasium`; some of them need packages that the user must install."""
    return _entry_point(spec).partition(".")[0] in ("gymnasium", "shimmy") or spec.namespace in ("phys2d", "tabular")


def _about(spec: EnvSpec) -> str:
    if spec.entry_point is None:
        return ""
    try:
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    except (ImportError, AttributeError) as error:
        return f"(cannot be imported: {error})"
    return _first_line(creator, spec.id)


def _first_line(creator: Any, env_id: str) -> str:
    """First line of the module's docstring if that introduces the environment (`Maze-v0: ...`), else of the class's."""
    module = inspect.getdoc(inspect.getmodule(creator)) or ""
    text = module.removeprefix(f"{env_id}:") if module.startswith(f"{env_id}:") else inspect.getdoc(creator) or ""
    return text.strip().partition("\n")[0]
