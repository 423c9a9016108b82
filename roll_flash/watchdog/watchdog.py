"""The watchdog of a run: says in one line which part stands still, writes the stacks, and ends what cannot end itself.

It repairs nothing itself: each part has an owner that does (workers: `rollout/fleet.py`, servers:
`inference/servers/engine.py`, steps: the deadlines in `trainer.py`), and the line says when that one acts. Only what
they cannot reach is ended here: a run whose event loop is held up, since all deadlines depend on it, and one that does
not close.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

from roll_flash.processes.background import background_task, call_in_thread
from roll_flash.watchdog.activity import Activities, Activity, Alarm, watched
from roll_flash.watchdog.loop_watch import LoopWatch
from roll_flash.watchdog.stacks import Process, processes_of, stacks_of

EVERY_S = 1.0
STATE_WITHIN_S = 5.0
"""Most seconds for the state of the run and the stacks of other nodes, each."""
CLOSES_WITHIN_S = 300.0
"""Seconds in which a run must close."""
KEPT_FILES = 20
FILES = "stalled-{}.txt"
CLOSING = "closing"
EVENT_LOOP = "the driver's event loop"

State = Callable[[], Awaitable[Mapping[str, Any]]]
Say = Callable[[str], None]


class Watchdog:
    """Watches what goes on in the event loop (`activities`), and from a thread the loop itself."""

    def __init__(self, run: str, logs: Path, say: Say, *, held_at_most_s: float, closes_within_s: float) -> None:
        """`run`: its name in `register_stacks`. The process ends if the event loop is held up for `held_at_most_s`, or
        if closing takes longer than `closes_within_s`; not in a notebook, whose loop has another thread."""
        self.activities = Activities()
        self.state: State | None = None
        """Returns what scheduler, stream and stages have, for the report."""
        self.elsewhere: Callable[[], Awaitable[str]] | None = None
        """Returns the stacks of processes on other nodes."""
        self._run = run
        self._logs = logs
        self._say = say
        self._held_at_most_s = held_at_most_s
        self._closes_within_s = closes_within_s
        self._closing: Activity | None = None
        self._loop = asyncio.get_running_loop()
        self._place = LoopWatch()
        self._is_over = threading.Event()

    def close_begins(self) -> None:
        """Call this when nothing is left to do but to close everything."""
        self.state = self.elsewhere = None
        if self._closing is None:
            self._closing = Activity(CLOSING, "servers, workers and Ray", self.activities, announced_s=40.0)
            self._closing.then = f"the process ends after {self._closes_within_s:g} s"
            self.activities.add(self._closing)

    async def run(self) -> None:
        """Look once a second, for ever."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            before, seconds = time.monotonic(), time.monotonic() - before
            await self._tell(self.activities.tick(seconds))
            if self._closing and self.activities.now_s - self._closing.since_s > self._closes_within_s:
                self._end_process(f"the run did not close within {self._closes_within_s:g} s")

    async def _tell(self, alarms: list[Alarm]) -> None:
        """Write the lines and, if something stands still, one file with the stacks."""
        for alarm in alarms:
            if not alarm.stands_still:
                self._say(f"watchdog: {alarm}")
        standing = [str(alarm) for alarm in alarms if alarm.stands_still]
        if not standing:
            return
        goes_on = self.activities.lines()
        processes, file = await call_in_thread(self._look)
        self._announce(standing, processes, file)
        stacks = await call_in_thread(lambda: stacks_of(processes))  # before what may last: they change
        state = await _within(self.state) if self.state is not None else {}
        elsewhere = await _within(self.elsewhere) if self.elsewhere is not None else ""
        await call_in_thread(lambda: self._write(file, [*standing, "", *goes_on], state, f"{stacks}\n\n{elsewhere}"))

    @contextmanager
    def watching_the_loop(self) -> Iterator[None]:
        threading.Thread(target=self._watch_loop, name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._is_over.set()

    def _watch_loop(self) -> None:
        """Watch the event loop, in a thread. It has an `Activities` of its own, since the other one lives in the
        loop."""
        own, before = Activities(), time.monotonic()
        loop = Activity(
            EVENT_LOOP, "it is held up", own, announced_s=EVERY_S, about=lambda: f"in {self._place.place()}"
        )
        loop.then = f"the process ends after {self._held_at_most_s:g} s"
        own.add(loop)
        while not self._is_over.wait(EVERY_S):
            before, seconds = time.monotonic(), time.monotonic() - before
            try:
                self._loop.call_soon_threadsafe(loop.begin)
            except RuntimeError:  # it is closed
                return
            for alarm in own.tick(seconds):
                self._tell_of_loop(alarm)
            if own.now_s - loop.since_s > self._held_at_most_s:
                self._end_process(f"{EVENT_LOOP} was held up for {self._held_at_most_s:g} s in {self._place.place()}")

    def _tell_of_loop(self, alarm: Alarm) -> None:
        if not alarm.stands_still:
            self._say(f"watchdog: {alarm}")
            return
        processes, file = self._look()
        self._announce([str(alarm)], processes, file)
        self._write(file, [str(alarm)], {}, stacks_of(processes))

    def _look(self) -> tuple[list[Process], Path | None]:
        """Return the processes of this node, and where to describe them; None if the folder is gone."""
        try:
            return processes_of(self._run), self._next_file()
        except OSError as error:
            self._say(f"watchdog: no stacks can be written: {error}")
            return [], None

    def _announce(self, lines: list[str], processes: list[Process], file: Path | None) -> None:
        """Write one line per part; the first names processes that are stopped, and the file."""
        stopped = [f"{each}: `kill -CONT {each.pid}` lets it go on" for each in processes if each.is_stopped]
        where = [] if file is None else [f"stacks: {file}"]
        self._say("; ".join([f"watchdog: {lines[0]}", *stopped[:3], *where]))
        for line in lines[1:]:
            self._say(f"watchdog: {line}")

    def _write(
        self,
        file: Path | None,
        lines: list[str],
        state: Mapping[str, Any] | str,
        stacks: str,
    ) -> None:
        if file is None:
            return
        about = [time.strftime("%F %T"), *lines, "", "== state of the run", json.dumps(state, indent=1, default=str)]
        try:
            with file.open("w") as opened:
                opened.write("\n".join([*about, "", f"== driver: process {os.getpid()}", ""]))
                opened.flush()
                faulthandler.dump_traceback(opened, all_threads=True)
                _write_tasks(self._loop, opened)
                opened.write(f"\n\n{stacks}\n")
        except OSError as error:  # a full disk must not end the run
            self._say(f"watchdog: {file}: not written: {error}")

    def _next_file(self) -> Path:
        """Return the next file; of the others the newest are kept."""
        pattern = re.compile(re.escape(FILES).replace(r"\{\}", r"(\d+)"))
        found = {int(match[1]): path for path in self._logs.iterdir() if (match := pattern.fullmatch(path.name))}
        for number in sorted(found)[: -KEPT_FILES + 1]:
            found[number].unlink(missing_ok=True)
        return self._logs / FILES.format(max(found, default=0) + 1)

    def _end_process(self, why: str) -> None:
        """End this process as a kill would: its children end with it, and `--resume` goes on from the journal."""
        if self._place.is_main_thread:
            self._say(f"watchdog: {why}: the process ends now; `--resume` goes on from the journal")
            os._exit(1)


def _write_tasks(loop: asyncio.AbstractEventLoop, file: IO[str]) -> None:
    """Write where each asyncio task waits, from its coroutine to the innermost one."""
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError as error:  # it changed meanwhile, seen from another thread
        file.write(f"\nasyncio tasks: {error}\n")
        return
    for task in sorted(tasks, key=lambda task: task.get_name()):
        places: list[str] = []
        waited: Any = task.get_coro()
        while (frame := getattr(waited, "cr_frame", None) or getattr(waited, "ag_frame", None)) is not None:
            places.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
            waited = getattr(waited, "cr_await", None) or getattr(waited, "ag_await", None)
        file.write(f"\nasyncio task {task.get_name()}: {' > '.join(places)}")


async def _within(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the answer; what a part that stands still cannot answer is said, and no reason to fail."""
    try:
        async with asyncio.timeout(STATE_WITHIN_S):
            return await call()
    except Exception as error:
        return f"not known: {type(error).__name__}: {error}"


@asynccontextmanager
async def open_watchdog(
    run: str, logs: Path, say: Say, *, held_at_most_s: float, closes_within_s: float
) -> AsyncIterator[Watchdog]:
    """Watch this event loop while the block runs."""
    watchdog = Watchdog(run, logs, say, held_at_most_s=held_at_most_s, closes_within_s=closes_within_s)
    with watched(watchdog.activities), watchdog.watching_the_loop():
        async with background_task(watchdog.run(), "the watchdog"):
            yield watchdog
