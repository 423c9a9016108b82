"""Read config trees from files (composed by `base`), and apply dotted `key=value` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roll_flash.errors import ConfigError


def read_yaml(path: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Tree of a file, merged over the tree of its `base`. Raises ConfigError."""
    if path.resolve() in parents:
        raise ConfigError(f"{path}: `base` leads back to the file itself; remove one of the `base` lines")
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_near_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).replace(chr(10), ' ')}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, not a {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    return _merge(read_yaml(path.parent / str(base), (*parents, path.resolve())), tree)


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Apply the override `a.b=value` to `tree`. Raises ConfigError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r}: an override is written key=value, for example rollout.group_size=4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: the value is not valid YAML; quote it") from None
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{override!r}: {section} is a value, not a section")
        node[section] = child = dict(child)
        node = child
    node[last] = _scientific(value) if value == text.strip() else value


def _scientific(value: Any) -> Any:
    """Convert strings such as `1e-5`, which YAML 1.1 does not read as numbers."""
    if isinstance(value, str) and value[:1].isdigit() and "e" in value:
        try:
            return float(value)
        except ValueError:
            return value
    return value
