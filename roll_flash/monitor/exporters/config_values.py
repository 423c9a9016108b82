"""The config of a run as other systems get it: without secrets, and flat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SECRET_KEY = re.compile(r"(?i)(key|token|secret|passw(or)?d|passphrase|credentials?|authorization|cookie)$")
_SECRET_IN_URL = re.compile(r"(?i)(?<=://)[^/@\s]+(?=@)|(?<=key=)[^&\s]+|(?<=token=)[^&\s]+|(?<=sig=)[^&\s]+")


def without_secrets(tree: Any) -> Any:
    """Copy a tree of mappings, lists and plain values. Hidden are values of keys that end like `api_key`, `token` or
    `password` (not `api_key_env`, which names a variable), and users, passwords and keys in URLs."""
    if isinstance(tree, Mapping):
        hidden = {key for key, value in tree.items() if value is not None and _SECRET_KEY.search(str(key))}
        return {key: HIDDEN if key in hidden else without_secrets(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value) for value in tree]
    return _SECRET_IN_URL.sub(HIDDEN, tree) if isinstance(tree, str) else tree


def leaves(value: Any, key: str = "", separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys of a tree and their values; a list of plain values is one value."""
    prefix = f"{key}{separator}" if key else ""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from leaves(each, f"{prefix}{name}", separator)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from leaves(each, f"{prefix}{number}", separator)
    else:
        yield key, value
