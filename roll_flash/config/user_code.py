"""Loading of users' modules, files and objects, with errors that give file, line and reason in one line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from types import CodeType, ModuleType
from typing import Any

from roll_flash.errors import ConfigError, type_and_text

_loading = threading.RLock()
"""Many threads make environments, and a module is in `sys.modules` before it is complete."""
_stamps: dict[str, tuple[Path, object]] = {}
"""File of each module that `load_file` has run, and its stamp then."""


def load_object(reference: str) -> Any:
    """Return what `package.module:NAME` or `path/to/file.py:NAME` names. Raises ConfigError as `load_module` does."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{reference!r} must be module:NAME or path/to/file.py:NAME")
    module = load_module(place)
    if not hasattr(module, name):
        raise ConfigError(f"{place} has no {name!r}")
    return getattr(module, name)


def load_function(reference: str, argument: str) -> Callable[..., Any]:
    """Return the function that a reference names. Raises ConfigError that also names `argument`, which gave it."""
    try:
        found = load_object(reference)
    except ConfigError as error:
        raise ConfigError(f"{argument} {reference!r}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{argument} {reference!r} is no function")
    function: Callable[..., Any] = found
    return function


def absolute(reference: str) -> str:
    """Return a reference that other processes find too: the file of `path/to/file.py:NAME` with its whole path."""
    place, separator, name = reference.rpartition(":")
    return f"{Path(place).expanduser().resolve()}{separator}{name}" if place.endswith(".py") else reference


def load_module(place: str) -> ModuleType:
    """Return the module `package.module`, or that of the file `path/to/file.py`.

    Raises ConfigError if it is missing, has a syntax error, or its code raises.
    """
    return load_file(place) if place.endswith(".py") else import_module(place)


def load_file(path: str) -> ModuleType:
    """Run a Python file as a module, once per process, or again after `forget_changed_files`; its folder is importable
    from then on, as for a script."""
    file = Path(path).expanduser().resolve()
    name = f"roll_flash_env_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}_{file.stem}"
    with _loading:
        return sys.modules[name] if name in sys.modules else _run(file, name, path)


def forget_changed_files() -> None:
    """Let files that have changed since they were loaded be run again at their next use. Called where a run starts:
    its workers, which are new processes, have what is in them now, and this one may be the kernel of a notebook."""
    with _loading:
        for name, (file, stamp) in list(_stamps.items()):
            if _stamp_of(file) != stamp:
                del _stamps[name]
                sys.modules.pop(name, None)


def _stamp_of(file: Path) -> object:
    """Return what changes with a file's content; None if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _run(file: Path, name: str, path: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{path}: no such file (looked in {Path.cwd()})")
    _stamps[name] = file, _stamp_of(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(_reason(error, path, str(file))) from error
    return module


def find_modules_here() -> None:
    """Let `my_envs:Maze-v0` as an id find my_envs.py in the current folder, first of all. Only for what runs code of
    the user's: the folder may be a run from elsewhere."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)


def search_path() -> tuple[str, ...]:
    """Return the folders in which this process looks for modules: a script or notebook may have added some."""
    return tuple(os.path.abspath(folder) for folder in sys.path if os.path.isdir(folder))


def follow_search_path(folders: Sequence[str]) -> None:
    """Look for modules in the folders of another process too: before those of Python where they are there, or after."""
    stdlib = sysconfig.get_path("stdlib")
    first = folders.index(stdlib) if stdlib in folders else 0
    sys.path[:0] = [folder for folder in folders[:first] if folder not in sys.path]
    sys.path += [folder for folder in folders[first:] if folder not in sys.path]


def import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; install the module or put it on PYTHONPATH") from None
    except (Exception, SystemExit) as error:  # user code may raise anything
        spec = importlib.util.find_spec(name.partition(".")[0])
        raise ConfigError(_reason(error, name, spec.origin or "" if spec else "")) from error


def described(error: BaseException) -> str:
    """Return type and text of an error that code of a user raised, and the line there: `KeyError: 'x' (shop.py:12)`."""
    lines = [frame for frame in walk_tb(error.__traceback__) if _is_users(frame[0].f_globals, frame[0].f_code)]
    place = f" ({Path(lines[-1][0].f_code.co_filename).name}:{lines[-1][1]})" if lines else ""
    return f"{type_and_text(error)}{place}"


def _is_users(names: Mapping[str, Any], code: CodeType) -> bool:
    is_ours = str(names.get("__name__")).partition(".")[0] == "roll_flash"
    return not is_ours and not code.co_filename.startswith(("<", *map(sysconfig.get_path, ("stdlib", "purelib"))))


def _reason(error: BaseException, shown: str, file: str) -> str:
    if isinstance(error, SyntaxError):
        where = shown if error.filename in (file, None) else error.filename
        line = (error.text or "").strip()
        return f"{where}:{error.lineno}: {type(error).__name__}: {error.msg}" + (f" in {line!r}" if line else "")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{shown}:{lines[-1]}" if lines else shown
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
