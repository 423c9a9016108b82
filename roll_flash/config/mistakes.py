"""One useful line per mistake in a config: what is wrong, where, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from roll_flash.config.moved import LIST_OF_ENVIRONMENTS, MOVED, SYNONYMS, moved_text


def explain_all(errors: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> list[str]:
    """Return one line per error of pydantic. `root` is the model of the whole config."""
    lists_moved = any(MOVED.get(_dotted(item)) == LIST_OF_ENVIRONMENTS for item in errors)
    missing_list = ("missing", LIST_OF_ENVIRONMENTS)
    return [
        _explain(item, root) for item in errors if not (lists_moved and (item["type"], _dotted(item)) == missing_list)
    ]


def find_key(name: str, root: type[BaseModel]) -> str | None:
    """Return the key of the config that `name` means: a key, a moved one, a synonym or the unique end of a key."""
    keys = all_keys(root)
    if name in keys:
        return name
    if MOVED.get(name) == LIST_OF_ENVIRONMENTS:
        return f"{LIST_OF_ENVIRONMENTS}.0.id"
    if name in MOVED or name in SYNONYMS:
        return MOVED.get(name) or SYNONYMS[name]
    ends = [key for key in keys if key.endswith(f".{name}") and ".NAME." not in key]
    return ends[0] if len(ends) == 1 else None


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and of those in it. Of a list of sections it is entry 0, of sections by name
    the one named NAME."""
    keys = []
    for name in section.model_fields:
        child = _section_type(section, name)
        entry = "NAME." if _is_mapping(section, name) else "0." if child and _is_list(section, name) else ""
        keys.extend(all_keys(child, f"{prefix}{name}.{entry}") if child else [prefix + name])
    return keys


def _dotted(item: Mapping[str, Any]) -> str:
    return ".".join(str(part) for part in item["loc"])


def _explain(item: Mapping[str, Any], root: type[BaseModel]) -> str:
    where = _dotted(item)
    match item["type"]:
        case "extra_forbidden":
            return moved_text(where) or f"unknown key {where!r}{_suggest(where, root)}"
        case "missing":
            return f"{where!r} is required"
        case "string_pattern_mismatch" if item["loc"][-1] == "[key]" or item["loc"][0] == "stages":
            return f"{where.removesuffix('.[key]')}: a name has only a-z, 0-9 and _, and begins with a letter"
        case "string_pattern_mismatch" if where == "name":
            only = "a name has only letters, digits, '.', '_' and '-', and begins with a letter or a digit"
            return f"{where}: {only}, not {_shown(item['input'])}"
        case "string_type" if isinstance(item["input"], bool | int | float | date):
            return _no_text(where, item["input"])
        case "model_type":
            found = _section_of([str(part) for part in item["loc"]], root)
            names = f", such as {where}.{next(iter(found.model_fields))}" if found else ""
            return f"{where}: is a section; give keys of it{names}, not {_shown(item['input'])}"
        case "dict_type":
            return f"{where}: should be a mapping of keys to values, not {_shown(item['input'])}"
        case "value_error":
            reason = str(item["ctx"]["error"])
            return f"{where}: {reason}" if where else reason
        case "tuple_type":
            return f"{where}: should be a list, such as {where}=[...], not {_shown(item['input'])}"
    return f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}, not {_shown(item['input'])}"


def _no_text(where: str, value: bool | float | date) -> str:
    kind = "true or false" if isinstance(value, bool) else "a date" if isinstance(value, date) else "a number"
    example = "..." if isinstance(value, bool | float) else value  # of `on` and `1e9` it does not show what was written
    return (
        f"{where}: should be a text, and YAML reads this as {kind}; put it in quotes (in a shell: "
        f"{where}='\"{example}\"')"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suggest(where: str, root: type[BaseModel]) -> str:
    *parents, wrong = where.split(".")
    if (section := _section_of(parents, root)) is None:
        return ""
    if wrong in SYNONYMS:
        return f"; did you mean {SYNONYMS[wrong]!r}?"
    near = difflib.get_close_matches(wrong, list(section.model_fields), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*parents, near[0]])!r}?"
    elsewhere = [key for key in all_keys(root) if key.rsplit(".", 1)[-1] == wrong]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    return f"; known keys here: {', '.join(section.model_fields)}"


def _section_of(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section at the end of a path of keys, indices and names."""
    section, parts = root, iter(path)
    for part in parts:
        if part.isdigit():  # index in a list of sections
            continue
        child = _section_type(section, part)
        if child is None:
            return None
        if _is_mapping(section, part):
            next(parts, None)
        section = child
    return section


def _section_type(section: type[BaseModel], name: str) -> type[BaseModel] | None:
    info = section.model_fields.get(name)
    if info is None:
        return None
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _is_mapping(section: type[BaseModel], name: str) -> bool:
    return get_origin(section.model_fields[name].annotation) is dict


def _is_list(section: type[BaseModel], name: str) -> bool:
    return Ellipsis in get_args(section.model_fields[name].annotation)
