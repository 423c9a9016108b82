"""Writes ended episodes and the journal, in a thread: the driver's event loop neither reads nor encodes them.

What the journal says of an episode is written after the episode. Every GROUP_COMMIT_S both are on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from roll_flash.monitor.episodes import EpisodesWriter
from roll_flash.processes.background import call_in_thread, start_background
from roll_flash.rollout.turn_file import TurnFile
from roll_flash.run.journal import Event, Journal
from roll_flash.stream.blocks import fetch_lines
from roll_flash.types import EpisodeFailure, FinishedEpisode, StoredTrajectory

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
GROUP_COMMIT_S = 0.05
"""Minimum time between two waits for the disk, which take milliseconds each."""

Ended = tuple[int, FinishedEpisode | EpisodeFailure]
"""Learner version at the end of the episode, and its outcome."""


@dataclass(frozen=True, slots=True)
class NewFiles:
    """Journal and turns go on in new files, after the checkpoint of `step`; `turns`: those of running episodes."""

    step: int
    turns: list[bytes]


Entry = Ended | Event | bytes | NewFiles | asyncio.Future[None]
"""An episode, an event of the journal, a finished turn, the begin of new files, or a future that is set when all before
it is on the disk."""


class EpisodeLog:
    """Queue of ended episodes and events, and the task that writes them."""

    def __init__(self, files: EpisodesWriter, journal: Journal | None = None, turns: TurnFile | None = None) -> None:
        self._files = files
        self._journal = journal
        self._turns = turns
        self._waiting: list[Entry] = []
        self._unwritten = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start writing. The task fails with RunError if the disk is full, with StreamError if episodes are lost."""
        self._task = start_background(self._write_all(), "the episode log")
        return self._task

    def add(self, step: int, outcome: FinishedEpisode | EpisodeFailure) -> None:
        self._unwritten += 1
        self._append((step, outcome))

    def note(self, event: Event) -> None:
        """Write an event of the journal."""
        self._append(event)

    def note_turn(self, record: bytes) -> None:
        """Write a finished turn of a running episode."""
        if self._turns is not None:
            self._append(record)

    def begin_journal(self, step: int, turns: list[bytes]) -> None:
        """Write the events that follow as those after the checkpoint of `step`, and the turns after these."""
        if self._journal is not None:
            self._append(NewFiles(step, turns))

    def written(self) -> asyncio.Future[None]:
        """Return what is set when all that was added is on the disk, or could not be written, which ends the run."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            done.set_result(None)
        else:
            self._append(done)
        return done

    def _append(self, entry: Entry) -> None:
        if self._is_closed and self._task is not None and self._task.done():  # a step that the end has cut short
            self._write([entry])
            return
        self._waiting.append(entry)
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
            entries, self._waiting = self._waiting, []
            try:
                await call_in_thread(partial(self._write, entries))
            finally:
                for done in (entry for entry in entries if isinstance(entry, asyncio.Future) and not entry.done()):
                    done.set_result(None)
            self._unwritten -= sum(isinstance(entry, tuple) for entry in entries)
            if not self._is_closed:
                await asyncio.sleep(GROUP_COMMIT_S)

    def _write(self, entries: Sequence[Entry]) -> None:
        self._write_ended([entry for entry in entries if isinstance(entry, tuple)])
        self._files.sync()
        if self._journal is None:
            return
        for entry in entries:
            match entry:
                case NewFiles():
                    self._journal.begin(entry.step)
                    if self._turns is not None:
                        self._turns.begin(entry.turns)
                case dict():
                    self._journal.write(entry)
                case bytes() if self._turns is not None:
                    self._turns.write(entry)
        self._journal.sync()
        if self._turns is not None:
            self._turns.sync()

    def _write_ended(self, ended: Sequence[Ended]) -> None:
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
