"""Asynchronous stages: reward models, judges, reference log-probabilities.

A stage takes rows of the stream as soon as they are there, also those of groups that are prefetched, and writes
columns. It runs beside everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from roll_flash.errors import RollFlashError, StreamError
from roll_flash.processes.background import cancel_and_wait, ends_this_task
from roll_flash.stream.stream import Consumer, Row, TrajectoryStream

Compute = Callable[[Sequence[Row]], Awaitable[Sequence[Mapping[str, Any]]]]
"""Returns the new columns of each row, in the order of the rows."""


@dataclass(eq=False, repr=False)
class Stage:
    """Runs `compute` on batches of a consumer of the stream, `concurrency` of them at a time.

    An attempt that raises, or takes longer than `timeout_s`, is repeated up to `retries` times; then the rows (with
    `whole_groups` their groups) are dropped as `stage_NAME_failed`. After `max_failures_in_a_row` such batches the
    stage raises StreamError: a run that drops everything does not train.
    """

    stream: TrajectoryStream
    consumer: Consumer
    compute: Compute
    _: KW_ONLY
    concurrency: int = 1
    timeout_s: float = 60.0
    retries: int = 1
    max_failures_in_a_row: int = 16
    on_error: Callable[[Sequence[Row], str], object] = lambda *_: None
    """Called after each failed attempt."""
    last_error: str = field(default="", init=False)
    """Message of the newest failed attempt."""
    _failures_in_a_row: int = field(default=0, init=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    _seconds: float = field(default=0.0, init=False)

    async def run(self) -> None:
        """Run until cancelled; unfinished rows are given back. An error of the stage fails the stream too."""
        workers = [asyncio.create_task(self._work()) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            await cancel_and_wait(workers)

    def metrics(self) -> dict[str, float]:
        """`rows`, `batches`, `retries`, `failed_rows`, and `seconds` spent in `compute`."""
        return {**{name: float(count) for name, count in self._counts.items()}, "seconds": self._seconds}

    async def _work(self) -> None:
        name = self.consumer.name
        while True:
            rows = await self.stream.next_batch(name)
            try:
                columns = await self._attempt(rows)
            except BaseException:
                self.stream.give_back(name, rows)
                raise
            self._end(rows, columns)

    async def _attempt(self, rows: Sequence[Row]) -> Sequence[Mapping[str, Any]] | None:
        for attempt in range(1 + self.retries):
            self._counts["retries"] += attempt > 0
            began, deadline = time.monotonic(), asyncio.timeout(self.timeout_s)
            try:
                async with deadline:
                    columns = await self.compute(rows)
                if len(columns) != len(rows):
                    raise StreamError(f"{len(columns)} results for {len(rows)} rows")
                return columns
            except BaseException as error:
                if ends_this_task(error):
                    raise
                own = str(error) if isinstance(error, RollFlashError) else f"{type(error).__name__}: {error}"
                self.last_error = f"took longer than {self.timeout_s:g} s" if deadline.expired() else own
            finally:
                self._seconds += time.monotonic() - began
            self.on_error(rows, self.last_error)
        return None

    def _end(self, rows: Sequence[Row], columns: Sequence[Mapping[str, Any]] | None) -> None:
        name = self.consumer.name
        if columns is not None:
            for row, values in zip(rows, columns, strict=True):
                self.stream.write(name, row, values)
            self._failures_in_a_row = 0
            self._counts["rows"] += len(rows)
            self._counts["batches"] += 1
            return
        self._failures_in_a_row += 1
        self._counts["failed_rows"] += len(rows)
        if self._failures_in_a_row >= self.max_failures_in_a_row:  # before the loader sees what is dropped
            times = f"{self._failures_in_a_row} times in a row"
            self.stream.fail(StreamError(f"stage {name!r} failed {times}; the newest: {self.last_error}"))
        self.stream.drop(rows, f"stage_{name}_failed", whole_groups=self.consumer.whole_groups)
        self.stream.raise_failure()
