"""Asynchronous stages: reward models, judges, reference and proximal log-probabilities.

A stage is a consumer of some columns that writes others. It works beside everything else; rows go on to whoever needs
its columns the moment they are written.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from roll_flash.errors import StreamError, StreamStarvedError
from roll_flash.processes.background import ends_this_task
from roll_flash.stream.rows import Batch, Columns
from roll_flash.stream.stream import TrajectoryStream

Compute = Callable[[Batch], Awaitable[Sequence[Columns]]]
"""The new columns of each row of a batch, in its order."""


class Stage:
    """Runs `compute` on batches of the stream's consumer `name`, `concurrency` of them at a time.

    An attempt that raises or takes longer than `timeout_s` is repeated up to `retries` times; then the
    rows are dropped as `stage_NAME_failed` and counted. After `max_failures_in_a_row` such batches the stage gives up
    and raises StreamError: dropping everything is not training.
    """

    def __init__(
        self,
        stream: TrajectoryStream,
        name: str,
        compute: Compute,
        *,
        concurrency: int = 1,
        timeout_s: float = 60.0,
        retries: int = 1,
        max_failures_in_a_row: int = 16,
        on_error: Callable[[Batch, str], object] = lambda *_: None,
    ) -> None:
        """`on_error` hears of every failed attempt."""
        self._stream = stream
        self._name = name
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
        """What the newest failed attempt said."""

    async def run(self) -> None:
        """Until the stream is sealed and everything done. Cancel it to stop: what is unfinished is given back."""
        workers = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def metrics(self) -> dict[str, float]:
        """`rows`, `batches`, `retries`, `failed_rows`, and `seconds` spent in `compute`."""
        return {**{name: float(count) for name, count in self._counts.items()}, "seconds": self._seconds}

    async def _work(self) -> None:
        while True:
            try:
                batch = await self._stream.next_batch(self._name)
            except StreamStarvedError:
                continue  # a stage may idle for as long as the run does; the run's watchdog judges that
            if batch is None:
                return
            try:
                done = await self._attempt(batch)
            except BaseException:
                await self._stream.give_back(batch)
                raise
            await self._end(batch, done)

    async def _attempt(self, batch: Batch) -> bool:
        for attempt in range(1 + self._retries):
            self._counts["retries"] += attempt > 0
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    columns = await self._compute(batch)
                await self._stream.write(batch.row_ids, columns)
                return True
            except BaseException as error:
                if ends_this_task(error):
                    raise
                own = f"{type(error).__name__}: {error}"
                self.last_error = f"took longer than {self._timeout_s:g} s" if deadline.expired() else own
            finally:
                self._seconds += time.monotonic() - began
            self._on_error(batch, self.last_error)
        return False

    async def _end(self, batch: Batch, done: bool) -> None:
        if done:
            self._failures_in_a_row = 0
            self._counts["rows"] += len(batch)
            self._counts["batches"] += 1
            await self._stream.release(batch)
            return
        self._failures_in_a_row += 1
        self._counts["failed_rows"] += len(batch)
        await self._stream.drop(batch, f"stage_{self._name}_failed")
        if self._failures_in_a_row >= self._max_failures_in_a_row:
            error = StreamError(
                f"stage {self._name!r} failed {self._failures_in_a_row} times in a row; the newest: {self.last_error}"
            )
            self._stream.fail(error)
            raise error
