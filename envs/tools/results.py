"""What tools return, as text that a model can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO, cast

from roll_flash.sandboxes.result import ExecResult
from roll_flash.terminal import printable


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


MOST_CHARACTERS = 1 << 16


@dataclass(slots=True)
class Allowance:
    """How much may still be printed, and how much more there was."""

    left: int = MOST_CHARACTERS
    left_out: int = 0

    def take(self, text: str) -> str:
        kept = text[: self.left]
        self.left -= len(kept)
        self.left_out += len(text) - len(kept)
        return printable(kept)


_allowance: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


class _Capped:
    """A stream that writes as much as the calling context may; all else is the stream's."""

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
def capped_prints() -> Iterator[Allowance]:
    """What is printed inside, also in threads that take over this context, is cut at MOST_CHARACTERS.

    The streams stay wrapped: a thread that outlives its call is still cut. Programs that a tool starts are not.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Capped):
            setattr(sys, name, cast(TextIO, _Capped(stream)))
    allowance = Allowance()
    token = _allowance.set(allowance)
    try:
        yield allowance
    finally:
        _allowance.reset(token)
