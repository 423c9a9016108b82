"""Every key of the config as a Markdown page, made from the models: `python -m roll_flash.config.reference`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from roll_flash.config.tree import Config

_INTRODUCTION = """\
# Every key of a config

A config is a YAML file; `roll-flash train CONFIG a.b=c` sets single keys on top of it. An entry of a list is named by
its index: `envs.0.max_turns=3` sets a key of the first environment. `base: other.yaml` in a file builds on another
file: mappings are merged, lists are replaced. Only `model.path` and one environment are required. An unknown key, a
wrong value, or settings that cannot go together are an error with one line each.

`python -m roll_flash.config.reference > docs/config.md` makes this page from the models in `roll_flash/config/`.
"""
_WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "mapping"}
_FORMS = {"array": (" (a list)", "N."), "object": (" (by name)", "NAME.")}
"""What a key is that holds several sections, and how one of them is named."""
WIDTH = 120
Schema = Mapping[str, Any]


def reference() -> str:
    """Return the page. Its keys are in the order of the models."""
    schema = Config.model_json_schema()
    return "\n".join([_INTRODUCTION, *_section(schema, "", schema["$defs"])])


def _section(section: Schema, prefix: str, definitions: Schema) -> Iterator[str]:
    """Yield the keys of a section, one entry each, then the sections in it, each with a heading."""
    inner: list[tuple[str, str, Schema]] = []
    if not prefix:
        yield "## Top level\n"
    for name, described in section["properties"].items():
        if (found := _section_of(described)) is None:
            yield _entry(f"{prefix}{name}", described, name in section.get("required", ()))
        else:
            inner.append((f"{prefix}{name}", found, described))
    yield ""
    for name, found, described in inner:
        form, part = _FORMS.get(described.get("type", ""), ("", ""))
        yield f"## `{name}`{form}\n\n{_wrapped(described['description'])}\n"
        yield from _section(definitions[found], f"{name}.{part}", definitions)


def _section_of(described: Schema) -> str | None:
    """Return the name of the section that a key holds: one, a list of them, some by name, or one or null."""
    named = described.get("patternProperties", {}).values()
    for form in (described, described.get("items", {}), *named, *described.get("anyOf", ())):
        if "$ref" in form:
            return str(form["$ref"].rsplit("/", 1)[-1])
    return None


def _entry(key: str, described: Schema, is_required: bool) -> str:
    default = "required" if is_required else f"default `{json.dumps(described.get('default', {}))}`"
    return _wrapped(f"- **`{key}`** ({_type(described)}; {default}): {described['description']}", indent="  ")


def _wrapped(text: str, *, indent: str = "") -> str:
    text = re.sub(r"\bNone\b", "`null`", text)
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _type(form: Schema) -> str:
    """Describe the values of a key in a few words."""
    if choices := form.get("anyOf") or form.get("oneOf"):
        return " or ".join(_type(choice) for choice in choices)
    if "enum" in form:
        values = [f"`{value}`" for value in form["enum"]]
        return " or ".join(values) if len(values) == 2 else f"one of {', '.join(values)}"
    if "const" in form:
        return f"`{form['const']}`"
    match form["type"]:
        case "null":
            return "`null`"
        case "array" if "prefixItems" in form:
            return f"list of {len(form['prefixItems'])}: {_type(form['prefixItems'][0])}"
        case "array":
            return f"list of {_type(form['items'])}"
    return _WORDS[form["type"]] + _bounds(form)


def _bounds(form: Schema) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    found = [f"{word} {form[name]:g}" for name, word in words.items() if name in form]
    return f" {', '.join(found)}" if found else ""


if __name__ == "__main__":
    print(reference(), end="")
