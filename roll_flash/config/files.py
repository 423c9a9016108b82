"""Read config trees from files (composed by `base`), and apply dotted `key=value` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll_flash.checked_files import load_yaml, read_checked
from roll_flash.config.paths import beside
from roll_flash.errors import ConfigError

_DATA = "data; a config names it, with what an answer earns: envs.0.data={} (docs/data.md)"
_NO_CONFIG = {
    **dict.fromkeys((".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"), _DATA),
    ".py": "Python; a config names an environment in it: envs.0.id={}:NAME (docs/environments.md)",
}
"""What files with these ends of their names are, with a place for their path."""


class _DuplicateKeyError(yaml.YAMLError):
    """A mapping has the same key twice; PyYAML alone would silently take the last one."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicate keys.

    They are looked for before merge keys (`<<`) are resolved: a mapping may override a key that it merges.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise _DuplicateKeyError(f"{key.value!r} is written twice, in {_two(lines[key.tag, key.value], line)}")
            lines[key.tag, key.value] = line
        return mapping


def _two(first: int, second: int) -> str:
    return f"line {first}" if first == second else f"lines {first} and {second}"


def read_yaml(path: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Tree of a file, merged over the tree of its `base`; paths in a file are relative to it. Raises ConfigError."""
    if path.resolve() in parents:
        raise ConfigError(f"{path}: `base` leads back to the file itself; remove one of the `base` lines")
    if path.is_file() and (kind := _NO_CONFIG.get(path.suffix.lower())):
        raise ConfigError(f"{path}: is no config but {kind.format(path)}")
    try:
        tree = load_yaml(read_checked(path), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_near_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}{_near_file(path)}") from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{path}: the key {error}; remove one of them") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist, nesting without end
        raise ConfigError(f"{path}: not valid YAML: {str(error).replace(chr(10), ' ')}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values, not a {type(tree).__name__}")
    return composed(tree, path.parent, (*parents, path.resolve()))


def composed(tree: Mapping[str, Any], folder: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a tree of a file in `folder`, merged over that of its `base`. Raises ConfigError."""
    own = beside({key: value for key, value in tree.items() if key != "base"}, folder)
    if (base := tree.get("base")) is None:
        return own
    if not isinstance(base, str | Path):
        where = f"{parents[-1]}: " if parents else ""
        raise ConfigError(f"{where}base is one file, not {base!r:.80}; for more, let that file have a base of its own")
    return _merge(read_yaml(folder / Path(base).expanduser(), parents), own)


def _near_file(path: Path) -> str:
    """Ask for the file that was meant: the config of a run that was named, or a file with a similar name."""
    of_runs = (place / "config.yaml" for place in (path, Path("runs") / path))
    if (meant := next((file for file in of_runs if file.is_file()), None)) is not None:
        return f"; did you mean {meant}?"
    if path.exists() or not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def apply_override(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return a copy of `tree` with the override `a.b=value`; `a.0.b=value` sets a key of the first entry of a list.

    Raises ConfigError.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r}: an override is written key=value, for example scheduler.group_size=4")
    try:
        value = yaml.load(text, Loader=_Loader)
    except _DuplicateKeyError as error:
        raise ConfigError(f"{override!r}: the key {error}; remove one of them") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{override!r:.200}: the value is not valid YAML; quote it") from None
    value = _scientific(value) if value == text.strip() else value
    try:
        changed: dict[str, Any] = _with_value(tree, key.split("."), value)
    except _NoSuchPlaceError as error:
        raise ConfigError(f"{override!r}: {error}") from None
    return changed


class _NoSuchPlaceError(ValueError):
    """An override leads to a place that the tree does not have."""


def _with_value(node: Any, path: Sequence[str], value: Any, walked: tuple[str, ...] = ()) -> Any:
    """Return a copy of `node` with `value` at `path`; `walked` are the keys that lead to `node`."""
    if not path:
        return value
    part, rest, walked_on = path[0], path[1:], (*walked, path[0])
    if isinstance(node, (list, tuple)) or (node is None and part.isdecimal()):
        entries = [*(node or ())]
        index = _index(entries, part, ".".join(walked))
        entries[index] = _with_value(entries[index], rest, value, walked_on)
        return entries
    if node is not None and not isinstance(node, Mapping):
        raise _NoSuchPlaceError(f"{'.'.join(walked)} is a value, not a section")
    node = node or {}
    return {**node, part: _with_value(node.get(part), rest, value, walked_on)}


def _index(entries: Sequence[Any], part: str, name: str) -> int:
    if part.isdecimal() and int(part) < len(entries):
        return int(part)
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    raise _NoSuchPlaceError(f"{name} is a list and has {count}, counted from 0; {part!r} is none of them")


def _scientific(value: Any) -> Any:
    """Convert strings such as `1e-5`, which YAML 1.1 does not read as numbers."""
    if isinstance(value, str) and value[:1].isdigit() and "e" in value:
        try:
            return float(value)
        except ValueError:
            return value
    return value
