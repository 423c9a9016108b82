"""Placeholders in a line for the shell: variables take their place, so that no text of a task becomes shell code."""

from __future__ import annotations

import re
from collections.abc import Mapping


def filled_line(line: str, variables: Mapping[str, str]) -> str:
    """Return `line` with a variable of the environment for each placeholder, quoted in the way that its place needs:
    each stays one word, or a part of one. In `"{instruction}"` further quotes would end those of the line, and a text
    of several words would become several arguments; in `'{instruction}'` the variable's name would stay.

    `variables`: name of the variable by placeholder.
    """
    inside = [""]  # the innermost is last: a quote, or `(` of a command in brackets

    def replaced(match: re.Match[str]) -> str:
        found, within = match[0], inside[-1]
        if found in variables:
            name = variables[found]
            return {'"': f"${{{name}}}", "'": f"'\"${name}\"'"}.get(within, f'"${name}"')
        if found == within or (within == "(" and found == ")") or (within == "'" and found == "\\'"):
            inside.pop()
        elif within != "'" and found == "$(":
            inside.append("(")
        elif within in ("", "(") and found in ("(", "'", '"'):
            inside.append(found)
        return found

    placeholders = "|".join(map(re.escape, variables))
    return re.sub(rf"\\.|{placeholders}|\$\(|['\"()]", replaced, line, flags=re.DOTALL)
