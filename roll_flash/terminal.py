"""Safe printing: text of a model, an endpoint or an environment must not control the terminal.

Control characters can move the cursor, clear the screen, set titles and clipboards, or reverse the text direction, and
others hide text; they are shown as escapes (but for joiners, which scripts and emoji need). Every line that the command
line prints goes through `say`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
_CONTROLS = (
    *(code for code in range(0x20) if chr(code) not in "\t\n"),
    *range(0x7F, 0xA0),  # DEL and C1
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),  # text direction, line separators
    *(0x180E, 0x200B, *range(0x2060, 0x2066), *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC)),  # without width
    *range(0xE0000, 0xE0080),  # tags: a whole text that is not seen
    *range(0xD800, 0xE000),  # surrogates, which cannot be encoded
)
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS}


def printable(text: str) -> str:
    """Replace control characters by escapes, such as `\\x1b`; tabs and newlines stay."""
    return text.translate(_ESCAPES)


def one_line(text: str) -> str:
    """Like `printable`, but without newlines and with single blanks."""
    return printable(" ".join(text.split()))


def say(text: str = "", *, error: bool = False, end: str = "\n") -> None:
    """Print for the user, on standard output or standard error."""
    print(printable(text), file=sys.stderr if error else sys.stdout, end=end, flush=True)


class _OutlivingReader:
    """A text stream whose output is lost, instead of an error: for ever once nobody reads it, else as long as its disk
    or terminal takes none."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                self._lead_nowhere()
            return otherwise

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def forget(self) -> None:
        """Drop what could not be written: it would be an error at the exit of the program."""
        try:
            self._stream.flush()
        except OSError:
            kept = os.dup(self._stream.fileno())
            self._lead_nowhere()
            self._stream.flush()
            os.dup2(kept, self._stream.fileno())
            os.close(kept)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Go on when the reader of our output ends (`| tee`), its disk is full or its terminal is gone: a run of hours is
    worth more than its lines, which `roll-flash status` and the files of the run have too."""
    out, error = _OutlivingReader(sys.stdout), _OutlivingReader(sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(error):
            yield
    finally:
        out.forget()
        error.forget()


def escape_what_cannot_be_encoded() -> None:
    """Print characters that the terminal's encoding does not have as escapes, such as `\\u2016`, and fail for none."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def progress_bars_on_terminals_only() -> None:
    """Call it before anything imports tqdm, which reads its settings on import."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
