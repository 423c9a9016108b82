"""Writes ended episodes into the run's log, in a thread: the driver's event loop neither reads nor encodes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from roll_flash.processes.background import call_in_thread, start_background
from roll_flash.rollout.worker import Outcome
from roll_flash.stream.blocks import fetch_lines
from roll_flash.types import EpisodeFailure, FinishedEpisode, StoredTrajectory

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class EpisodeFiles(Protocol):
    """Files with every outcome and every dropped group."""

    def write(self, step: int, outcome: Outcome) -> None: ...

    def write_line(self, step: int, line: bytes) -> None:
        """Write an episode that a worker has encoded."""
        ...

    def write_dropped(self, step: int, group: Mapping[str, Any]) -> None: ...


Ended = tuple[int, FinishedEpisode | EpisodeFailure]
"""Learner version at the end of the episode, and its outcome."""


class EpisodeLog:
    """Queue of ended episodes and the task that writes them."""

    def __init__(self, files: EpisodeFiles) -> None:
        self._files = files
        self._waiting: list[Ended] = []
        self._unwritten = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start writing. The task fails with RunError if the disk is full, with StreamError if episodes are lost."""
        self._task = start_background(self._write_all(), "the episode log")
        return self._task

    def add(self, step: int, outcome: FinishedEpisode | EpisodeFailure) -> None:
        self._waiting.append((step, outcome))
        self._unwritten += 1
        self._changed.set()

    async def close(self) -> None:
        """Write what is left, unless writing has failed. After CLOSE_TIMEOUT_S, as when Ray has died, say how many
        episodes are not in the log."""
        self._is_closed = True
        self._changed.set()
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._unwritten:
            logger.warning("%d ended episodes are not in the episode log", self._unwritten)

    async def _write_all(self) -> None:
        while self._waiting or not self._is_closed:
            await self._changed.wait()
            self._changed.clear()
            ended, self._waiting = self._waiting, []
            await call_in_thread(partial(self._write, ended))
            self._unwritten -= len(ended)

    def _write(self, ended: Sequence[Ended]) -> None:
        data = [outcome.data for _, outcome in ended if isinstance(outcome, FinishedEpisode)]
        stored = [each for each in data if isinstance(each, StoredTrajectory)]
        lines = iter(fetch_lines(stored))
        for each in stored:
            each.lines = None
        for step, outcome in ended:
            if isinstance(outcome, EpisodeFailure):
                self._files.write(step, outcome)
            elif isinstance(outcome.data, StoredTrajectory):
                self._files.write_line(step, next(lines))
            elif outcome.data is not None:
                self._files.write(step, outcome.data)
