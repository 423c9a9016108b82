"""Import of packages that only an adapter needs."""

from __future__ import annotations

import importlib
from typing import Any

from roll_flash.errors import ConfigError


def import_optional(module: str, *, package: str, needed_by: str, pip_options: str = "") -> Any:
    """Import the module. Raises ConfigError with the command to install it, or the error of the installed one."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module
        reason = "is not installed" if missing else f"cannot be imported: {error}"
        quoted = f'"{package}"' if "[" in package else package  # zsh takes brackets for a pattern of file names
        raise ConfigError(f"{needed_by}: the package {package} {reason}; pip install {pip_options}{quoted}") from None
