"""Where an event loop is stuck, asked from another thread: what it runs has not come back to it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

FRAMES_SHOWN = 3


class LoopWatch:
    """Made in the thread of the loop; `place` may be asked from any other."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def place(self) -> str:
        """The innermost frames of what that thread is running now, innermost first: `sleep (env.py:12) < ...`."""
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
