"""Asynchronous stages: reward models, judges, reference log-probabilities.

A stage takes rows of the stream as soon as they are there, also those of groups that are prefetched, and writes
columns. It runs beside everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from roll_flash.errors import StreamError
from roll_flash.processes.background import cancel_and_wait, ends_this_task
from roll_flash.stream.stream import Consumer, Row, TrajectoryStream

Compute = Callable[[Sequence[Row]], Awaitable[Sequence[Mapping[str, Any]]]]
"""Returns the new columns of each row, in the order of the rows."""


class Stage:
    """Runs `compute` on batches of a consumer of the stream, `concurrency` of them at a time.

    An attempt that raises, or takes longer than `timeout_s`, is repeated up to `retries` times; then the rows (with
    `whole_groups` their groups) are dropped as `stage_NAME_failed`. After `max_failures_in_a_row` such batches the
    stage raises StreamError: a run that drops everything does not train.
    """

    def __init__(
        self,
        stream: TrajectoryStream,
        consumer: Consumer,
        compute: Compute,
        *,
        concurrency: int = 1,
        timeout_s: float = 60.0,
        retries: int = 1,
        max_failures_in_a_row: int = 16,
        on_error: Callable[[Sequence[Row], str], object] = lambda *_: None,
    ) -> None:
        """`on_error` is called after each failed attempt."""
        self._stream = stream
        self._consumer = consumer
        self._compute = compute
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_failures_in_a_row = max_failures_in_a_row
        self._on_error = on_error
        self._failures_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self.last_error = ""
        """Message of the newest failed attempt."""

    async def run(self) -> None:
        """Run until cancelled; unfinished rows are given back. An error of the stage fails the stream too."""
        workers = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            await cancel_and_wait(workers)

    def metrics(self) -> dict[str, float]:
        """`rows`, `batches`, `retries`, `failed_rows`, and `seconds` spent in `compute`."""
        return {**{name: float(count) for name, count in self._counts.items()}, "seconds": self._seconds}

    async def _work(self) -> None:
        name = self._consumer.name
        while True:
            rows = await self._stream.next_batch(name)
            try:
                columns = await self._attempt(rows)
            except BaseException:
                self._stream.give_back(name, rows)
                raise
            self._end(rows, columns)

    async def _attempt(self, rows: Sequence[Row]) -> Sequence[Mapping[str, Any]] | None:
        for attempt in range(1 + self._retries):
            self._counts["retries"] += attempt > 0
            began, deadline = time.monotonic(), asyncio.timeout(self._timeout_s)
            try:
                async with deadline:
                    columns = await self._compute(rows)
                if len(columns) != len(rows):
                    raise StreamError(f"{len(columns)} results for {len(rows)} rows")
                return columns
            except BaseException as error:
                if ends_this_task(error):
                    raise
                own = f"{type(error).__name__}: {error}"
                self.last_error = f"took longer than {self._timeout_s:g} s" if deadline.expired() else own
            finally:
                self._seconds += time.monotonic() - began
            self._on_error(rows, self.last_error)
        return None

    def _end(self, rows: Sequence[Row], columns: Sequence[Mapping[str, Any]] | None) -> None:
        name = self._consumer.name
        if columns is not None:
            for row, values in zip(rows, columns, strict=True):
                self._stream.write(name, row, values)
            self._failures_in_a_row = 0
            self._counts["rows"] += len(rows)
            self._counts["batches"] += 1
            return
        self._failures_in_a_row += 1
        self._counts["failed_rows"] += len(rows)
        if self._failures_in_a_row >= self._max_failures_in_a_row:  # before the loader sees what is dropped
            times = f"{self._failures_in_a_row} times in a row"
            self._stream.fail(StreamError(f"stage {name!r} failed {times}; the newest: {self.last_error}"))
        self._stream.drop(rows, f"stage_{name}_failed", whole_groups=self._consumer.whole_groups)
        self._stream.raise_failure()
