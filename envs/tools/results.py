"""Rendering of tool results as text for the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO, cast

import numpy as np
from pydantic_core import to_jsonable_python

from roll_flash.chat.model_text import cut_middle
from roll_flash.sandboxes.result import ExecResult
from roll_flash.terminal import printable


def render_result(value: Any, max_characters: int) -> str:
    """Return text unchanged, a command's result as its output, all else as JSON; cut to head and tail."""
    if value is None:
        return "(no output)"
    if isinstance(value, ExecResult):
        return cut_middle(_command_output(value, max_characters), max_characters)
    if isinstance(value, bytes):
        value = _decoded(value, max_characters)
    if not isinstance(value, str):
        value = _as_json(value)
    return cut_middle(value, max_characters) or "(no output)"


def _as_json(value: Any) -> str:
    """Models of pydantic, dataclasses and NumPy's values are written as what they hold, all that JSON does not know as
    its `str`."""
    with suppress(ValueError):  # bytes that are no text, or a value that contains itself, which `json` names better
        value = to_jsonable_python(value, fallback=_plain)
    return json.dumps(value, default=str, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.floating):
        return float(str(value))  # 0.3 of float32 is 0.3, not 0.30000001192092896
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


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


MAX_CHARACTERS = 1 << 16


@dataclass(slots=True)
class Allowance:
    """Number of characters that may still be printed, and number of characters dropped."""

    left: int = MAX_CHARACTERS
    left_out: int = 0

    def take(self, text: str) -> str:
        kept = text[: self.left]
        self.left -= len(kept)
        self.left_out += len(text) - len(kept)
        return printable(kept)


_allowance: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


class _LimitedStream:
    """A stream wrapper that limits writes to the allowance of the calling context; the rest goes to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        allowance = _allowance.get()
        self._stream.write(text if allowance is None else allowance.take(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def limit_prints() -> Iterator[Allowance]:
    """Cut prints inside the block at MAX_CHARACTERS, also in threads that inherit this context.

    The streams stay wrapped, so a thread that outlives its call is still cut. Subprocesses of a tool are not cut.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _LimitedStream):
            setattr(sys, name, cast(TextIO, _LimitedStream(stream)))
    allowance = Allowance()
    token = _allowance.set(allowance)
    try:
        yield allowance
    finally:
        _allowance.reset(token)
