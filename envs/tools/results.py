"""What tools return, as text that a model can read."""

from __future__ import annotations

import json
from typing import Any

from roll_flash.sandboxes.result import ExecResult


def render_result(value: Any, max_characters: int) -> str:
    """Text as it is, a command's result as its output, everything else as JSON; cut to head and tail."""
    if value is None:
        return "(no output)"
    if isinstance(value, ExecResult):
        return shortened(_command_output(value, max_characters), max_characters)
    if isinstance(value, bytes):
        value = _decoded(value, max_characters)
    if not isinstance(value, str):
        value = json.dumps(value, default=str, ensure_ascii=False)
    return shortened(value, max_characters) or "(no output)"


def shortened(text: str, max_characters: int) -> str:
    """At most about `max_characters`: head, tail, and how much was left out between them."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} of {len(text)} characters left out ...]\n{text[-half:]}"


def _command_output(result: ExecResult, max_characters: int) -> str:
    parts = [_decoded(result.stdout, max_characters), _decoded(result.stderr, max_characters)]
    if result.timed_out:
        parts.append("(timed out)")
    elif result.exit_code != 0:
        parts.append(f"(exit code {result.exit_code})")
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or "(no output)"


def _decoded(data: bytes, max_characters: int) -> str:
    limit = 4 * max_characters + 8
    if len(data) <= 2 * limit:
        return data.decode(errors="replace")
    head, tail = (part.decode(errors="replace") for part in (data[:limit], data[-limit:]))
    return f"{head}\n[... {len(data) - 2 * limit} bytes left out ...]\n{tail}"
