"""Metrics of a run: one JSON line per call of `log`, TensorBoard scalars, and what other systems get.

The constants below are the names that the progress line, the plot and the summary use.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from roll_flash.checked_files import DamagedFileError, decode, lines_of, open_checked
from roll_flash.monitor.exporters.export import Exports
from roll_flash.monitor.json_lines import JsonLinesFile, read_lines
from roll_flash.terminal import say

REWARD = "reward"
REWARD_MIN, REWARD_MAX = "reward_min", "reward_max"
"""Smallest and largest reward of a step."""
REWARD_STD_IN_GROUP = "reward_std_in_group"
"""Mean over the groups of a step; 0 if in each of them all replicas earned the same."""
SUCCESS = "success"
STALENESS_MEAN = "staleness_mean"
STALENESS_MAX = "staleness_max"
TOKENS_PER_S = "tokens_per_s"
STEP_S = "step_s"
KL_K3 = "kl_k3"
WEIGHTS_S = "weights/total_s"
"""Seconds in which all servers got new weights, one after another."""
LEARNER_IDLE = "idle/learner"
"""Fraction of the step in which the learner waited for episodes."""
SERVERS_IDLE = "idle/servers"
"""Fraction of the step in which the servers had no request."""
EVAL_SUCCESS = "eval/success"
EVAL_SUCCESS_LOW = "eval/success_low"
EVAL_SUCCESS_HIGH = "eval/success_high"
EVAL_REWARD = "eval/reward"
NOT_FINITE = "metrics/not_finite"

FILE_NAME = "metrics.jsonl"
TAIL_BYTES = 1 << 20
"""Bytes in which the newest lines of the metrics are looked for."""

_Number = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)] | float
"""As JSON has them; float64 does not hold larger integers exactly."""

Metrics = Mapping[str, Any]
"""Mapping of names to numbers; None is an unknown value."""


class MetricsLog:
    """Append to `metrics.jsonl` of a run folder. NaN and infinity become null and are counted, never invalid JSON."""

    def __init__(
        self, run_dir: Path, tensorboard: bool, *, resume_at: int | None = None, exports: Exports | None = None
    ) -> None:
        """`resume_at`: step from which the run continues; lines of later steps move to `metrics.jsonl.bak`. `exports`
        get the same values; whoever opened them closes them."""
        self.exports = exports or Exports({}, lambda _: None)
        path = run_dir / FILE_NAME
        if resume_at is not None:
            keep_steps_until(path, resume_at)
        self._file = JsonLinesFile(path)
        self._writer: Any = None
        if tensorboard:  # without torch's writer: importing torch takes seconds
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(run_dir / "tensorboard"))
            if resume_at is not None:  # later steps of before are not shown
                self._writer.add_event(Event(step=resume_at + 1, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.time()
        numbers = as_numbers(metrics)
        bad = sum(not math.isfinite(value) for value in numbers.values())
        counted: dict[str, Any] = {**({NOT_FINITE: bad} if bad else {}), **self.exports.metrics()}
        self._file.write({"step": step, "time": now, **numbers, **counted})
        self.exports.log(step, now, {**numbers, **counted})
        if self._writer is not None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            known = [Summary.Value(tag=name, simple_value=n) for name, n in numbers.items() if math.isfinite(n)]
            event = Event(step=step, wall_time=now, summary=Summary(value=known))
            with self._ending_without_room():
                self._writer.add_event(event)
                self._writer.flush()

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            with self._ending_without_room():
                self._writer.close()

    @contextmanager
    def _ending_without_room(self) -> Iterator[None]:
        """Write no more for TensorBoard once a disk refuses it: `metrics.jsonl` has all, and says if it cannot."""
        try:
            yield
        except OSError as error:
            self._writer = None
            say(f"TensorBoard gets no more metrics ({error.strerror or error}); the run goes on", error=True)


def as_numbers(metrics: Metrics) -> dict[str, float]:
    """Convert to floats; None becomes NaN. Raises TypeError for anything else that is no number."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise TypeError(f"metric {name!r} must be a number, not {value!r}") from None
    return numbers


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl` (or of a run folder's), in the order they were logged; null values stay None. Raises
    DamagedFileError for a line that is none."""
    file = path / FILE_NAME if path.is_dir() else path
    rows = list(read_lines(file, dict[str, _Number | None]))
    _require_steps(file, rows)
    return rows


def _require_steps(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    for number, row in enumerate(rows, start=1):
        if not isinstance(step := row.get("step"), int) or step < 0:
            raise DamagedFileError(f"{path}, line {number}: its step is {step!r:.60}; remove that line to read on")


def newest_step(run_dir: Path) -> int:
    """Return the newest step of a run by the end of its metrics, 0 without one. Damaged lines are left out."""
    try:
        with open_checked(run_dir / FILE_NAME) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            steps = [_step_of(line) for line in file.read(TAIL_BYTES).splitlines()]
    except OSError:
        return 0
    return max((step for step in steps if step is not None), default=0)


def series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged and finite. The last value of a step counts."""
    found = {int(row["step"]): float(row[name]) for row in rows if row.get(name) is not None}
    return list(found), list(found.values())


def keep_steps_until(path: Path, step: int) -> None:
    """Move lines of steps after `step` to `<path>.bak` (appended), and damaged ones, which is said."""
    if not path.exists():
        return
    with open_checked(path) as file:
        lines = [(line, _step_of(line)) for line in lines_of(file) if line.endswith(b"\n")]
    moved = [line for line, at in lines if at is None or at > step]
    if not moved:
        return
    backup = path.with_name(path.name + ".bak")
    with closing(JsonLinesFile(backup)) as aside:
        for line in moved:
            aside.write_line(line[:-1])
    rewritten = path.with_name(path.name + ".new")
    rewritten.write_bytes(b"".join(line for line, at in lines if at is not None and at <= step))
    rewritten.replace(path)
    if damaged := sum(at is None for _, at in lines):
        say(f"{path}: {damaged} damaged lines are now in {backup.name}", error=True)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None if it is damaged."""
    try:
        step = decode(line, dict[str, Any])["step"]
    except (ValueError, KeyError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
