"""What environments read of the driver's disk: their modules, the functions that a config names, and named files.

Rows of a data set (`data`) are read by the driver and travel in the tasks; task sources and stages run in the driver.
"""

from __future__ import annotations

import importlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll_flash.config.tree import Config, EnvConfig

MODULE = re.compile(r"[A-Za-z]\w*(\.\w+)*")
OF_THE_MACHINE = tuple(map(Path, ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys")))
"""Folders with /usr that each machine has for itself: what arguments name there is not of the user."""


@dataclass(frozen=True, slots=True)
class EnvironmentFiles:
    needed: tuple[Path, ...]
    """Folders of modules, files that arguments name, and folders in the working directory."""
    perhaps: tuple[Path, ...]
    """Folders elsewhere that arguments name: it may be a sandbox that has such a path."""


def environment_files(config: Config) -> EnvironmentFiles:
    """Return what workers need of the driver's disk.

    What is in the working directory is wanted with all of it if a module is there; other modules with their folder.
    """
    here = Path.cwd().resolve()
    roots = {here if root.is_relative_to(here) else root for place in _places(config) if (root := code_root(place))}
    named = {path for env in config.envs for path in _named(*_arguments(env)) if not _is_of_the_machine(path, here)}
    alone = {path for path in named if not any(path.is_relative_to(root) for root in roots)}
    perhaps = {path for path in alone if path.is_dir() and not path.is_relative_to(here)}
    return EnvironmentFiles((*sorted(roots), *sorted(alone - perhaps)), tuple(sorted(perhaps)))


def environment_modules(config: Config) -> tuple[str, ...]:
    """Return the top-level modules that environments need, by their ids and by the functions that a config names."""
    return tuple(sorted({place.partition(".")[0] for place in _places(config) if not place.endswith(".py")}))


def missing_modules(modules: Sequence[str]) -> list[str]:
    """Return the modules that cannot be imported here."""
    importlib.invalidate_caches()
    return [module for module in modules if find_spec(module) is None]


def _arguments(env: EnvConfig) -> Iterator[Any]:
    """Yield what reaches an environment from the config: arguments of its own and of its rewards, and their names."""
    yield from (env.kwargs, *env.levels)
    for reward in env.reward:
        yield from (reward.function, reward.kwargs)


def _places(config: Config) -> set[str]:
    """Return the files and modules of environments, and of the objects that their arguments name."""
    of_ids = {place for env in config.envs if (place := env.id.rpartition(":")[0])}
    texts = (text for env in config.envs for text in _texts(*_arguments(env)))
    return of_ids | {place for text in texts if (place := _place_of(text))}


def _place_of(text: str) -> str:
    """Return the file or module of `file.py:NAME` or `module:NAME`; empty if a text names no object that is here."""
    place, _, name = text.rpartition(":")
    if not name.isidentifier():
        return ""
    if place.endswith(".py"):
        return place if Path(place).expanduser().is_file() else ""
    return place if MODULE.fullmatch(place) and find_spec(place.partition(".")[0]) is not None else ""


def code_root(place: str) -> Path | None:
    """Return the folder to import a module from; None if it is installed."""
    if place.endswith(".py"):
        return Path(place).expanduser().resolve().parent
    spec = find_spec(place.partition(".")[0])
    locations = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
    if not locations or not Path(locations[0]).exists() or place.partition(".")[0] == "roll_flash":
        return None
    root = Path(locations[0]).resolve().parent
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return None if any(root.is_relative_to(Path(folder).resolve()) for folder in installed) else root


def _named(*values: Any) -> Iterator[Path]:
    """Yield the existing paths among the texts in arguments."""
    for value in _texts(*values):
        path = os.path.expanduser(value)
        if 0 < len(value) < 1024 and "\0" not in value and os.path.exists(path):
            yield Path(path).resolve()


def _texts(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, Mapping):
            yield from _texts(*value.values())
        elif isinstance(value, list | tuple):
            yield from _texts(*value)
        elif isinstance(value, str):
            yield value


def _is_of_the_machine(path: Path, here: Path) -> bool:
    """True for what is no file of a user: folders of the system, and those in which all of a user's files are."""
    if path in (Path.home(), Path(tempfile.gettempdir()).resolve()) or path.is_relative_to("/usr"):
        return True
    return (here != path and here.is_relative_to(path)) or any(path.is_relative_to(each) for each in OF_THE_MACHINE)
