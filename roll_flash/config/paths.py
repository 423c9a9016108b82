"""Relative paths in a config file: they are looked for beside the file first, then in the current folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILES: tuple[str, ...] = (
    "model.path",
    "envs.*.data",
    "envs.*.data.path",
    "envs.*.data.held_out",
    "envs.*.kwargs.folder",
    "envs.*.levels.*.folder",
    "stages.*.kwargs.path",
    "warm_start.demonstrations",
    "learner.kl.reference",
    "distill.teacher.model",
)
OBJECTS: tuple[str, ...] = (
    "envs.*.id",
    "envs.*.data",
    "envs.*.data.path",
    "envs.*.data.held_out",
    "envs.*.data.environments.*",
    "envs.*.kwargs.tools.*",
    "envs.*.levels.*.tools.*",
    "envs.*.reward",
    "envs.*.reward.*",
    "envs.*.reward.function",
    "envs.*.reward.*.function",
    "envs.*.task_source.entry_point",
    "stages.*.entry_point",
    "learner.advantage",
    "learner.loss.name",
)
"""Keys that may name an object in a file, `file.py:NAME`. In both, `*` is each entry of a list."""


def beside(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tree of a file in `folder`, with absolute paths for what is there."""
    if folder.resolve() == Path.cwd():
        return dict(tree)
    for key in FILES:
        tree = _changed(tree, key.split("."), lambda text: _file(text, folder))
    for key in OBJECTS:
        tree = _changed(tree, key.split("."), lambda text: _object(text, folder))
    return dict(tree)


def _changed(node: Any, path: list[str], change: Callable[[str], str]) -> Any:
    if not path:
        return change(node) if isinstance(node, str) else node
    first, *rest = path
    if first == "*":
        return [_changed(each, rest, change) for each in node] if isinstance(node, list) else node
    if isinstance(node, Mapping) and first in node:
        return {**node, first: _changed(node[first], rest, change)}
    return node


def _file(text: str, folder: Path) -> str:
    file = folder / text
    return str(file.absolute()) if text and not Path(text).is_absolute() and file.exists() else text


def _object(text: str, folder: Path) -> str:
    file, separator, name = text.rpartition(":")
    return f"{_file(file, folder)}{separator}{name}" if file.endswith(".py") else text
