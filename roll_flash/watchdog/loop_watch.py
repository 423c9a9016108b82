"""Finds the code that blocks an event loop, by reading the stack of its thread from another thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

FRAMES_SHOWN = 3


class LoopWatch:
    """Watches one event loop. Create it in the thread of that loop; call `place` from any other thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    @property
    def is_main_thread(self) -> bool:
        return self._thread == threading.main_thread().ident

    def place(self) -> str:
        """Return the current stack frames of the loop's thread, innermost first: `sleep (env.py:12) < ...`."""
        frame = sys._current_frames().get(self._thread)
        return " < ".join(_describe(shown) for shown in _innermost(frame)) or "nowhere: its thread has ended"


def _innermost(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None and len(frames) < FRAMES_SHOWN:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
