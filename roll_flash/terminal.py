"""What is printed for people. Text that a model, an endpoint or an environment said may reach a terminal only as text.

Control characters move the cursor, clear the screen, set titles and clipboards, or turn the order of letters around;
they are shown as escapes. Every line that the command line prints goes through `say`.
"""

from __future__ import annotations

import os
import sys

_CONTROLS = (
    *(code for code in range(0x20) if chr(code) not in "\t\n"),
    *range(0x7F, 0xA0),  # DEL and C1
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),  # writing direction, separators of lines
    *range(0xD800, 0xE000),  # halves of characters, which cannot be encoded
)
_ESCAPES = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS}


def printable(text: str) -> str:
    """The text with control characters as escapes, such as `\\x1b`; tabs and newlines stay."""
    return text.translate(_ESCAPES)


def one_line(text: str) -> str:
    """The same without newlines, and with one blank where there were several."""
    return printable(" ".join(text.split()))


def say(text: str = "", *, error: bool = False, end: str = "\n") -> None:
    """Print for a person, on standard output or standard error."""
    print(printable(text), file=sys.stderr if error else sys.stdout, end=end, flush=True)


def progress_bars_on_terminals_only() -> None:
    """Must be called before anything imports tqdm, which reads its settings then."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
