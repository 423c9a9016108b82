"""What tools print goes to the worker's own output; a flood of it must not fill the disk with logs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO, cast

from roll_flash.terminal import printable

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
