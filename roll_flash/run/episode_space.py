"""Keeps `episodes/` and `journal/` small while training continues: compresses finished steps, removes the oldest beyond
a bound, with the part of the journal that tells only of removed episodes.

Nothing that `--resume` needs is removed: the episodes since the oldest checkpoint of `checkpoint.keep`, and those that
its unfinished groups may have, stay. The file of a finished step is looked at once: a run may have 100,000 of them.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from functools import partial

from roll_flash.config.tree import Config
from roll_flash.monitor.episode_files.steps import (
    compress_step,
    remove_steps,
    removed_before,
    removed_line,
    step_file,
    step_files,
    stored_bytes,
)
from roll_flash.processes.background import call_in_thread
from roll_flash.run.journal import compress_finished, journal_bytes, remove_before
from roll_flash.run.run_dir import RunDir, list_checkpoints

GIB = 1 << 30
CLOSE_TIMEOUT_S = 5.0
"""Maximum wait for the block that is being compressed when the run ends."""


class EpisodeSpace:
    """`written` waits until the disk has all episodes of earlier steps. `note` gets each line once."""

    def __init__(
        self, config: Config, run_dir: RunDir, written: Callable[[], Awaitable[None]], note: Callable[[str], None]
    ) -> None:
        self._config = config
        self._run_folder, self._folder, self._journal = run_dir.folder, run_dir.episodes, run_dir.journal
        self._written = written
        self._note = note
        self._said: set[str] = set()
        self._version = 0
        self._changed = asyncio.Event()
        self._closes = threading.Event()
        self._removed = self._finished = removed_before(self._folder)
        """The first steps whose episodes were not removed, and whose bytes are not counted yet."""
        self._finished_bytes = 0
        self._may_have_leftovers = self._removed > 0
        """Of a process that was killed while it removed files."""
        self._bytes = sum(map(stored_bytes, step_files(self._folder))) + journal_bytes(self._journal)

    def step_ended(self, version: int) -> None:
        """From now on episodes end at `version`, so the files of earlier steps are finished."""
        self._version = version
        self._changed.set()

    def metrics(self) -> dict[str, float]:
        return {
            "machine/episodes_gib": self._bytes / GIB,
            "machine/episodes_removed_steps": float(self._removed),
        }

    async def run(self) -> None:
        """Work after each step, until cancelled. A file that cannot be compressed or removed stays, with a line."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.tidy(self._version)

    async def tidy(self, version: int) -> None:
        """Work once, on the steps before `version`."""
        await self._written()
        working = asyncio.ensure_future(call_in_thread(partial(self._tidy, version)))
        try:
            await asyncio.shield(working)
        except OSError as error:
            self._say("os", f"{error.filename or self._folder}: {error.strerror}: the episodes there stay as they are")
        finally:
            if not working.done():
                self._closes.set()
                await asyncio.wait([working], timeout=CLOSE_TIMEOUT_S)
        if self._removed and "removed" not in self._said:
            self._say("removed", f"{removed_line(self._folder)}; from now on only the metrics say how many")

    def _say(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._note(line)

    def _tidy(self, version: int) -> None:
        monitor = self._config.monitor
        if self._may_have_leftovers:
            remove_steps(self._folder, self._removed)
            self._may_have_leftovers = False
        try:
            self._finish_steps(version)
        finally:  # removal also helps a disk that is too full to compress on
            if monitor.episodes_gib is not None:
                self._remove_oldest(monitor.episodes_gib * GIB - journal_bytes(self._journal))
                remove_before(self._journal, self._removed)
        self._bytes = self._finished_bytes + self._unfinished_bytes() + journal_bytes(self._journal)

    def _finish_steps(self, version: int) -> None:
        """Compress and count what no earlier call has."""
        compresses = self._config.monitor.compress_episodes
        if compresses:
            compress_finished(self._journal, self._may_go_on)
        while self._finished < version and self._may_go_on():
            path = step_file(self._folder, self._finished)
            if compresses and path.exists():
                compress_step(path, self._may_go_on)
            self._finished_bytes += stored_bytes(path)
            self._finished += 1

    def _remove_oldest(self, most_bytes: float) -> None:
        left, first = self._finished_bytes, self._removed
        most_bytes, needed = most_bytes - self._unfinished_bytes(), min(self._first_needed(), self._finished)
        while left > most_bytes and first < needed:
            left -= stored_bytes(step_file(self._folder, first))
            first += 1
        if first > self._removed:
            remove_steps(self._folder, first, since=self._removed)
            self._finished_bytes, self._removed = left, first

    def _unfinished_bytes(self) -> int:
        return sum(stored_bytes(step_file(self._folder, step)) for step in range(self._finished, self._version + 1))

    def _may_go_on(self) -> bool:
        return not self._closes.is_set()

    def _first_needed(self) -> int:
        """Return the first step of which a resume may need episodes."""
        kept = list_checkpoints(self._run_folder)[-self._config.checkpoint.keep :]
        return kept[0].step - math.floor(self._config.scheduler.highest_async_ratio) if kept else 0
